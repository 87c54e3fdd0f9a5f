"""What the measuring commands have in common: how their keys are read, what heads a record, how it is written."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from cli.command_line import Problem, parse_command_line
from cli.files import write_whole
from config import as_written, load, to_yaml
from preflight.limits import unwritable
from record.environment import environment
from reports.tables import TABLES, about, text_of

Config = TypeVar("Config")


def read_keys(
    schema: type[Config],
    argv: Sequence[str],
    check: Callable[[Config], Sequence[Problem]] = lambda config: [],
) -> Config | None:
    """Return a command's configuration, or None where --print_config wanted it shown."""
    command_line = parse_command_line(argv, {})
    config = load(schema, command_line, check=lambda given: [*check(given), *_places_problems(given)])
    if command_line.print_config:
        print(to_yaml(config), end="")
        return None
    return config


def _places_problems(config: Any) -> list[Problem]:
    """Return what would be known only after minutes: a record that cannot be written, a folder for work that is not there."""
    results, work = Path(config.results), getattr(config, "work", None)
    text = f"{results} is a folder. Give a file in it." if results.is_dir() else unwritable(results.parent)
    found = [("results", text)]
    if work is not None:
        found.append(
            ("work", unwritable(work) if Path(work).is_dir() else f"no folder {work}. Make it, or leave it out.")
        )
    return [Problem(f"{key}: {text}", (key,)) for key, text in found if text]


def head(schema: int) -> dict[str, Any]:
    """Return what a record begins with: its form, when and where it was made, and what else the machine was doing."""
    return {
        "schema": schema,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **environment(),
        "num_cpus": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def ends(began: float) -> dict[str, Any]:
    """Return what a record ends with; `began`: time.monotonic() of its beginning."""
    return {"load_average_after": round(os.getloadavg()[0], 2), "seconds": round(time.monotonic() - began, 1)}


def keep(results: str, schema: int, measured: str, config: Any, figures: Callable[[], dict[str, Any]]) -> None:
    """Measure, write the record, and print its table.

    Args:
        results: the record's file; an earlier one is replaced.
        measured: which table it has, see reports.tables.
        figures: measures, and returns what the record has beside its head and end.
    """
    began = time.monotonic()
    record = {**head(schema), "measured": measured, "config": as_written(config), **figures(), **ends(began)}
    write_record(results, record)
    print(text_of(record) if measured in TABLES else about(record))


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch use so many threads of a CPU in the block."""
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(usual)


def write_record(path: str, record: Mapping[str, Any]) -> None:
    """Write a record; an earlier one is replaced."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(path), json.dumps(record, indent=2, allow_nan=False) + "\n")
