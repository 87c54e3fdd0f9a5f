"""A sweep's file and command line: which runs there are, as `key=value`.

What the keys of a run mean is training/run_config.py's to say.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cli.command_line import Assignment, CommandLine, leaves, parse_command_line, read_value, read_yaml
from cli.errors import ConfigError
from cli.limits import file_problem, given_as, kind_of_path, limited, shown
from config import count, load, schema_keys
from training.run_config import ALIASES

OWN_OF_EACH = ("run_name", "run_folder")
MAX_LABEL = 150  # characters of a run's name; loggers append to it
RANKS = 1024


@dataclass(frozen=True)
class SweepKeys:
    """A file of yamls/sweeps/."""

    yaml: str | None = None
    """The recipe that each run begins with. null: the defaults."""
    keys: list[str] | None = None
    """Further words of each run, as on its command line: [global_batch_size=64, compile=blocks]."""
    matrix: Any = None
    """Key -> list of its values, an axis. The runs are all combinations. The first axis changes slowest."""
    points: Any = None
    """A list of key -> value, in place of a product. With a matrix: each of them with each of its combinations."""
    limit_sec: int = limited(3600, 1)
    """Seconds of a run; then it is ended."""
    max_runs: int = limited(64, 1, 10_000)
    """A sweep of more runs is refused."""
    ranks: int = limited(1, 1, RANKS)
    """Processes of a run, see composer -n: on a GPU machine its GPUs."""
    jobs: int | None = limited(None, 1, RANKS)
    """Runs side by side, each with GPUs of its own. null: as many as this machine's GPUs suffice for, on a CPU 1."""


@dataclass(frozen=True)
class SweepCommand(SweepKeys):
    """A call of sweep.py."""

    dry_run: bool = False
    """Say what would run, and start nothing."""
    only: str | None = None
    """status:STATUS: run those rows again, and no others. status:error: all that ran and are not ok."""
    runs: str = "runs"
    """Folder of all runs: the sweep is in sweeps/NAME there."""


@dataclass(frozen=True)
class Sweep:
    """What a file and a command line ask for."""

    path: Path
    own: SweepCommand
    typed: tuple[str, ...]
    """Words of the command line that each run has."""
    axes: Mapping[str, Sequence[Any]]
    """Key that varies -> its values in the order in which they come."""
    of_points: Sequence[str]
    """The keys among them that are of `points`, not of `matrix`."""
    points: Mapping[str, Mapping[str, Any]]
    """Run -> key that varies -> value."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def keys(self) -> tuple[str, ...]:
        """Words of the file that each run has."""
        return tuple(self.own.keys or ())

    @property
    def folder(self) -> Path:
        return Path(self.own.runs).resolve() / "sweeps" / self.name


def read_sweep(argv: Sequence[str]) -> Sweep:
    """Read a sweep's file and command line. Raises ConfigError: all that is wrong with them."""
    command_line = parse_command_line(argv, ALIASES)
    path = command_line.yaml
    if path is None or kind_of_path(path) != "file" or file_problem(path):
        there = ", ".join(sorted(map(str, Path("yamls/sweeps").glob("*.yaml"))))
        given = "command line: no sweep given" if path is None else f"{shown(path, 300)}: no such file"
        raise ConfigError([f"{given}. {f'Known: {there}' if there else 'Give the file of a sweep'}."])
    tree, matrix, points = _parts(path)
    names = schema_keys(SweepCommand)
    at_line = [at for at in command_line.assignments if at.key in names]
    given = [Assignment(path, key, value, key) for key, value in tree.items()]
    own = load(SweepCommand, CommandLine(None, [*given, *at_line], False, command_line.problems), check=lambda own: [])
    for at in command_line.assignments:  # another list for an axis
        if at.key in matrix:
            matrix[at.key] = at.value
    others = [at for at in command_line.assignments if at.key not in names and at.key not in matrix]
    axes = {key: values if isinstance(values, list) else [values] for key, values in matrix.items()}
    problems = _problems(path, own, axes, points, others)
    if problems:
        raise ConfigError(problems)
    varying = [*axes, *dict.fromkeys(key for point in points for key in point)]
    combined = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    each = [{**one, **point} for one in combined for point in points or [{}]]
    of_points = {key: _once([point[key] for point in points if key in point]) for key in varying if key not in axes}
    return Sweep(
        path=Path(path),
        own=own,
        typed=tuple(f"{at.key}={at.raw if at.raw is not None else as_word(at.value)}" for at in others),
        axes={**axes, **of_points},
        of_points=list(of_points),
        points=dict(zip(_names(each, varying), each, strict=True)),
    )


