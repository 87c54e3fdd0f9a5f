"""Say what has become slower: today's code beside that of the committed records, in turns on this machine.

    make bench-check                                          # micro parts and rungs of the CPU ladder: about an hour
    python -m bench.check parts=ema,moments rungs=none        # some of them
    python -m bench.check commit=main rounds=7                # beside the code of a commit
    python -m bench.check other=/src/easel-old                # beside another checkout, where there is no history

A machine's speed changes from day to day, so committed figures are shown and not judged. The code of a record's commit is
laid beside today's in a temporary folder, and both take turns: first the one, then the other, next time the other way round.
Today's code is that of this checkout as it was at the start, with what is not committed.

A figure is `slower` where each round says so, and the median of the rounds' ratios is above 1.02 and above the largest step
from one turn to the next of one and the same code. `faster` likewise, and for memory `more memory` and `less memory`; all
else is `no difference seen`. A ratio is now over then, of a speed then over now: above 1 is worse.

The record of the check, results=FILE, has each turn. What lies in the temporary folder, work=FOLDER, is removed again.
Exit code: 0 when nothing became slower, 1 when something did, takes more memory or does not run any more, 2 when the command
cannot be read or nothing could be compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bench import micro
from bench.check_code import CHANGES, MARK, full_name, how_to_have, why_no_git, write_commit, write_today
from bench.check_turns import FIGURES, LADDERS, SIZES, WORSE, Figure, Task, judged, measure, of_part, of_rung
from bench.command import head, read_keys, write_record
from bench.contest import Compared, rounded
from bench.ladder import read_ladder
from cli.command import command
from cli.command_line import Problem
from cli.errors import ConfigError, Refused
from cli.files import cache_folder
from cli.limits import limited
from cli.log import log
from cli.table import as_table
from config import as_written, count

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path("reports", "results")
OF_MICRO = ("micro.json", "start.json")
"""Records of bench.micro; of a part the newest counts."""
CPU_LADDERS = ("sd2_tiny_cpu", "sd2_tiny_cpu_compile")


@dataclass(frozen=True)
class CheckConfig:
    """The keys of this command."""

    parts: str = ",".join(FIGURES)
    """Parts of bench.micro, with commas between; none: no part."""
    rungs: str = "online,late_loss"
    """Rungs of the ladders sd2_tiny_cpu and sd2_tiny_cpu_compile, with commas between; none: no rung."""
    rounds: int = limited(5, 3, 100)
    """Turns of each code. With 3, one figure of thirty is called slower by chance; with 5, one of some hundreds."""
    num_parameters: int | None = limited(None, 100_000)
    """As in bench.micro. null: as in the record."""
    num_samples: int | None = limited(None, 128)
    """As in bench.micro. null: as in the record."""
    num_images: int | None = limited(None, 32)
    """As in bench.micro. null: as in the record."""
    commit: str | None = None
    """Commit, branch or tag whose code is set against today's. null: the commit of each record."""
    other: str | None = None
    """Checkout whose code is set against today's, in place of a commit's."""
    results: str = "cache/bench_check.json"
    """File of the record; an earlier one is replaced."""
    work: str | None = None
    """Folder for temporary files, on the disk to be measured. null: the system's."""


def names_in(text: str) -> list[str]:
    """Return the names that a key lists."""
    names = [name.strip() for name in text.split(",")]
    return [] if names == ["none"] else list(dict.fromkeys(names))


# --- is it possible ---


def check(config: CheckConfig) -> list[Problem]:
    """Return every problem of the keys."""
    parts, rungs, known = names_in(config.parts), names_in(config.rungs), rungs_known()
    found = []
    for key, names, possible in (("parts", parts, FIGURES), ("rungs", rungs, known)):
        if unknown := [name for name in names if name not in possible]:
            text = f"unknown {', '.join(map(repr, unknown))}. Known: {', '.join(possible)}, or none."
            found.append(Problem(f"{key}: {text}", (key,)))
    if not parts and not rungs:
        found.append(Problem("parts, rungs: none of both. Give one of them.", ("parts", "rungs")))
    if config.other is not None and config.commit is not None:
        found.append(Problem("commit, other: both are given. Give one of them.", ("commit", "other")))
    if config.other is not None and not Path(config.other, MARK).is_file():
        found.append(Problem(f"other: {config.other} is no checkout of this project. Give its folder.", ("other",)))
    if parts and not found:
        sizes = {key: value for key in SIZES if (value := getattr(config, key, None)) is not None}
        found += micro.check(micro.MicroConfig(parts=",".join(parts), work=config.work, **sizes))  # room on the disk
    return found


