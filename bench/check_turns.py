"""What bench.check compares, and how it is measured: parts of bench.micro and rungs of the CPU ladders.

Of each our own figure is taken: seconds, speed, memory. A ratio over what others use says nothing more about two versions of
our code: the others' code is the same in both. Each turn is a process of its own, or several, in one of two checkouts.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.contest import Compared, compared, take_turns
from bench.ladder import read_ladder, run_rung
from cli.errors import ConfigError
from cli.log import log
from record import processes

LIMIT_SEC = 1800.0  # of a turn
ROUNDS_OF_A_TURN = 3
"""Rounds within a process of bench.micro: the turn's figure is their median."""
ROUNDS_OF_A_START = 1  # each takes a minute
MAX_WORDS = 300
LADDERS = Path("yamls", "ladders")
SIZES = ("num_parameters", "threads", "num_samples", "num_images")
"""Keys of bench.micro that say how much is measured."""
JOB = (
    *("ema_num_parameters", "ema_num_tensors", "ema_threads", "moments_num_samples", "images_num_samples"),
    *(
        "family",
        "preset",
        "variant",
        "stage",
        "synthetic",
        "image_size",
        "precision",
        "num_devices",
        "trained_parameters",
    ),
    *("global_batch_size", "device_train_microbatch_size", "max_duration", "compile", "channels_last", "attention"),
    *("gradient_checkpointing", "ema"),
)
"""What has to be the same in both, where both say it."""


@dataclass(frozen=True)
class Figure:
    """A number that a turn gives."""

    what: str
    key: str
    kind: Literal["time", "speed", "memory"] = "time"
    least: float = 0.0
    """Less than this counts as this: it may be 0."""

    def cost(self, turn: Mapping[str, Any]) -> float:
        """Return what is the better the less it is."""
        value = max(turn[self.key], self.least)
        return 1 / value if self.kind == "speed" else value

    def verdict(self, found: Compared) -> str:
        """Return the verdict in words."""
        more, less = ("more memory", "less memory") if self.kind == "memory" else ("slower", "faster")
        return {"more": more, "less": less, "same": SAME}[found.verdict]


SAME = "no difference seen"
WORSE = ("slower", "more memory")
FIGURES = {
    "ema": (
        Figure("EMA update, ms", "ema_ms"),
        Figure("EMA temporary memory, MiB", "ema_temporary_mib", "memory", least=1.0),
    ),
    "moments": (Figure("moments, samples/s", "moments_samples_per_sec", "speed"),),
    "images": (Figure("images, samples/s", "images_samples_per_sec", "speed"),),
    "checkpoint": (
        Figure("checkpoint written, s", "checkpoint_write_sec"),
        Figure("checkpoint found, s", "checkpoint_find_sec"),
    ),
    "first_step": (
        Figure("command to first step, s", "first_step_sec"),
        Figure("command to first step, processor s", "first_step_cpu_sec"),
        Figure("the same with no cost kept, s", "first_step_traced_sec"),
        Figure("python benchmark.py to first step, s", "first_step_alone_sec"),
        Figure("python benchmark.py to first step, processor s", "first_step_alone_cpu_sec"),
    ),
}
"""Part of bench.micro -> its figures."""


def figures_of_rung(name: str) -> tuple[Figure, ...]:
    """Return what a rung is judged by."""
    return (
        Figure(f"{name}: images/s", "images_per_sec", "speed"),
        Figure(f"{name}: peak memory, GiB", "peak_mem_gib", "memory", least=0.001),
    )


class DoesNotRun(Exception):
    """A turn that left no figures. Its text: the last words of the code."""

    who = ""


@dataclass
class Task:
    """A part or a rung, what was committed of it, and what turns found."""

    name: str
    path: str
    """The committed record."""
    record: Mapping[str, Any]
    anew: str
    """The command that measures it anew."""
    figures: Sequence[Figure]
    run: Callable[[Path, Path], dict[str, Any]]
    """(checkout, folder for temporary files) -> the record of a turn. Raises DoesNotRun."""
    code: str = ""
    """The commit that is set against today's code, or the folder."""
    is_of_its_size: bool = True
    """Whether as much is measured as the committed record had."""
    then: list[dict[str, Any]] = field(default_factory=list)
    now: list[dict[str, Any]] = field(default_factory=list)
    not_compared: str | None = None
    is_broken: bool = False
    """Today's code does not run."""


