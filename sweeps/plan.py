"""A sweep's file and command line, and its points: one run each, with its name, words, configuration and identity."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from common.command_line import Assignment, CommandLine, Problem, leaves, parse_command_line, read_value, read_yaml
from common.errors import ConfigError
from common.plugins import plugin_digests
from common.value_types import file_problem, format_value, kind_of_path, limited, truncate
from config import flatten, load, pluralize, schema_keys
from mds.dataset import Dataset
from preflight.checks import check
from reports.study import short_names
from run_folder.environment import commit, device_name
from run_folder.files import RUN_ONLY_KEYS
from training.config import ALIASES, RunConfig, drop_keys_of_speed, resolve

MAX_LABEL = 150  # characters of a run's name; loggers append to it
RANKS = 1024


@dataclass(frozen=True)
class SweepKeys:
    """A file of yamls/sweeps/."""

    yaml: str | None = None
    """Recipe of every run. null: the defaults."""
    keys: list[str] | None = None
    """Keys of every run: [global_batch_size=64, compile=blocks]."""
    matrix: Any = None
    """Key -> list of its values. The runs are all combinations."""
    points: Any = None
    """A list of key -> value, a run each; with a matrix, combined with it."""
    limit_sec: int = limited(3600, 1)
    """A run is ended after so many seconds."""
    max_runs: int = limited(64, 1, 10_000)
    """A sweep of more runs is refused."""
    ranks: int = limited(1, 1, RANKS)
    """Ranks of a run: its GPUs on a GPU machine."""
    jobs: int | None = limited(None, 1, RANKS)
    """Runs at a time, each with separate GPUs. null: as many as the GPUs allow; on a CPU 1."""


@dataclass(frozen=True)
class SweepCommand(SweepKeys):
    """A call of sweep.py."""

    dry_run: bool = False
    """Print what would run, and start nothing."""
    only: str | None = None
    """status:STATUS: run only those rows again. status:error: all that ran and are not ok."""
    runs: str = "runs"
    """Folder of all runs; the sweep is in sweeps/NAME."""


@dataclass(frozen=True)
class Sweep:
    """What a file and a command line ask for."""

    path: Path
    command: SweepCommand
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
        return tuple(self.command.keys or ())

    @property
    def folder(self) -> Path:
        return Path(self.command.runs).resolve() / "sweeps" / self.name


def read_sweep(argv: Sequence[str]) -> Sweep:
    """Read a sweep's file and command line. Raises ConfigError: all that is wrong with them."""
    command_line = parse_command_line(argv, ALIASES)
    path = command_line.yaml
    if path is None or kind_of_path(path) != "file" or file_problem(path):
        known = ", ".join(sorted(map(str, Path("yamls/sweeps").glob("*.yaml"))))
        problem = "command line: no sweep given" if path is None else f"{truncate(path, 300)}: no such file"
        raise ConfigError([f"{problem}. {f'Known: {known}' if known else 'Give the file of a sweep'}."])
    tree, matrix, points = _read_parts(path)
    names = schema_keys(SweepCommand)
    typed_assignments = [at for at in command_line.assignments if at.key in names]
    file_assignments = [Assignment(path, key, value, key) for key, value in tree.items()]
    keys = load(
        SweepCommand,
        CommandLine(None, [*file_assignments, *typed_assignments], False, command_line.problems),
        check=lambda keys: [],
    )
    for at in command_line.assignments:  # another list for an axis
        if at.key in matrix:
            matrix[at.key] = at.value
    others = [at for at in command_line.assignments if at.key not in names and at.key not in matrix]
    axes = {key: values if isinstance(values, list) else [values] for key, values in matrix.items()}
    problems = _problems(path, keys, axes, points, others)
    if command_line.print_config:
        problems.append("command line: --print_config is for benchmark.py. Set dry_run=true for what would run.")
    if problems:
        raise ConfigError(problems)
    varying = [*axes, *dict.fromkeys(key for point in points for key in point)]
    combined = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    each = [{**one, **point} for one in combined for point in points or [{}]]
    of_points = {key: _unique([point[key] for point in points if key in point]) for key in varying if key not in axes}
    return Sweep(
        path=Path(path),
        command=keys,
        typed=tuple(f"{at.key}={at.raw if at.raw is not None else as_word(at.value)}" for at in others),
        axes={**axes, **of_points},
        of_points=list(of_points),
        points=dict(zip(_names(each, varying), each, strict=True)),
    )


def _unique(values: Sequence[Any]) -> list[Any]:
    return [value for number, value in enumerate(values) if value not in values[:number]]