def rungs_known() -> dict[str, str]:
    """Return each rung of the CPU ladders and its ladder."""
    return {rung.name: name for name in CPU_LADDERS for rung in read_ladder(str(ROOT / LADDERS / f"{name}.yaml")).rungs}


def plan(config: CheckConfig, root: Path) -> list[Task]:
    """Return what is to be compared, each with its code.

    Raises:
        ConfigError: records that cannot be read or have no such figures, and commits that the history does not have.
    """
    tasks: list[Task] = []
    problems: list[str] = []
    sizes = {key: getattr(config, key, None) for key in SIZES}
    for part in names_in(config.parts):
        try:
            path, record = newest_with(part, root)
            tasks.append(of_part(part, path, record, sizes))
        except ConfigError as error:
            problems += error.problems
    ladders = rungs_known()
    for rung in names_in(config.rungs):
        path = str(RECORDS / ladders[rung] / f"{rung}.json")
        try:
            task = of_rung(
                ladders[rung], rung, path, read(root, path, f"python -m bench.ladder {LADDERS / ladders[rung]}.yaml")
            )
            if not task.figures:
                status = task.record.get("status")
                raise ConfigError([f"{path}: it has no figures, its status is {status}. Leave out the rung {rung}."])
            tasks.append(task)
        except ConfigError as error:
            problems += error.problems
    problems += codes(tasks, config, root)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return tasks


def read(root: Path, path: str, anew: str) -> dict[str, Any]:
    """Return a committed record. Raises ConfigError: it is not there, or broken."""
    try:
        record = json.loads((root / path).read_bytes())
        said = None if isinstance(record, dict) else f"it holds a {type(record).__name__}"
    except (OSError, ValueError, RecursionError) as error:
        said = str(error.strerror if isinstance(error, OSError) else error)
    if said:
        raise ConfigError(
            [f"{path}: no record can be read: {said}. Restore it: git checkout -- {path}; or measure: {anew}"]
        )
    return record


def newest_with(part: str, root: Path) -> tuple[str, dict[str, Any]]:
    """Return path and content of the newest record of a part. Raises ConfigError."""
    anew = f"python -m bench.micro parts={part} results={RECORDS / OF_MICRO[0]}"
    found = {}
    for name in OF_MICRO:
        record = read(root, str(RECORDS / name), anew)
        if isinstance(record.get("config"), dict) and any(figure.key in record for figure in FIGURES[part]):
            found[str(record.get("date")), str(RECORDS / name)] = record
    if not found:
        where = " and ".join(str(RECORDS / name) for name in OF_MICRO)
        raise ConfigError([f"{where}: no figure of the part {part}. Measure it: {anew}"])
    newest = max(found)
    return newest[1], found[newest]


def codes(tasks: Sequence[Task], config: CheckConfig, root: Path) -> list[str]:
    """Give each task the code that is set against today's; return what stands in the way."""
    if config.other is not None:
        for task in tasks:
            task.code = str(Path(config.other).resolve())
        return []
    if said := why_no_git(root):
        return [f"{root}: no history of this project ({said}). Give a checkout of the earlier code: other=FOLDER."]
    problems = []
    for task in tasks:
        where, name = ("commit", config.commit) if config.commit else (task.path, task.record.get("commit"))
        if not isinstance(name, str):
            problems.append(f"{where}: it names no commit. Give one: commit=NAME; or measure it anew: {task.anew}")
            continue
        if (plain := name.removesuffix(CHANGES)) != name:
            log.info(f"check: {where}: it is of {name}; what was not committed is in no history and is left out.")
        task.code = full_name(root, plain) or ""
        if not task.code:
            problems.append(f"{where}: {how_to_have(root, plain)}")
    return problems


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep two checks of one user from measuring each other. Raises Refused: another one is at it."""
    lock = None
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache_folder() / "bench_check.lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise Refused(
            "check: another one measures on this machine. Wait for it: each would slow the other down."
        ) from error
    except (OSError, RuntimeError) as error:
        log.info(f"check: no lock can be kept ({error}), so nobody would be told of a second check beside this one.")
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


# --- what was found ---


def rows_of(task: Task) -> list[dict[str, Any]]:
    """Return the figures of a task for the record."""
    return [_row(task, figure, found) for figure, found in judged(task)]


def _row(task: Task, figure: Figure, found: Compared) -> dict[str, Any]:
    known = (figure.key, f"{figure.key}_min", f"{figure.key}_max")
    committed = [task.record[key] for key in known if key in task.record] if task.is_of_its_size else []
    return {
        "task": task.name,
        "what": figure.what,
        "key": figure.key,
        "committed": committed,
        "then_code": task.code,
        "then": [turn[figure.key] for turn in task.then],
        "now": [turn[figure.key] for turn in task.now],
        **{key: rounded(value) for key, value in (("ratio", found.ratio), ("ratio_min", found.least))},
        "ratio_max": rounded(found.greatest),
        "largest_step_of_one_code": rounded(found.step),
        "verdict": figure.verdict(found),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as text; the ratio's spread and the committed figure's are least and greatest."""
    cells = []
    for row in rows:
        medians = [_short(statistics.median(row[who])) for who in ("then", "now")]
        first, *spread = map(_short, row["committed"]) if row["committed"] else ("-",)
        committed = f"{first} ({' to '.join(spread)})" if spread else first
        ratio = f"{row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})"
        cells.append(
            (row["what"], committed, *medians, ratio, f"{row['largest_step_of_one_code']:.3f}", row["verdict"])
        )
    return as_table(("what", "committed", "then", "now", "ratio", "steps to", "verdict"), cells, "llrrlrl")


