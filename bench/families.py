"""What a training step of each family takes: memory beside the plan's estimate, and time, eager and compiled.

    python -m bench.families                       # on a quiet machine: some minutes, most of them compiling
    python -m bench.families times=false           # memory alone, also on a busy machine

Each case is measured in processes of its own: the preset tiny of each family, and `between`, larger ones
that are built here from the same code. A batch has moments and text states, so no encoder is built. The step is the model's
loss, its backward pass and fused AdamW, in fp32, without Composer, EMA and clipping.

    memory    the most that the process held (RSS), less what it held with its libraries loaded, before the model was built;
              beside it what `--print_config` says for the same step
    time      ms a step by the clock and of the processor, eager and with compile=whole; the first step is by itself

Cases whose estimate is above largest_gib, or above what is free, are left out and said so.
Exit code: 0, 1 when a case fails, 2 when the command cannot be read.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from bench.command import in_a_process, keep, read_keys
from bench.contest import rounded
from cli import later
from cli.command import command
from cli.limits import limited
from data import DataConfig, SyntheticBatches
from model import LatentDiffusion, step_seed
from training import adapter, speed
from training.cost import Cost, available_gib, measure_cost
from training.device import build_device
from training.optimizer import build_optimizer
from training.run_config import RunConfig, build_for_training, resolve
from zoo import flux, sdxl
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig

SCHEMA = 1
BETWEEN = "between"


@dataclass(frozen=True)
class Case:
    """A network and the side of its pictures, px."""

    family: str
    preset: str
    side: int
    what: str
    """Of the preset, for the table."""
    batch_size: int
    has_times: bool
    """Its times are measured too."""
    num_frames: int | None = None
    """Of videos."""

    @property
    def name(self) -> str:
        return f"{self.family}_{self.preset}"


CASES = (
    Case("sd2", "tiny", 64, "tiny", 8, True),
    Case("sdxl", "tiny", 64, "tiny", 8, True),
    Case("flux", "tiny", 64, "tiny", 8, True),
    Case("mochi", "tiny", 64, "tiny", 2, True, 7),
    Case("hunyuan_video", "tiny", 64, "tiny", 2, True, 9),
    Case("wan", "tiny", 64, "tiny", 2, True, 9),
    Case("sdxl", BETWEEN, 256, "0.6 of its width, 4 of 10 layers in its deepest blocks", 1, False),
    Case("flux", BETWEEN, 256, "1 of 19 and 1 of 38 blocks", 1, False),
)


@dataclass(frozen=True)
class FamiliesConfig:
    """The keys of this command."""

    times: bool = True
    """Also measure times of the tiny ones, eager and compiled."""
    steps: int = limited(5, 1, 1000)
    """Steps of a round."""
    rounds: int = limited(5, 1)
    """Rounds of each case; the first step of a process is beside them."""
    largest_gib: float = limited(10.0, 0.0, 1e4)
    """Cases that take more by the plan's estimate are left out, GiB."""
    results: str = "reports/results/families_cpu.json"
    """File of the record; an earlier one is replaced."""


def add_between() -> None:
    """Give SDXL and FLUX.1 a preset between tiny and full, in this process."""
    widths = dict(block_out_channels=(192, 384, 640), attention_head_dim=(3, 6, 10))
    of_sdxl = {**sdxl.FULL.unet, **widths, "transformer_layers_per_block": (1, 2, 4)}
    sdxl.PRESETS[BETWEEN] = replace(sdxl.FULL, unet=of_sdxl)
    of_flux = {**flux.FULL.transformer, "num_layers": 1, "num_single_layers": 1}
    flux.PRESETS[BETWEEN] = replace(flux.FULL, transformer=of_flux)


def run_of(case: Case, compiled: bool) -> RunConfig:
    """Return the run whose step is measured."""
    return resolve(
        RunConfig(
            run_name="families",
            global_batch_size=case.batch_size,
            image_size=case.side,
            num_frames=case.num_frames,
            precision="fp32",
            compile="whole" if compiled else "off",
            model=ModelConfig(case.family, case.preset, weights="random"),
            objective=ObjectiveConfig(),
            data=DataConfig(stage="moments", text="stored", synthetic=True),
        )
    )