def _read_parts(path: str) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return a file's keys of one value, its matrix and its points. Raises ConfigError: it is none of this form."""
    wanted = "Wanted: yaml, keys, matrix or points, and limit_sec, max_runs, ranks, jobs"
    if problems := read_yaml(path)[1]:
        raise ConfigError([f"{problem.text} {wanted}." for problem in problems])
    tree: Any = OmegaConf.to_container(OmegaConf.load(path))
    matrix, points = tree.pop("matrix", None) or {}, tree.pop("points", None)
    points = [] if points is None else points
    if not isinstance(matrix, dict):
        raise ConfigError(
            [f"{path}: matrix is {format_value(matrix)}. Possible: a mapping of keys to lists of values."]
        )
    if not isinstance(points, list) or not all(isinstance(point, dict) and point for point in points):
        raise ConfigError(
            [f"{path}: points is {format_value(points)}. Possible: a list of mappings of keys to values."]
        )
    if not matrix and not points:
        raise ConfigError([f"{path}: neither matrix nor points. {wanted}."])
    flat = [{str(key): value for key, value in leaves(part)} for part in (matrix, *points)]
    return {str(key): value for key, value in tree.items()}, flat[0], flat[1:]


def _problems(
    path: str,
    command: SweepCommand,
    axes: Mapping[str, Sequence[Any]],
    points: Sequence[Mapping[str, Any]],
    others: Sequence[Assignment],
) -> list[str]:
    """Return what is wrong with the axes; what is wrong with their values is the runs' to say."""
    of_points = {key for point in points for key in point}
    problems = [
        f"{path}: matrix: {key} has no value. Give a list of values, or take it out." for key in axes if not axes[key]
    ]
    both = [key for key in axes if key in of_points]
    problems += [f"{path}: {key} is in matrix and in points. Leave it in one of them." for key in both]
    problems += [
        f"command line: {assignment.key} varies in points of {path}. Change the file."
        for assignment in others
        if assignment.key in of_points
    ]
    words = [word.partition("=")[0] for word in command.keys or ()]
    named = {**dict.fromkeys(words, path), **dict.fromkeys(of_points | set(axes), path)}
    named |= {assignment.key: "command line" for assignment in others}
    fixed = [(where, key) for key, where in named.items() if key in RUN_ONLY_KEYS]
    problems += [f"{where}: {key} is given, but each run of a sweep has its own. Leave it out." for where, key in fixed]
    num = math.prod(map(len, axes.values())) * max(1, len(points))
    if num > command.max_runs:
        possible = f"max_runs={command.max_runs} at most. Shorten an axis, or raise max_runs"
        problems.append(f"{path}: {pluralize(num, 'run')}. Possible: {possible}.")
    return problems


def as_word(value: Any) -> str:
    """Return a value as it stands after `key=` on a command line: a text that YAML reads as something else in quotes."""
    is_text = not isinstance(value, str) or _is_text(value)
    return as_text(value) if is_text else json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    """Return a value as tables, plots and names of runs have it."""
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


