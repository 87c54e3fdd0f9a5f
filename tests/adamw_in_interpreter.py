"""Run training/adamw_kernel.py in Triton's interpreter beside the steps in PyTorch: prints a line of JSON for each case.

TRITON_INTERPRET=1 has to be there before Triton is imported, so tests/test_adamw_kernel.py starts this as a process.
"""

from __future__ import annotations

import itertools
import json
import math

import torch
from torch import nn
from triton.runtime.interpreter import InterpreterBuilder

from training import adamw_kernel, low_memory_adamw
from training.low_memory_adamw import BLOCK, SMALL, SmallAdamW

moved = {"read": 0, "written": 0}
# On a CPU torch takes MKL's root, which is off by a last bit for one number in six; on a GPU, and here, it is exact.
torch.Tensor.sqrt = lambda tensor: tensor.double().pow(0.5).float()


def counted(name: str, kind: str) -> None:
    original = getattr(InterpreterBuilder, name)

    def count(self, *words):
        mask = words[2 if kind == "written" else 1].data
        moved[kind] += int(mask.sum()) * (words[0].get_element_ty().primitive_bitwidth // 8)
        return original(self, *words)

    setattr(InterpreterBuilder, name, count)


def by_kernel(optimizer: SmallAdamW, weights: nn.Parameter) -> None:
    """The step of `_update`, as on a GPU."""
    state = optimizer.state[weights]
    if not state:
        state.update(optimizer.begin_state(weights))
    state["step"] += 1
    step, group = int(state["step"]), optimizer.param_groups[0]
    moments = {name: value for name, value in state.items() if name != "step"}
    keys = optimizer._keys(weights, 0, step) if optimizer.stochastic else None
    tables = optimizer._tables_on(weights.device)
    factors = low_memory_adamw._factors(step, group)
    flat, gradients = weights.detach().view(-1), weights.grad.view(-1)
    adamw_kernel.update(flat, gradients, moments, tables, factors, keys)


def compare(num: int, states: str, dtype: torch.dtype, stochastic: bool, has_odd: bool = False) -> dict:
    generator = torch.Generator().manual_seed(num)
    start = torch.randn(num, generator=generator).to(dtype)
    both = [nn.Parameter(start.clone()) for _ in range(2)]
    options = dict(lr=0.01, betas=(0.9, 0.99), eps=1e-8, states=states, stochastic=stochastic, seed=3)
    optimizers = [SmallAdamW([{"params": [weights], "weight_decay": 0.1}], **options) for weights in both]
    for _ in range(3):
        gradient = torch.randn(num, generator=generator) * 10.0 ** torch.randint(-9, 3, (num,), generator=generator)
        gradient[::7] = 0.0
        if has_odd:
            gradient[5], gradient[300] = math.nan, math.inf
        for weights in both:
            weights.grad = gradient.to(dtype)
        optimizers[0].step()
        moved.update(read=0, written=0)
        by_kernel(optimizers[1], both[1])
    one, other = ({"weights": w, **optimizer.state[w]} for w, optimizer in zip(both, optimizers, strict=True))
    differ = [name for name in one if not torch.equal(one[name].nan_to_num(7.0), other[name].nan_to_num(7.0))]
    kept = {name: value for name, value in one.items() if name != "step"}
    least = 2 * sum(value.nbytes for value in kept.values()) + both[0].grad.nbytes
    return {"case": f"{num} {states} {dtype} {stochastic}", "differ": differ, "moved": dict(moved), "least": least}


def main() -> None:
    counted("create_masked_load", "read")
    counted("create_masked_store", "written")
    kinds = (torch.float32, torch.bfloat16)
    for num, states, dtype, stochastic in itertools.product((1, SMALL + 77), ("fp32", "bf16"), kinds, (True, False)):
        print(json.dumps(compare(num, states, dtype, stochastic)), flush=True)
    for num, dtype in itertools.product((SMALL, SMALL + BLOCK * 3), kinds):
        print(json.dumps(compare(num, "8bit", dtype, True)), flush=True)
    for states in ("bf16", "8bit"):
        print(json.dumps(compare(SMALL, states, torch.bfloat16, True, has_odd=True)), flush=True)


if __name__ == "__main__":
    main()
