"""A run's config.yaml: read, and what was found later is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cli import masking
from cli.command_line import Problem, read_yaml
from cli.errors import ConfigError
from cli.files import write_whole
from config import resolved


def keep_keys(folder: Path, keys: Mapping[str, Any], sections: tuple[str, ...] = ("",)) -> None:
    """Write keys of some sections into a run's config.yaml, which may be of before there were such."""
    read_config(folder)  # for what it says of one that is broken
    path = folder / "config.yaml"
    config = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
    kept = {key: value for key, value in masking.written(keys).items() if key.startswith(sections)}
    for key, value in kept.items():
        OmegaConf.update(config, key, value, force_add=True)
    if kept:
        write_whole(path, OmegaConf.to_yaml(config))


def keep_batch_size(folder: Path, batch_size: int) -> None:
    """Write the batch size of evaluation that was found into a run's config.yaml."""
    keep_keys(folder, {"eval.batch_size": batch_size})


def found_batch_size(folder: Path) -> int | None:
    """Return the batch size of evaluation that a run has, for all its starts, or None."""
    return read_config(folder).get("eval.batch_size")


def read_config(folder: Path) -> dict[str, Any]:
    """Return key -> value of a run's config.yaml, or nothing where there is none. Raises ConfigError: it is broken.

    What stands for nothing in this environment (`${oc.env:...}`) is left out.
    """
    path = folder / "config.yaml"
    values, unreadable = read_yaml(str(path)) if path.is_file() else ([], [])
    values, unresolved = resolved(values, None)
    unreadable += [
        Problem(unresolved[id(at)]) for at in values if id(at) in unresolved and "${oc.env:" not in str(at.value)
    ]
    if unreadable:
        ways = "Bring back a copy, or remove it and summary.json: benchmark.py then goes on from the newest checkpoint"
        raise ConfigError([f"{problem.text} {ways}, with the keys of its command." for problem in unreadable])
    return {at.key: at.value for at in values if id(at) not in unresolved}
