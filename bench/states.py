"""What a step takes by the kind of weights and moments: memory that a process holds, beside the plan's estimate.

    python -m bench.states                         # some minutes; moments in 8 bits need torchao

Each kind is measured in a process of its own, on bench.families' SDXL between tiny and full: some steps from moments and text
states, without Composer, EMA and clipping. The memory is the most that the process held (RSS), less what it held with its
libraries loaded. Images are small: nearly all of it is weights, gradients and moments. Its time a step is kept too; on
a busy machine it means nothing.
Exit code: 0, 1 when a case fails, 2 when the command cannot be read.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.command import in_a_process, keep, read_keys
from bench.contest import rounded
from bench.families import BETWEEN, Case, add_between, estimate_of, measure, row_of, run_of
from cli.command import command
from cli.limits import limited
from training.run_config import RunConfig

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


def measured(precision: str, states: str, config: StatesConfig) -> dict[str, Any]:
    """Return a row of the record. Raises Failed."""
    run = run_with(precision, states)
    cost = estimate_of(run)
    kinds = cost.memory_by_kind(CASE.batch_size, ema=False)
    row: dict[str, Any] = {"precision": precision, "states": states, "parameters": cost.trained_parameters}
    row |= {"estimated_gib": rounded(sum(kinds.values())), "kinds": {kind: rounded(gib) for kind, gib in kinds.items()}}
    if states == "8bit" and importlib.util.find_spec("torchao") is None:
        return row | {"left_out": "torchao is not installed"}
    return row | in_a_process(f"states: {precision}, {states}", measure, CASE, run, config.steps, 1)


def rows(config: StatesConfig) -> Iterator[dict[str, Any]]:
    """Measure each kind in turn."""
    for precision, states in WAYS:
        yield measured(precision, states, config)


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(StatesConfig, argv)
    if config is not None:
        add_between()
        keep(config.results, SCHEMA, "states", config, lambda: {**row_of(CASE), "states": list(rows(config))})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
