"""A run's configuration: config.yaml, written once, and later.yaml, what is otherwise since then.

config.yaml has what the run was begun with, as it was given. later.yaml has what the newest start was given otherwise (a
longer max_duration, more workers), and what the run has found for `auto` and null: the microbatch, the batch size of its
evaluations. Both together are what the run is.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cli import masking
from cli.command_line import Assignment, Problem, leaves, read_yaml
from cli.errors import ConfigError
from cli.files import read_regular, write_whole
from config import resolved

CONFIG, LATER = "config.yaml", "later.yaml"


@dataclass(frozen=True)
class ConfigFiles:
    """Key -> value of a start, as they may be written: as they were given, and those of them that were found otherwise."""

    given: Mapping[str, Any]
    found: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], now: Mapping[str, Any]) -> ConfigFiles:
        """Keep what may be written of two configurations, before and after a start has found what fits its machine."""
        written = masking.written(now)
        return cls(masking.written(given), {key: written[key] for key in now if now[key] != given[key]})

    def write(self, folder: Path) -> None:
        """Write config.yaml if there is none (or nothing in it), and what differs from it to later.yaml."""
        if not _as_it_stands(folder / CONFIG):
            write_whole(folder / CONFIG, _yaml(self.given))
        _write_later(folder, {**self.given, **self.found})


def keep_keys(folder: Path, keys: Mapping[str, Any], sections: tuple[str, ...] = ("",)) -> None:
    """Keep keys of some sections for a run that is not started again. Raises ConfigError: its files are broken."""
    read_config(folder)
    kept = {key: value for key, value in masking.written(keys).items() if key.startswith(sections)}
    if kept:
        _write_later(folder, {**_as_it_stands(folder / LATER), **kept})


def _write_later(folder: Path, keys: Mapping[str, Any]) -> None:
    first = _as_it_stands(folder / CONFIG)
    later = {key: value for key, value in keys.items() if key not in first or first[key] != value}
    if not later:
        (folder / LATER).unlink(missing_ok=True)
    elif later != _as_it_stands(folder / LATER):
        write_whole(folder / LATER, _yaml(later))


def _as_it_stands(path: Path) -> dict[str, Any]:
    """Return key -> value of a file without resolving it, or nothing where there is none."""
    keys = leaves(OmegaConf.to_container(OmegaConf.load(io.BytesIO(read_regular(path))))) if path.is_file() else []
    return dict(keys)


def _yaml(keys: Mapping[str, Any]) -> str:
    tree = OmegaConf.create()
    for key, value in keys.items():
        OmegaConf.update(tree, key, value, force_add=True)
    return OmegaConf.to_yaml(tree) if keys else ""


def found_batch_size(folder: Path) -> int | None:
    """Return the batch size of evaluation that a run has, for all its starts, or None."""
    return read_config(folder).get("eval.batch_size")


def read_files(folder: Path) -> tuple[list[Assignment], list[Problem]]:
    """Read a run's keys from both files, the later ones last, and what is wrong with the files."""
    found: list[Assignment] = []
    problems: list[Problem] = []
    for path in (folder / CONFIG, folder / LATER):
        values, unreadable = read_yaml(str(path)) if path.is_file() else ([], [])
        found += values
        problems += unreadable
    return found, problems


def read_config(folder: Path) -> dict[str, Any]:
    """Return key -> value of a run, or nothing where it has no files. Raises ConfigError: one is broken.

    What stands for nothing in this environment (`${oc.env:...}`) is left out.
    """
    values, unreadable = read_files(folder)
    values, unresolved = resolved(values, None)
    unreadable += [
        Problem(unresolved[id(at)]) for at in values if id(at) in unresolved and "${oc.env:" not in str(at.value)
    ]
    if unreadable:
        ways = "Bring back a copy, or remove it and summary.json: benchmark.py then resumes from the newest checkpoint"
        raise ConfigError([f"{problem.text} {ways}, with the keys of its command." for problem in unreadable])
    return {at.key: at.value for at in values if id(at) not in unresolved}


def masked_text(folder: Path) -> str:
    """Return both files as one YAML without secrets."""
    return masking.masked(_yaml({**_as_it_stands(folder / CONFIG), **_as_it_stands(folder / LATER)}))
