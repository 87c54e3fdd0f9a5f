"""LoRA against full fine-tuning: what a training step of each family takes, memory beside the plan's estimate, and time.

    python -m bench.lora                           # on a quiet machine: about a minute
    python -m bench.lora times=false               # memory alone, also on a busy machine

The step, its cases and how memory is measured are those of bench.families. Each case is measured twice, in processes of its
own: all weights are trained, and an adapter of the family's own layers is. Without Composer, EMA and clipping, in fp32.
Exit code: 0, 1 when a case fails, 2 when the command cannot be read.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from bench.command import ends, head, read_keys, write_record
from bench.contest import rounded
from bench.families import CASES, Case, Step, add_between, run_of
from cli import later
from cli.command import command
from cli.errors import Failed
from cli.limits import limited
from config import as_written
from data import SyntheticBatches
from reports.tables import text_of
from training import adapter
from training.cost import available_gib, measure_cost
from training.device import build_device
from training.optimizer import build_optimizer
from training.run_config import RunConfig, build_for_training
from zoo import load_family
from zoo.lora import LoraConfig

SCHEMA = 1
WAYS = ("full", "lora")


@dataclass(frozen=True)
class LoraBenchConfig:
    """The keys of this command."""

    rank: int = limited(4, 1, 64)
    """Rank of the adapters."""
    times: bool = True
    """Also measure times of the tiny ones."""
    steps: int = limited(5, 1, 1000)
    """Steps of a round."""
    rounds: int = limited(5, 1)
    """Rounds of each case; the first step of a process is beside them."""
    largest_gib: float = limited(10.0, 0.0, 1e4)
    """Cases whose full fine-tuning takes more by the plan's estimate are left out, GiB."""
    results: str = "reports/results/lora_cpu.json"
    """File of the record; an earlier one is replaced."""


def run_for(case: Case, config: LoraBenchConfig, way: str) -> RunConfig:
    """Return the run whose step is measured."""
    run = run_of(case, compiled=False)
    if way == "full":
        return run
    targets = load_family(case.family, case.preset, "stock").lora_targets
    return dataclasses.replace(run, lora=LoraConfig(config.rank).resolved(targets))


def measure(case: Case, config: LoraBenchConfig, way: str) -> dict[str, Any]:
    """Train some steps; return what the process held, and the times. In a process of its own."""
    add_between()
    torch.set_num_threads(1)
    run, has_times = run_for(case, config, way), config.times and case.has_times
    assert run.precision is not None
    if run.lora.is_given:
        later.load("peft")  # a library, and no part of the model
    device, before = build_device(run.precision), psutil.Process().memory_info().rss
    model = build_for_training(run, [])
    if run.lora.is_given:
        adapter.add(model, run.lora, base=None, seed=run.seed, precision=run.precision)
    model.place(device._device, run.precision)  # type: ignore[arg-type]  # declared None, and set in each kind
    optimizer = build_optimizer(run.optimizer, model, run.global_batch_size)
    batch = next(iter(SyntheticBatches(run.data.columns(model.family, run.size), case.batch_size, model.device, 0)))
    step = Step(model, optimizer, batch)
    step.take(1)
    rounds = [step.take(config.steps) for _ in range(config.rounds)] if has_times else [step.take(1)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found: dict[str, Any] = {f"{way}_gib": rounded((peak - before) / 2**30)}
    if has_times:
        for name, values in zip(("ms", "cpu_ms"), zip(*rounds, strict=True), strict=True):
            spread = {"": statistics.median(values), "_min": min(values), "_max": max(values)}
            found |= {f"{way}_{name}{end}": rounded(1e3 * value) for end, value in spread.items()}
    return found


def alone(case: Case, config: LoraBenchConfig, way: str) -> dict[str, Any]:
    """Measure in a new process. Raises Failed."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        try:
            return pool.submit(measure, case, config, way).result()
        except Exception as error:
            raise Failed(f"lora: {case.name}, {way}, failed: {type(error).__name__}: {error}") from error


def measured(case: Case, config: LoraBenchConfig) -> dict[str, Any]:
    """Return a case's row of the record."""
    row: dict[str, Any] = {"case": case.name, "what": case.what, "image_size": case.side, "batch_size": case.batch_size}
    for way in WAYS:
        run = run_for(case, config, way)
        lora = (run.lora.rank, tuple(run.lora.targets or ())) if run.lora.rank else None
        has: dict[str, Any] = dict(stage="moments", stored_text=True, has_encoders=False, lora=lora)
        cost = measure_cost(run.model, run.objective, size=run.size, precision="fp32", **has)
        row[f"{way}_parameters"] = cost.trained_parameters
        row[f"{way}_estimated_gib"] = rounded(cost.memory_gib(case.batch_size, ema=False))
    room = min(config.largest_gib, 0.8 * available_gib()[0])
    if row["full_estimated_gib"] > room:
        return row | {"left_out": f"{row['full_estimated_gib']:.1f} GiB by estimate, {room:.1f} at most"}
    for way in WAYS:
        row |= alone(case, config, way)
    return row


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(LoraBenchConfig, argv)
    if config is None:
        return 0
    began = time.monotonic()
    record: dict[str, Any] = {**head(SCHEMA), "measured": "lora", "config": as_written(config)}
    add_between()
    record["cases"] = [measured(case, config) for case in CASES]
    record |= ends(began)
    write_record(config.results, record)
    print(text_of(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