def _once(values: Sequence[Any]) -> list[Any]:
    return [value for number, value in enumerate(values) if value not in values[:number]]


def _parts(path: str) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return a file's keys of one value, its matrix and its points. Raises ConfigError: it is none of this form."""
    wanted = "Wanted: yaml, keys, matrix or points, and limit_sec, max_runs, ranks, jobs"
    if problems := read_yaml(path)[1]:
        raise ConfigError([f"{problem.text} {wanted}." for problem in problems])
    tree: Any = OmegaConf.to_container(OmegaConf.load(path))
    matrix, points = tree.pop("matrix", None) or {}, tree.pop("points", None)
    points = [] if points is None else points
    if not isinstance(matrix, dict):
        raise ConfigError([f"{path}: matrix is {given_as(matrix)}. Possible: a mapping of keys to lists of values."])
    if not isinstance(points, list) or not all(isinstance(point, dict) and point for point in points):
        raise ConfigError([f"{path}: points is {given_as(points)}. Possible: a list of mappings of keys to values."])
    if not matrix and not points:
        raise ConfigError([f"{path}: neither matrix nor points. {wanted}."])
    flat = [{str(key): value for key, value in leaves(part)} for part in (matrix, *points)]
    return {str(key): value for key, value in tree.items()}, flat[0], flat[1:]


def _problems(
    path: str,
    own: SweepCommand,
    axes: Mapping[str, Sequence[Any]],
    points: Sequence[Mapping[str, Any]],
    others: Sequence[Assignment],
) -> list[str]:
    """Return what is wrong with the axes; what is wrong with their values is the runs' to say."""
    of_points = {key for point in points for key in point}
    found = [
        f"{path}: matrix: {key} has no value. Give a list of values, or take it out." for key in axes if not axes[key]
    ]
    both = [key for key in axes if key in of_points]
    found += [f"{path}: {key} is in matrix and in points. Leave it in one of them." for key in both]
    found += [
        f"command line: {at.key} varies in points of {path}. Change the file." for at in others if at.key in of_points
    ]
    words = [word.partition("=")[0] for word in own.keys or ()]
    named = {**dict.fromkeys(words, path), **dict.fromkeys(of_points | set(axes), path)}
    named |= {at.key: "command line" for at in others}
    fixed = [(where, key) for key, where in named.items() if key in OWN_OF_EACH]
    found += [f"{where}: {key} is given, but each run of a sweep has its own. Leave it out." for where, key in fixed]
    num = math.prod(map(len, axes.values())) * max(1, len(points))
    if num > own.max_runs:
        possible = f"max_runs={own.max_runs} at most. Shorten an axis, or raise max_runs"
        found.append(f"{path}: {count(num, 'run')}. Possible: {possible}.")
    return found


def as_word(value: Any) -> str:
    """Return a value as it stands after `key=` on a command line: a text that YAML reads as something else in quotes."""
    is_text = not isinstance(value, str) or _is_text(value)
    return as_text(value) if is_text else json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    """Return a value as tables, pictures and names of runs have it."""
    if isinstance(value, list | dict):
        return json.dumps(value)
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _is_text(word: str) -> bool:
    """True if a command line reads a word as the text that it is."""
    try:
        return bool(word.strip()) and read_value(word) == word
    except Exception:  # the YAML reader's own exceptions, of several unrelated classes
        return False


# --- names ---


def labels(keys: Sequence[str]) -> dict[str, str]:
    """Return key -> how it is called in names: its last part, where no other key has it."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: part if last.count(part) == 1 else key.replace(".", "-") for key, part in zip(keys, last, strict=True)}


def _names(points: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Return a folder name for each point: lr-0.001_seed-1."""
    called, found = labels(keys), []
    for point in points:
        name = "_".join(f"{called[key]}-{_in_name(value)}" for key, value in point.items())
        if len(name) > MAX_LABEL:
            name = f"{name[:MAX_LABEL]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        found.append(name)
    return [name if found.count(name) == 1 else f"{name}-{found[:n].count(name) + 1}" for n, name in enumerate(found)]


def _in_name(value: Any) -> str:
    text = "x".join(map(str, value)) if isinstance(value, list) else as_text(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "none"