def of_part(part: str, path: str, record: Mapping[str, Any], sizes: Mapping[str, int | None]) -> Task:
    """Return the task of a part of bench.micro. `sizes`: those that are given; the others are the record's."""
    kept = {key: record["config"].get(key) for key in SIZES}
    given = {**kept, **{key: value for key, value in sizes.items() if value is not None}}
    return Task(
        name=part,
        path=path,
        record=record,
        anew=f"python -m bench.micro parts={record['config'].get('parts', part)} results={path}",
        figures=[figure for figure in FIGURES[part] if figure.key in record],
        run=functools.partial(part_turn, part, [f"{key}={given[key]}" for key in SIZES if given[key] is not None]),
        is_of_its_size=given == kept,
    )


def of_rung(ladder: str, name: str, path: str, record: Mapping[str, Any]) -> Task:
    """Return the task of a rung."""
    return Task(
        name=name,
        path=path,
        record=record,
        anew=f"python -m bench.ladder {LADDERS / ladder}.yaml",
        figures=[figure for figure in figures_of_rung(name) if record.get(figure.key)],
        run=functools.partial(rung_turn, ladder, name),
    )


# --- one turn ---


def part_turn(part: str, keys: Sequence[str], tree: Path, work: Path) -> dict[str, Any]:
    """Measure a part with the code of a checkout."""
    rounds = ROUNDS_OF_A_START if part == "first_step" else ROUNDS_OF_A_TURN
    with tempfile.TemporaryDirectory(dir=work) as folder:
        results = Path(folder, "micro.json")
        words = [f"parts={part}", f"rounds={rounds}", *keys, f"results={results}", f"work={folder}"]
        code, said = processes.run([sys.executable, "-m", "bench.micro", *words], LIMIT_SEC, tree)
        if code != 0 or not results.is_file():
            raise DoesNotRun(f"it took more than {LIMIT_SEC:.0f} s" if code is None else _last_words(said))
        return json.loads(results.read_text())


def rung_turn(ladder: str, name: str, tree: Path, work: Path) -> dict[str, Any]:
    """Measure a rung as a checkout's own file of the ladder has it."""
    try:
        steps = read_ladder(str(tree / LADDERS / f"{ladder}.yaml"))
        rung = next(rung for rung in steps.rungs if rung.name == name)
    except ConfigError as error:
        raise DoesNotRun(str(error)) from error
    except StopIteration as error:
        raise DoesNotRun(f"its {LADDERS / ladder}.yaml has no rung {name!r}") from error
    record = run_rung(rung, int(LIMIT_SEC), tree=tree)
    if record["status"] != "ok":
        raise DoesNotRun(f"{record['status']}: {_last_words(record['output_end'])}")
    return record


def _last_words(said: str) -> str:
    lines = processes.own_lines(said)
    line = lines[-1].strip() if lines else "it said nothing"
    return line if len(line) <= MAX_WORDS else f"{line[: MAX_WORDS - 3]}..."


# --- all turns ---


def measure(task: Task, then: Path, now: Path, rounds: int, work: Path) -> None:
    """Let two checkouts take turns at a task, and keep in it what they found, or why they are not compared."""

    def turn(who: Literal["then", "now"], tree: Path) -> float:
        begun, kept = time.monotonic(), getattr(task, who)
        try:
            kept.append(task.run(tree, work))
        except DoesNotRun as error:
            error.who = who
            raise
        log.info(f"check: {task.name}: {who}, turn {len(kept)} of {rounds}, {time.monotonic() - begun:.0f} s")
        return 0.0

    both = {"then": functools.partial(turn, "then", then), "now": functools.partial(turn, "now", now)}
    try:
        take_turns(both, rounds, warm_up=False)
    except DoesNotRun as error:
        task.is_broken = error.who == "now"
        of_record = f"the code of {task.code} does not run here: {error}. Measure the record anew: {task.anew}"
        task.not_compared = f"today's code does not run: {error}" if task.is_broken else of_record
        return
    first, last = task.then[0], task.now[0]
    differing = [key for key in JOB if key in first and key in last and first[key] != last[key]]
    task.figures = [
        each for each in task.figures if all(turn.get(each.key) is not None for turn in task.then + task.now)
    ]
    if differing:
        values = ", ".join(f"{key} was {first[key]}, is {last[key]}" for key in differing)
        task.not_compared = f"it is another job: {values}. Measure the record anew: {task.anew}"
    elif not task.figures:
        task.not_compared = f"no figure of the record is one of both codes. Measure the record anew: {task.anew}"


def judged(task: Task) -> list[tuple[Figure, Compared]]:
    """Return what the turns of a task say of each figure; nothing where they are not compared."""
    if task.not_compared:
        return []
    costs = [(figure, *([figure.cost(turn) for turn in of] for of in (task.then, task.now))) for figure in task.figures]
    return [(figure, compared(before, after)) for figure, before, after in costs]