def _ratio(row: Mapping[str, Any]) -> str:
    return f"{row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def sources_of(tasks: Sequence[Task]) -> list[str]:
    """Return a line for each committed record: what it was measured on."""
    lines = []
    for task in tasks:
        on = f"{task.record.get('device')}, torch {task.record.get('torch_version')}"
        lines.append(f"{task.path}: {str(task.record.get('commit'))[:12]}, {on}")
    return list(dict.fromkeys(lines))


def told(tasks: Sequence[Task], rows: Sequence[Mapping[str, Any]], begin: Mapping[str, Any]) -> int:
    """Print what was found, and return the exit code. Raises Refused: nothing was compared."""
    print(*sources_of(tasks), f"here: {begin['commit']}, {begin['device']}, torch {begin['torch_version']}", sep="\n")
    if rows:
        print(table(rows))
    for task in tasks:
        if task.not_compared:
            log.info(f"check: {task.name}: {task.not_compared}")
    worse = [f"{row['what']} ({row['verdict']}, {row['ratio']:.3f})" for row in rows if row["verdict"] in WORSE]
    broken = [task.name for task in tasks if task.is_broken]
    if not rows and not broken:
        raise Refused("check: nothing was compared. What stood in the way is said above.")
    said = f"worse: {'; '.join(worse)}" if worse else "none became slower"
    print(f"{count(len(rows), 'figure')} compared, {said}")
    return 1 if worse or broken else 0


# --- the command ---


def run_all(tasks: Sequence[Task], config: CheckConfig, work: Path, root: Path) -> None:
    """Lay the codes out and measure each task."""
    now = write_today(root, work / "now")
    codes_of = list(dict.fromkeys(task.code for task in tasks))
    trees = {code: work / f"then-{number}" for number, code in enumerate(codes_of)}
    for code, folder in trees.items():
        trees[code] = write_commit(root, code, folder) if config.other is None else write_today(Path(code), folder)
    (work / "turns").mkdir()
    for task in tasks:
        measure(task, trees[task.code], now, config.rounds, work / "turns")
        for row in rows_of(task):
            log.info(f"check: {row['what']}: {_ratio(row)}, {row['verdict']}")


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(CheckConfig, argv, check)
    if config is None:
        return 0
    tasks, begin = plan(config, ROOT), head(SCHEMA)
    if begin["commit"] is not None and begin["commit"].endswith(CHANGES):
        log.info("check: today's code has changes that are not committed; it is measured with them.")
    if begin["load_average_before"] > (os.cpu_count() or 1) / 4:
        log.info(
            f"check: load average is {begin['load_average_before']} before the start. Others' work widens the spread."
        )
    kinds = {str(task.record.get("device")).partition(",")[0] for task in tasks}  # but for its number of threads
    if others := kinds - {begin["device"].partition(",")[0]}:
        log.info(
            f"check: records of another device ({', '.join(sorted(others))}) are shown as all are: the turns judge."
        )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # processes and folders go first
        signal.signal(number, lambda given, _: sys.exit(128 + given))
    try:
        with alone(), tempfile.TemporaryDirectory(dir=config.work, prefix="check-") as work:
            run_all(tasks, config, Path(work), ROOT)
    except SystemExit:
        log.error("check: interrupted. Nothing is left of it, and no record was written.")
        raise
    rows = [row for task in tasks for row in rows_of(task)]
    missing = {task.name: task.not_compared for task in tasks if task.not_compared}
    after = {"load_average_after": round(os.getloadavg()[0], 2)}
    written = as_written(config)
    write_record(config.results, {**begin, **after, "config": written, "figures": rows, "not_compared": missing})
    return told(tasks, rows, begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
