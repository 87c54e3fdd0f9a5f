"""A step of AdamW with smaller weights and moments: the kernel, the same in PyTorch's operators, and torch's own in float32.

    python -m bench.optimizer                                          # -> runs/bench/optimizer.json
    python -m bench.optimizer num_parameters=1000000000                # on a GPU

The tensors are matrices of 3,072 x 3,072, as FLUX.1 has them. Contestants:

    torch_fp32                       torch.optim.AdamW(fused=True), weights and moments in float32
    operators_bf16, operators_8bit   bfloat16 weights, moments in bf16 or 8 bits: training/low_memory_adamw.py without Triton
    kernel_bf16, kernel_8bit         the same with training/adamw_kernel.py, on a GPU

A turn is the fastest of some steps, ms. `gb_per_sec` is the memory that a step has to move, over that time: what the weights,
gradients and moments take to be read and written once.
Exit code: 0, or 2 if the command cannot be read.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.command import Figures, measure_and_record, rounded, take_turns
from common.command import command
from common.value_types import limited
from training.low_memory_adamw import BYTES_OF_STATES, SmallAdamW, has_triton

SIDE = 3072
STEPS_A_TURN = 5
LR, BETAS, EPS = 1e-4, (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class OptimizerBenchConfig:
    """The keys of this command."""

    num_parameters: int = limited(10_000_000, SIDE**2)
    """About how many parameters there are."""
    rounds: int = limited(5, 1)
    """Turns of each contestant."""
    results: str = "runs/bench/optimizer.json"
    """File of the record; an earlier one is replaced."""


def _turn(name: str, num: int, device: torch.device) -> float:
    """Build a contestant, and return the fastest of its steps, ms. It is released again: a card holds one."""
    kind, states = name.split("_")
    dtype = torch.float32 if kind == "torch" else torch.bfloat16
    weights = [nn.Parameter(torch.zeros(SIDE, SIDE, dtype=dtype, device=device)) for _ in range(num)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer: torch.optim.Optimizer
    if kind == "torch":
        optimizer = torch.optim.AdamW(weights, lr=LR, betas=BETAS, eps=EPS, fused=True)
    else:
        optimizer = SmallAdamW([{"params": weights, "weight_decay": 0.01}], lr=LR, betas=BETAS, eps=EPS, states=states)
        optimizer.has_kernel = kind == "kernel"
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    optimizer.step()  # makes the moments, and compiles the kernel
    for _ in range(STEPS_A_TURN):
        synchronize()
        began = time.perf_counter()
        optimizer.step()
        synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def measure(config: OptimizerBenchConfig) -> dict[str, Any]:
    """Let the contestants alternate, and return the figures."""
    device, figures = torch.device("cuda" if torch.cuda.is_available() else "cpu"), Figures()
    num = round(config.num_parameters / SIDE**2)
    names = ["torch_fp32", "operators_bf16", "operators_8bit"]
    if device.type == "cuda" and has_triton():
        names += ["kernel_bf16", "kernel_8bit"]
    turns = {name: functools.partial(_turn, name, num, device) for name in names}
    for name, values in take_turns(turns, config.rounds).items():
        figures.add(f"{name}_ms", values)
        states = name.split("_")[1]
        least = (12 if states == "fp32" else 6) + 2 * BYTES_OF_STATES[states]
        figures.flat[f"{name}_gb_per_sec"] = rounded(num * SIDE**2 * least / figures.flat[f"{name}_ms"] / 1e6)
    for states in ("bf16", "8bit") if "kernel_bf16" in names else ():
        figures.ratio(f"speedup_{states}", f"operators_{states}_ms", f"kernel_{states}_ms")
    figures.flat["trained_parameters"] = num * SIDE**2
    return figures.as_record()


@command(keys=OptimizerBenchConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return measure_and_record("optimizer", OptimizerBenchConfig, argv, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
