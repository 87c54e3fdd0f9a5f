"""What the measuring commands have in common: how their keys are read, what heads a record, how it is written."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from config import ConfigError, Problem, load, parse_command_line, to_yaml
from environment import environment

Config = TypeVar("Config")


def read_keys(
    schema: type[Config], argv: Sequence[str], text: str | None, check: Callable[[Config], Sequence[Problem]]
) -> Config | int:
    """Return a command's configuration, or the exit code where its text, its keys or what is wrong with them was wanted."""
    if {"-h", "--help"} & set(argv):
        print(text)
        return 0
    command_line = parse_command_line(argv, {})
    try:
        config = load(schema, command_line, not_yet={}, check=check)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if command_line.print_config:
        print(to_yaml(config), end="")
        return 0
    return config


def head(schema: int) -> dict[str, Any]:
    """Return what a record begins with: its form, when and where it was made, and what else the machine was doing."""
    return {
        "schema": schema,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **environment(),
        "num_cpus": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def write_record(path: str, record: Mapping[str, Any]) -> None:
    """Write a record; an earlier one is replaced."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
