"""What a step takes by the kind of weights and moments: memory that a process holds, beside the plan's estimate.

    python -m bench.states                         # some minutes; moments in 8 bits need torchao

Each kind is measured in a process of its own, on bench.families' SDXL between tiny and full: some steps from moments and text
states, without Composer, EMA and clipping. The memory is the most that the process held (RSS), less what it held with its
libraries loaded. Images are small: nearly all of it is weights, gradients and moments. Its time a step is kept too; on
a busy machine it means nothing.
Exit code: 0, 1 when a case fails, 2 when the command cannot be read.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from bench.command import ends, head, read_keys, write_record
from bench.contest import rounded
from bench.families import BETWEEN, Case, Step, add_between, run_of
from cli.command import command
from cli.errors import Failed
from cli.limits import limited
from config import as_written
from data import SyntheticBatches
from reports.tables import text_of
from training import speed
from training.cost import Cost, measure_cost
from training.device import build_device
from training.optimizer import build_optimizer
from training.run_config import RunConfig, build_for_training

SCHEMA = 1
CASE = Case("sdxl", BETWEEN, 64, "0.6 of its width, 4 of 10 layers in its deepest blocks", 1, False)
WAYS = (("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "8bit"), ("bf16_params", "bf16"), ("bf16_params", "8bit"))
"""precision, optimizer.states."""


@dataclass(frozen=True)
class StatesConfig:
    """The keys of this command."""

    steps: int = limited(3, 1, 1000)
    """Steps of each case; the first is beside them."""
    results: str = "reports/results/states_cpu.json"
    """File of the record; an earlier one is replaced."""


def run_with(precision: str, states: str) -> RunConfig:
    """Return the run whose step is measured."""
    run = run_of(CASE, compiled=False)
    return replace(run, precision=precision, optimizer=replace(run.optimizer, states=states))


def estimate_of(run: RunConfig) -> Cost:
    """Trace the step."""
    has: dict[str, Any] = dict(stage="moments", stored_text=True, has_encoders=False)
    assert run.precision is not None
    cost = measure_cost(run.model, run.objective, size=run.size, precision=run.precision, **has)
    return replace(cost, states=run.optimizer.states)


def measure(precision: str, states: str, steps: int) -> dict[str, Any]:
    """Train some steps; return what the process held, and seconds a step. In a process of its own."""
    add_between()
    torch.set_num_threads(1)
    run = run_with(precision, states)
    build_optimizer(run.optimizer, torch.nn.Linear(1, 1), 1)  # what it imports is no part of a step
    device, before = build_device(precision), psutil.Process().memory_info().rss
    model = build_for_training(run, [])
    model.place(device._device, precision)  # type: ignore[arg-type]  # declared None, and set in each kind
    speed.apply(model, run, precision)
    optimizer = build_optimizer(run.optimizer, model, run.global_batch_size)
    batch = next(iter(SyntheticBatches(run.data.columns(model.family, run.size), CASE.batch_size, model.device, 0)))
    step = Step(model, optimizer, batch)
    step.take(1)
    seconds, _ = step.take(steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"gib": rounded((peak - before) / 2**30), "step_sec": rounded(seconds)}


def measured(precision: str, states: str, config: StatesConfig) -> dict[str, Any]:
    """Return a row of the record. Raises Failed."""
    cost = estimate_of(run_with(precision, states))
    kinds = cost.memory_by_kind(CASE.batch_size, ema=False)
    row: dict[str, Any] = {"precision": precision, "states": states, "parameters": cost.trained_parameters}
    row |= {"estimated_gib": rounded(sum(kinds.values())), "kinds": {kind: rounded(gib) for kind, gib in kinds.items()}}
    if states == "8bit" and importlib.util.find_spec("torchao") is None:
        return row | {"left_out": "torchao is not installed"}
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return row | pool.submit(measure, precision, states, config.steps).result()
        except Exception as error:
            raise Failed(f"states: {precision}, {states}, failed: {type(error).__name__}: {error}") from error


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(StatesConfig, argv)
    if config is None:
        return 0
    began = time.monotonic()
    record: dict[str, Any] = {**head(SCHEMA), "measured": "states", "config": as_written(config)}
    record |= {"case": CASE.name, "what": CASE.what, "image_size": CASE.side, "batch_size": CASE.batch_size}
    add_between()
    record["states"] = [measured(*way, config) for way in WAYS]
    record |= ends(began)
    write_record(config.results, record)
    print(text_of(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