def _names(points: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Return a folder name for each point: lr-0.001_seed-1."""
    short, names = short_names(keys), []
    for point in points:
        name = "_".join(f"{short[key].replace('.', '-')}-{_in_name(value)}" for key, value in point.items())
        if len(name) > MAX_LABEL:
            name = f"{name[:MAX_LABEL]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        names.append(name)
    return [name if names.count(name) == 1 else f"{name}-{names[:n].count(name) + 1}" for n, name in enumerate(names)]


def _in_name(value: Any) -> str:
    text = "x".join(map(str, value)) if isinstance(value, list) else as_text(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "none"


# --- the points of a sweep ---
#
# A point is what its resolved configuration, its data, the code and the device make it. So a row of the table is shown
# for it only where all of these are the same.

PLAN = "memory: "
"""Prefix of the problem that a run needs more memory than there is."""
NOT_OF_IDENTITY = (*RUN_ONLY_KEYS, "loggers.")


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    values: Mapping[str, Any]
    """Key that varies -> value."""
    words: tuple[str, ...]
    """After `benchmark.py`."""
    config: RunConfig
    identity: str
    over_plan: str | None
    """Why it does not fit, by the memory plan."""


def resolve_all(sweep: Sweep) -> list[Point]:
    """Resolve every point. Raises ConfigError: all that is wrong with any of them, each problem once."""
    if text := _gpus_problem(sweep):
        raise ConfigError([text])
    code, points, problems = _code_identity(), [], {}
    with _with_num_ranks(sweep.command.ranks):
        for name, values in sweep.points.items():
            try:
                points.append(_resolved(sweep, name, values, code))
            except ValueError as error:
                for text in getattr(error, "problems", None) or [str(error)]:
                    problems.setdefault(text, []).append(name)
    if problems:
        raise ConfigError([_name_points(text, names, len(sweep.points)) for text, names in problems.items()])
    by_identity: dict[str, list[str]] = {}
    for point in points:
        by_identity.setdefault(point.identity, []).append(point.name)
    if same := [names for names in by_identity.values() if len(names) > 1]:
        raise ConfigError(
            [f"{sweep.path}: {' and '.join(names)} are the same run. Leave one of them." for names in same]
        )
    return points


def _name_points(text: str, names: Sequence[str], num: int) -> str:
    """Return a problem with the points that have it; without them if all have it."""
    if len(names) == num:
        return text
    more = f" and {pluralize(len(names) - 1, 'more run')}" if len(names) > 1 else ""
    return f"{names[0]}{more}: {text}"


def _gpus_problem(sweep: Sweep) -> str | None:
    """Say that this machine has not the GPUs for the runs side by side. None: it has, or has no GPU at all."""
    gpus, ranks, jobs = torch.cuda.device_count(), sweep.command.ranks, sweep.command.jobs or 1
    if not torch.cuda.is_available() or jobs * ranks <= gpus:
        return None
    problem = f"{sweep.path}: ranks is {ranks} and jobs {jobs}, and this machine has {pluralize(gpus, 'GPU')}"
    return f"{problem}. Give fewer, or run it on a machine with {jobs * ranks}."


@contextlib.contextmanager
def _with_num_ranks(num: int) -> Iterator[None]:
    """Have the checks count as many ranks as a run will have, as Composer's launcher sets it."""
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(num)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _resolved(sweep: Sweep, name: str, values: Mapping[str, Any], code: str) -> Point:
    own_words = (f"run_folder={sweep.folder}", f"run_name={name}", "loggers.progress_bar=false")
    group, file = (f"loggers.group={sweep.name}",), str(sweep.path)
    varying = tuple(f"{key}={as_word(value)}" for key, value in values.items())
    # The group first: a sweep may have its own.
    parts = [(group, ""), (sweep.keys, file), (sweep.typed, ""), (varying, file), (own_words, "")]
    read = [(parse_command_line(words, ALIASES), where) for words, where in parts]
    assignments = [
        replace(assignment, where=where or assignment.where) for line, where in read for assignment in line.assignments
    ]
    problems = [problem for line, _ in read for problem in line.problems]
    config, over_plan = _load(sweep.command.yaml, assignments, problems)
    held_out = [config.validation.held_out.dataset] if config.validation.is_given else []
    words = [word for group_words, _ in parts for word in group_words]
    return Point(
        name=name,
        values=values,
        words=tuple([sweep.command.yaml, *words] if sweep.command.yaml else words),
        config=config,
        identity=_identity(flatten(config), [*config.data.read(), *held_out], sweep.command.ranks, code),
        over_plan=over_plan,
    )


def _load(yaml: str | None, assignments: list[Assignment], problems: list[Problem]) -> tuple[RunConfig, str | None]:
    """Return a run's resolved configuration, as benchmark.py has it, and why it does not fit into memory, or None."""
    typed, over = {assignment.key for assignment in assignments}, []

    def checked(config: RunConfig) -> list[Problem]:
        problems_here = check(drop_keys_of_speed(config, typed)[0])
        over.extend(problem.text.removeprefix(PLAN) for problem in problems_here if problem.text.startswith(PLAN))
        return [problem for problem in problems_here if not problem.text.startswith(PLAN)]

    config = load(RunConfig, CommandLine(yaml, assignments, False, problems), check=checked)
    return resolve(drop_keys_of_speed(config, typed)[0]), next(iter(over), None)


# --- identity ---


def _code_identity() -> str:
    """Return the commit of the code; without one, or with uncommitted changes, a string that no other call returns."""
    current = commit()
    return current if is_commit(current) and current else f"{current} {time.time_ns()}"


def is_commit(name: str | None) -> bool:
    """False for changed code, and for code without a commit: nothing says that a row is of it."""
    return name is not None and not name.endswith("+changes")


def _identity(keys: Mapping[str, Any], datasets: Iterable[Dataset], ranks: int, code: str) -> str:
    """Return the digest of all that a run's result depends on: its keys, data, code and device."""
    keys = {key: value for key, value in keys.items() if not key.startswith(NOT_OF_IDENTITY)} | plugin_digests(keys)
    data = [
        [dataset.index_sha256, _digest(dict(dataset.metadata)), [bucket.index_sha256 for bucket in dataset.buckets]]
        for dataset in datasets
    ]
    return _digest({"keys": keys, "ranks": ranks, "data": data, "code": code, "device": device_name()})[:16]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
