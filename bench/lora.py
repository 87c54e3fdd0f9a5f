"""LoRA against full fine-tuning: what a training step of each family takes, memory beside the plan's estimate, and time.

    python -m bench.lora                           # on a quiet machine: about a minute
    python -m bench.lora times=false               # memory alone, also on a busy machine

The step, its cases and how memory is measured are those of bench.families. Each case is measured twice, in processes of its
own: all weights are trained, and an adapter of the family's own layers is. Without Composer, EMA and clipping, in fp32.
Exit code: 0, 1 when a case fails, 2 when the command cannot be read.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.command import in_a_process, keep, read_keys
from bench.contest import rounded
from bench.families import CASES, Case, add_between, estimate_of, left_out, measure, row_of, run_of
from cli.command import command
from cli.limits import limited
from training.run_config import RunConfig
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


def measured(case: Case, config: LoraBenchConfig) -> dict[str, Any]:
    """Return a case's row of the record."""
    row, runs = row_of(case), {way: run_for(case, config, way) for way in WAYS}
    for way, run in runs.items():
        cost = estimate_of(run)
        row[f"{way}_parameters"] = cost.trained_parameters
        row[f"{way}_estimated_gib"] = rounded(cost.memory_gib(case.batch_size, ema=False))
    if why := left_out(row["full_estimated_gib"], config.largest_gib):
        return row | why
    rounds = config.rounds if config.times and case.has_times else 0
    for way, run in runs.items():
        found = in_a_process(f"lora: {case.name}, {way}", measure, case, run, config.steps, rounds)
        row |= {f"{way}_{key}": value for key, value in found.items()}
    return row


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(LoraBenchConfig, argv)
    if config is not None:
        add_between()
        keep(config.results, SCHEMA, "lora", config, lambda: {"cases": [measured(each, config) for each in CASES]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
