"""The points of a sweep: each resolved as benchmark.py would, with an identity, and what the memory plan says of it.

A point is what its resolved configuration, its data, the code and the device make it. So a row of the table is shown for it
only where all of these are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cli.command_line import Assignment, CommandLine, Problem, parse_command_line
from cli.errors import ConfigError
from config import count, flat, load
from preflight.checks import check
from record.environment import commit, device_name
from sweeps.file import Sweep, as_word
from training.run_config import ALIASES, RunConfig, as_tried, resolve

PLAN = "memory: "
"""How the problem begins that a run needs more than there is."""
NOT_OF_IDENTITY = ("run_name", "run_folder", "loggers.")


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
    here, found, problems = _code(), [], {}
    with _ranks(sweep.own.ranks):
        for name, values in sweep.points.items():
            try:
                found.append(_resolved(sweep, name, values, here))
            except ValueError as error:
                for text in getattr(error, "problems", None) or [str(error)]:
                    problems.setdefault(text, []).append(name)
    if problems:
        raise ConfigError([_of_points(text, names, len(sweep.points)) for text, names in problems.items()])
    by_identity: dict[str, list[str]] = {}
    for point in found:
        by_identity.setdefault(point.identity, []).append(point.name)
    if same := [names for names in by_identity.values() if len(names) > 1]:
        raise ConfigError(
            [f"{sweep.path}: {' and '.join(names)} are the same run. Leave one of them." for names in same]
        )
    return found


def _of_points(text: str, names: Sequence[str], num: int) -> str:
    """Return a problem with the points that have it; without them where it is in all."""
    if len(names) == num:
        return text
    more = f" and {count(len(names) - 1, 'more run')}" if len(names) > 1 else ""
    return f"{names[0]}{more}: {text}"


def _gpus_problem(sweep: Sweep) -> str | None:
    """Say that this machine has not the GPUs for the runs side by side. None: it has, or has no GPU at all."""
    gpus, ranks, jobs = torch.cuda.device_count(), sweep.own.ranks, sweep.own.jobs or 1
    if not torch.cuda.is_available() or jobs * ranks <= gpus:
        return None
    given = f"{sweep.path}: ranks is {ranks} and jobs {jobs}, and this machine has {count(gpus, 'GPU')}"
    return f"{given}. Give fewer, or run it on a machine with {jobs * ranks}."


@contextlib.contextmanager
def _ranks(num: int) -> Iterator[None]:
    """Have the checks count as many ranks as a run will have, as Composer's launcher tells it them."""
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
    own = (f"run_folder={sweep.folder}", f"run_name={name}", "loggers.progress_bar=false")
    group, file = (f"loggers.group={sweep.name}",), str(sweep.path)
    varying = tuple(f"{key}={as_word(value)}" for key, value in values.items())
    # The group first: a sweep may have one of its own.
    parts = [(group, ""), (sweep.keys, file), (sweep.typed, ""), (varying, file), (own, "")]
    read = [(parse_command_line(words, ALIASES), where) for words, where in parts]
    assignments = [replace(at, where=where or at.where) for line, where in read for at in line.assignments]
    problems = [problem for line, _ in read for problem in line.problems]
    config, over_plan = _load(sweep.own.yaml, assignments, problems)
    words = [word for of, _ in parts for word in of]
    return Point(
        name=name,
        values=values,
        words=tuple([sweep.own.yaml, *words] if sweep.own.yaml else words),
        config=config,
        identity=_identity(config, sweep.own.ranks, code),
        over_plan=over_plan,
    )


def _load(yaml: str | None, assignments: list[Assignment], problems: list[Problem]) -> tuple[RunConfig, str | None]:
    """Return a run's resolved configuration, as benchmark.py has it, and why it does not fit into memory, or None."""
    typed, over = {at.key for at in assignments}, []

    def checked(config: RunConfig) -> list[Problem]:
        found = check(as_tried(config, typed)[0])
        over.extend(problem.text.removeprefix(PLAN) for problem in found if problem.text.startswith(PLAN))
        return [problem for problem in found if not problem.text.startswith(PLAN)]

    config = load(RunConfig, CommandLine(yaml, assignments, False, problems), check=checked)
    return resolve(as_tried(config, typed)[0]), next(iter(over), None)


# --- identity ---


def _code() -> str:
    """Return the commit of the code; of one that has none, or has changes, what no other call of this command returns."""
    here = commit()
    return here if is_commit(here) and here else f"{here} {time.time_ns()}"


def is_commit(name: str | None) -> bool:
    """False for changed code, and for code without a commit: nothing says that a row is of it."""
    return name is not None and not name.endswith("+changes")


def _identity(config: RunConfig, ranks: int, code: str) -> str:
    keys = {key: value for key, value in flat(config).items() if not key.startswith(NOT_OF_IDENTITY)}
    stages = config.data.read()
    if config.validation.is_given:
        stages = [*stages, config.validation.held_out.contents]
    data = [
        [stage.index_sha256, _digest(dict(stage.facts)), [b.index_sha256 for b in stage.buckets]] for stage in stages
    ]
    return _digest({"keys": keys, "ranks": ranks, "data": data, "code": code, "device": device_name()})[:16]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
