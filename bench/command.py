"""What the measuring commands share: their keys, contestants that alternate, and the record.

A figure is the median over the rounds, with the least and the greatest. A ratio is the median of the ratios within each
round, never a ratio of medians: two contestants of one round ran on the machine in the same state.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.command_line import Problem, parse_command_line
from common.files import write_atomic, write_problem
from config import load, to_written_dict, to_yaml
from reports.formatting import about
from reports.tables import TABLES, text_of
from run_folder.environment import environment

Config = TypeVar("Config")
SCHEMA = 1


def read_keys(
    schema: type[Config],
    argv: Sequence[str],
    check: Callable[[Config], Sequence[Problem]] = lambda config: [],
) -> Config | None:
    """Return a command's configuration, or None if --print_config asked for it."""
    command_line = parse_command_line(argv, {})
    config = load(schema, command_line, check=lambda config: [*check(config), *_path_problems(config)])
    if command_line.print_config:
        print(to_yaml(config), end="")
        return None
    return config


def _path_problems(config: Any) -> list[Problem]:
    """Check what would fail only after minutes: the record's file, and the folder for temporary files."""
    results, work = Path(config.results), getattr(config, "work", None)
    texts = {
        "results": f"{results} is a folder. Give a file in it." if results.is_dir() else write_problem(results.parent)
    }
    if work is not None:
        is_folder = Path(work).is_dir()
        texts["work"] = write_problem(work) if is_folder else f"no folder {work}. Make it, or leave it out."
    return [Problem(f"{key}: {text}", (key,)) for key, text in texts.items() if text]


def head() -> dict[str, Any]:
    """Return the head of a record: its schema, when and where it was made, and how busy the machine was."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **environment(),
        "num_cpus": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def measure_and_record(
    measured: str,
    schema: type[Config],
    argv: Sequence[str],
    measure: Callable[[Config], Mapping[str, Any]],
    check: Callable[[Config], Sequence[Problem]] = lambda config: [],
) -> int:
    """Run a command: read its keys, measure, write the record, and print it, as its table or a line for each figure.

    Args:
        measured: the command's name.
        schema: its keys; `results` is the record's file, which is replaced.
        measure: returns the rest of the record.
    """
    config: Any = read_keys(schema, argv, check)
    if config is None:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interrupt: temporary folders are removed first
    began = time.monotonic()
    record = {**head(), "measured": measured, "config": to_written_dict(config), **measure(config)}
    record["load_average_after"] = round(os.getloadavg()[0], 2)
    record["seconds"] = round(time.monotonic() - began, 1)
    write_record(config.results, record)
    if measured in TABLES:
        print(text_of(record))
        return 0
    print(about(record))
    for key in (key for key in record if f"{key}_min" in record):
        print("{}: {:,.4g} ({:,.4g} to {:,.4g})".format(key, *(record[f"{key}{end}"] for end in ("", "_min", "_max"))))
    return 0


def write_record(path: str, record: Mapping[str, Any]) -> None:
    """Write a record, replacing an earlier one."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), json.dumps(record, indent=2, allow_nan=False) + "\n")


# --- contestants ---


def take_turns(
    contestants: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Return name -> one value a round; each round another contestant is first.

    Args:
        contestants: name -> one turn, which measures itself and returns its value.
        warm_up: one more round goes before the others and is thrown away.
    """
    values: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(-warm_up, rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            value = contestants[name]()
            if number >= 0:
                values[name].append(value)
    return values


class Figures:
    """What was measured: `flat`, key -> number, and `by_round`, key -> the values of each round."""

    def __init__(self) -> None:
        self.flat: dict[str, Any] = {}
        self.by_round: dict[str, list[float]] = {}

    def add(self, key: str, values: Sequence[float]) -> None:
        """Add a series as KEY (median), KEY_min and KEY_max."""
        self.by_round[key] = [rounded(value) for value in values]
        self._add_median(key, values)

    def ratio(self, key: str, over: str, under: str) -> None:
        """Add the ratio of two series as KEY, KEY_min and KEY_max."""
        self._add_median(key, [a / b for a, b in zip(self.by_round[over], self.by_round[under], strict=True)])

    def _add_median(self, key: str, values: Sequence[float]) -> None:
        figures = {key: statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}
        self.flat |= {name: rounded(value) for name, value in figures.items()}

    def as_record(self) -> dict[str, Any]:
        """Return everything for a record."""
        return {**self.flat, "by_round": self.by_round}


def rounded(value: float) -> float:
    """Round to six digits, as the run record does."""
    return float(f"{value:.6g}")


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Set torch's number of CPU threads within the block."""
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(usual)


def free() -> None:
    """Release memory that is no longer in use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