def measure(case: Case, run: RunConfig, steps: int, rounds: int) -> dict[str, Any]:
    """Train some steps; return what the process held, GiB, and the times, ms. In a process of its own.

    Args:
        run: its model without encoders, with or without an adapter.
        rounds: of so many steps each; 0: no times.
    """
    add_between()
    assert run.precision is not None
    build_optimizer(run.optimizer, torch.nn.Linear(1, 1), 1)  # libraries are no part of a step: torchao, and peft
    if run.lora.is_given:
        later.load("peft")
    device, before = build_device(run.precision), psutil.Process().memory_info().rss
    model = build_for_training(run, [])
    if run.lora.is_given:
        adapter.add(model, run.lora, base=None, seed=run.seed, precision=run.precision)
    model.place(device._device, run.precision)  # type: ignore[arg-type]  # declared None, and set in each kind
    speed.apply(model, run, run.precision)
    optimizer = build_optimizer(run.optimizer, model, run.global_batch_size)
    batch = next(iter(SyntheticBatches(run.data.columns(model.family, run.size), case.batch_size, model.device, 0)))
    step = Step(model, optimizer, batch)
    first_sec, graphs = step.take(1)[0], speed.num_graphs()
    times = [step.take(steps) for _ in range(rounds)] or [step.take(1)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found: dict[str, Any] = {"gib": rounded((peak - before) / 2**30), "first_step_sec": rounded(first_sec)}
    if rounds:
        for name, values in zip(("ms", "cpu_ms"), zip(*times, strict=True), strict=True):
            spread = {"": statistics.median(values), "_min": min(values), "_max": max(values)}
            found |= {f"{name}{end}": rounded(1e3 * value) for end, value in spread.items()}
    if run.compile != "off":
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        found |= {"graphs": graphs, "later_graphs": speed.num_graphs() - graphs, "graph_breaks": breaks}
    return found


class Step:
    """A step of training on one batch, again and again."""

    def __init__(self, model: LatentDiffusion, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]):
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.number = 0

    def take(self, num: int) -> tuple[float, float]:
        """Train some steps; return seconds a step by the clock, and of the processor."""
        began, of_processor = time.perf_counter(), time.process_time()
        for _ in range(num):
            generator = torch.Generator(self.model.device).manual_seed(step_seed(0, self.number, 0))
            batch = self.model.draw(self.batch, generator)
            self.model.loss(self.model(batch), batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.number += 1
        return (time.perf_counter() - began) / num, (time.process_time() - of_processor) / num


def estimate_of(run: RunConfig) -> Cost:
    """Trace the step, anew: a kept cost knows no `between`."""
    assert run.precision is not None
    has: dict[str, Any] = dict(stage="moments", stored_text=True, has_encoders=False)
    lora = (run.lora.rank, tuple(run.lora.targets or ())) if run.lora.rank else None
    cost = measure_cost(run.model, run.objective, size=run.size, precision=run.precision, lora=lora, **has)
    return replace(cost, states=run.optimizer.states)


def row_of(case: Case) -> dict[str, Any]:
    """Return what a row of the record begins with."""
    frames = {} if case.num_frames is None else {"num_frames": case.num_frames}
    return {"case": case.name, "what": case.what, "image_size": case.side, **frames, "batch_size": case.batch_size}


def left_out(estimate_gib: float, largest_gib: float) -> dict[str, str]:
    """Say why a case is left out; {}: it is not."""
    room = min(largest_gib, 0.8 * available_gib()[0])
    return {} if estimate_gib <= room else {"left_out": f"{estimate_gib:.1f} GiB by estimate, {room:.1f} at most"}


def measured(case: Case, config: FamiliesConfig) -> dict[str, Any]:
    """Return a case's row of the record."""
    run = run_of(case, compiled=False)
    cost = estimate_of(run)
    estimate = cost.memory_gib(case.batch_size, ema=False)
    row = row_of(case) | {"parameters": cost.trained_parameters, "estimated_gib": rounded(estimate)}
    if why := left_out(estimate, config.largest_gib):
        return row | why
    rounds = config.rounds if config.times and case.has_times else 0
    row |= in_a_process(f"families: {case.name}, eager", measure, case, run, config.steps, rounds)
    if rounds:
        what, compiled = f"families: {case.name}, compiled", run_of(case, compiled=True)
        found = in_a_process(what, measure, case, compiled, config.steps, rounds)
        row |= {f"compiled_{key}": value for key, value in found.items()}
    return row


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(FamiliesConfig, argv)
    if config is not None:
        add_between()
        keep(config.results, SCHEMA, "families", config, lambda: {"cases": [measured(each, config) for each in CASES]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
