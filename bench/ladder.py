"""Run the same job rung by rung, each in a process of its own, and keep one record a rung.

    make gpu-ladder                                                              # on a GPU machine
    python -m bench.ladder yamls/ladders/sd2_tiny_cpu.yaml results=/tmp/ladder   # the same code on a CPU

A rung is a YAML of yamls/ with the ladder's keys and some of its own; the first one is the baseline. The table sets each
against the last one before it that ran, or against the one that it names as `over`, and against the baseline, where device
and commit are the same (and the call, where no commit names the code); RESULTS/LADDER/ladder.png shows it. A rung's record,
RESULTS/LADDER/RUNG.json, is the run's summary.json with the rung's name, command, evaluations, validations, status:
ok, or refused (by the configuration check), out_of_memory, timeout, killed, failed, with the end of what the run printed. A
rung that has an `ok` record of this commit is not run again, so that the command can be called until all are there; no call
takes longer than `budget_sec` and `limit_sec` together. Where there is no git, EASEL_COMMIT says which commit this is.
results= defaults to reports/results; runs=FOLDER keeps the rungs' runs there (checkpoints, samples), else they are removed.
Exit code: 0 when each rung with a record ran, was refused or ran out of memory, 1 when one failed or none ran, 2 when the
ladder cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from callbacks.quality_target import TARGET_KEYS
from cli.command import command
from cli.errors import ConfigError
from cli.files import write_json
from cli.limits import kind_of_path, shown
from cli.log import log
from cli.table import as_table
from preflight.limits import unwritable
from record import processes
from record.environment import commit, device_name
from record.files import read_lines
from record.history import read_history
from record.summary import VAL_LOSS, WINDOWS, rounded

SPEED = "images_per_sec"
COLUMNS = (
    "status",
    SPEED,
    "over_before",
    "over_first",
    "images_per_sec_min",
    "images_per_sec_max",
    "mfu",
    "peak_mem_gib",
    "first_step_seconds",
)
PROGRAMS = {
    "benchmark": ["benchmark.py"],
    "predecessor": ["-m", "bench.predecessor"],
    "evaluation": ["-m", "bench.evaluation"],
}
"""What runs a rung, as composer's launcher takes it."""
MOST_RANKS = 64  # of one machine
OF_POINTS = {
    "evaluation": (
        "batch",
        "images",
        "seconds",
        "seconds_with_eval",
        "weights",
        "guidance",
        "num_images",
        "fid",
        "clip",
    ),
    "validation": ("batch", "images", "seconds", "weights", "num_samples", "val_loss", "val_loss_bins"),
}
"""What a record keeps of each evaluation, and of each validation."""


@dataclass(frozen=True)
class Rung:
    """One run of a ladder."""

    name: str
    yaml: str
    keys: tuple[str, ...]
    program: str = "benchmark"
    ranks: int = 1
    """Processes, see `composer -n`."""
    over: str | None = None
    """The rung that it is set against; None: the last one before it that ran."""
    limit_sec: int | None = None
    """A limit of its own, for one that takes longer than the ladder's; it is then the only one of its call."""


@dataclass(frozen=True)
class Ladder:
    """A file of yamls/ladders/."""

    name: str
    limit_sec: int
    budget_sec: int
    rungs: tuple[Rung, ...]
    needs_gpu: bool = False
    """Its rungs say nothing elsewhere: it is refused there."""

    def room_sec(self, rung: Rung) -> int:
        """Return how late in a call a rung is started, so that none takes longer than budget and limit together."""
        return self.budget_sec + self.limit_sec - (rung.limit_sec or self.limit_sec)


def read_ladder(path: str) -> Ladder:
    """Read a ladder's file. Raises ConfigError: it is not there, or not a ladder."""
    if kind_of_path(path) != "file":
        known = ", ".join(sorted(str(file) for file in Path(__file__).parent.parent.glob("yamls/ladders/*.yaml")))
        raise ConfigError([f"{shown(path, 300)}: no such file. Known: {known}."])
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(content, dict) or "rungs" not in content:
            raise ValueError("it has no rungs")
        if not isinstance(common := content.pop("keys", []), list):
            raise ValueError("its keys are no list")
        rungs = tuple(Rung(**{**rung, "keys": (*common, *rung["keys"])}) for rung in content["rungs"])
        seconds = {key: int(content[key]) for key in ("limit_sec", "budget_sec")}
        ladder = Ladder(Path(path).stem, **{**content, **seconds, "rungs": rungs})
        _check_rungs(rungs, content["rungs"])
        most = ladder.budget_sec + ladder.limit_sec
        for rung in rungs:
            if rung.limit_sec is not None and not (isinstance(rung.limit_sec, int) and 1 <= rung.limit_sec <= most):
                raise ValueError(f"rung {rung.name!r} has limit_sec {rung.limit_sec!r}; possible: 1 to {most}")
            if not (isinstance(rung.ranks, int) and 1 <= rung.ranks <= MOST_RANKS):
                raise ValueError(f"rung {rung.name!r} has ranks {rung.ranks!r}; possible: 1 to {MOST_RANKS}")
        if ladder.limit_sec < 1:
            raise ValueError(f"limit_sec is {ladder.limit_sec}")
    except Exception as error:  # the YAML reader's exceptions are of several unrelated classes
        wanted = (
            "limit_sec, budget_sec and rungs, each with name, yaml and keys, and program, ranks, over or limit_sec; "
            "needs_gpu; keys that each rung begins with"
        )
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, KeyError):
            first_line = f"it has no {error.args[0]}"
        raise ConfigError([f"{path}: is no ladder ({first_line}). Wanted: {wanted}."]) from error
    return ladder


def _check_rungs(rungs: Sequence[Rung], given: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for what a rung cannot be. Each has a record of its own, and is set against one before it."""
    if not rungs:
        raise ValueError("it has no rungs")
    before: set[str] = set()
    for rung, content in zip(rungs, given, strict=True):
        if not re.fullmatch(r"[\w-]+", rung.name) or not isinstance(content["keys"], list):
            raise ValueError(f"rung {rung.name!r} has no plain name, or its keys are no list")
        if bad := [word for word in (rung.yaml, *rung.keys) if not isinstance(word, str)]:
            raise ValueError(f"rung {rung.name!r} has {bad[0]!r} where a text is wanted, e.g. 'seed=1'")
        if rung.name in before:
            raise ValueError(f"two rungs are called {rung.name!r}")
        if rung.program not in PROGRAMS or rung.over not in (None, *before):
            raise ValueError(f"rung {rung.name!r} names a program that there is not, or no rung before it")
        before.add(rung.name)


def run_rung(
    rung: Rung, limit_sec: int, runs: Path | None = None, group: str | None = None, tree: Path = processes.ROOT
) -> dict[str, Any]:
    """Run one rung to its end or its limit and return its record; its run stays in `runs`, or is removed.

    Args:
        group: of the runs, where they are logged.
        tree: the checkout whose code runs it.
    """
    with contextlib.nullcontext(runs) if runs else tempfile.TemporaryDirectory() as folder:
        arguments = [
            rung.yaml,
            *rung.keys,
            f"run_folder={folder}",
            f"run_name={rung.name}",
            "loggers.progress_bar=false",
        ]
        if group and rung.program == "benchmark" and not any(key.startswith("loggers.group=") for key in rung.keys):
            arguments.append(f"loggers.group={group}")
        program = PROGRAMS[rung.program]
        record = {
            "rung": rung.name,
            "command": f"composer -n {rung.ranks} {' '.join([*program, rung.yaml, *rung.keys])}",
        }
        started = time.monotonic()
        code, output = processes.run(processes.of_composer(rung.ranks, *program, *arguments), limit_sec, tree)
        record["process_seconds"] = round(time.monotonic() - started, 1)
        summary = Path(folder, rung.name, "summary.json")
        if code == 0 and summary.is_file():
            lines = list(read_lines(summary.with_name("metrics.jsonl")))
            points = {
                f"{kind}s": [{key: line[key] for key in keys} for line in lines if line.get(kind)]
                for kind, keys in OF_POINTS.items()
            }
            found = {kinds: short for kinds, short in points.items() if short}
            windows = [rounded(float(speed)) for speed in read_history(summary.parent).speeds]
            speeds = {WINDOWS: windows} if windows else {}
            return {**record, "status": "ok", **json.loads(summary.read_text()), **speeds, **found}
    ended = {"status": processes.status_of(code, output), "limit_sec": limit_sec}
    return {**record, **ended, "device": device_name(), "commit": commit(), "output_end": output[-2000:]}


def _done(path: Path, here: str | None) -> bool:
    """True for a whole record of this commit; without one, or with changes, nothing says that a record is of this code."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    is_commit = here is not None and not here.endswith("+changes")
    return is_commit and isinstance(record, dict) and record.get("status") == "ok" and record.get("commit") == here


def _problems_here(ladder: Ladder, path: str, folders: Mapping[str, Path | None]) -> list[str]:
    """Return what would be known only after minutes: no place for the records, no device for the rungs."""
    found = [f"{key}: {text}" for key, folder in folders.items() if folder is not None and (text := unwritable(folder))]
    if ladder.needs_gpu and not torch.cuda.is_available():
        ways = (
            "Run it where there is one; on a CPU: python -m bench.ladder yamls/ladders/sd2_tiny_cpu.yaml results=FOLDER"
        )
        found.append(f"{path}: its rungs need a GPU, and torch finds none here. {ways}")
    return found


def _kept_problem(runs: Path | None, ladder: Ladder, here: str | None) -> str | None:
    """Say which kept run is finished and of another commit: its record would be written as one of today."""
    for rung in ladder.rungs if runs is not None else ():
        summary = runs / rung.name / "summary.json"
        made_by = json.loads(summary.read_text()).get("commit") if summary.is_file() else here
        if made_by != here:
            return f"runs: {summary.parent} is a finished run of commit {made_by}. Remove it, or give another folder."
    return None


def with_ratios(ladder: Ladder, records: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records there are in the ladder's order, each with its speed over the step before and over the first.

    None where one of the two has no speed, or was measured on another device or commit.
    """
    rows: list[dict[str, Any]] = []
    last: dict[str, Any] | None = None
    for rung in ladder.rungs:
        if (record := records.get(rung.name)) is None:
            continue
        first = records.get(ladder.rungs[0].name)
        before = records.get(rung.over) if rung.over else last
        rows.append({**record, "over_before": _ratio(record, before), "over_first": _ratio(record, first)})
        if record.get(SPEED) and rung.over is None:
            last = record
    return rows


def _ratio(record: Mapping[str, Any], other: Mapping[str, Any] | None) -> float | None:
    if other is None or not (record.get(SPEED) and other.get(SPEED)):
        return None
    # Without a commit, or with changes to it, only the rungs of one call are of one code.
    is_commit = record.get("commit") is not None and not record["commit"].endswith("+changes")
    same = ("device", "commit") if is_commit else ("device", "commit", "call")
    is_same = all(record.get(key) == other.get(key) for key in same)
    return float(f"{record[SPEED] / other[SPEED]:.3g}") if is_same else None


def draw(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw images/s of each rung that ran with its spread, the first at the top, and both ratios beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran = [row for row in rows if row.get(SPEED)]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.42 * len(ran)), layout="constrained")
    speeds = [row[SPEED] for row in ran]
    spread = [[_extreme(row, "min") for row in ran], [_extreme(row, "max") for row in ran]]
    away = [[abs(end - speed) for end, speed in zip(ends, speeds, strict=True)] for ends in spread]
    bars = axes.barh([row["rung"] for row in ran], speeds, xerr=away, color="#31688e", ecolor="#808080", capsize=3)
    ratios = [("-" if r["over_before"] is None else f"x{r['over_before']:g}", r["over_first"]) for r in ran]
    texts = [f"{before}, {'-' if first is None else f'x{first:g}'} over the first" for before, first in ratios]
    axes.bar_label(bars, texts, padding=4)
    axes.invert_yaxis()
    axes.set_xlim(right=1.45 * max(spread[1]))
    axes.set_xlabel("images/s, median and extremes of the windows (ratio to the step before, and to the first)")
    axes.set_title(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _extreme(row: Mapping[str, Any], end: str) -> float:
    """Return the least or the greatest window of a rung, images/s."""
    return row[f"images_per_sec_{end}"]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format records as a table for the terminal, one row a rung; with what became of its target, where one has a target."""
    columns = COLUMNS if all(record.get("target") is None for record in records) else (*COLUMNS, *TARGET_KEYS)
    if any(record.get(VAL_LOSS) is not None for record in records):
        columns = (*columns, VAL_LOSS)
    rows = [[record["rung"], *(record.get(column) for column in columns)] for record in records]
    return as_table(("rung", *columns), rows, "ll" + "r" * (len(columns) - 1))


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    folders: dict[str, Path | None] = {"results": Path("reports/results"), "runs": None}
    ladder = read_ladder(argv[0])
    for word in argv[1:]:
        key, _, value = word.partition("=")
        if key not in folders or not value:
            known = ", ".join(f"{name}=FOLDER" for name in folders)
            raise ConfigError([f"command line: '{word}' is not known. Known: {known}."])
        folders[key] = Path(value).resolve()
    if found := _problems_here(ladder, argv[0], folders):
        raise ConfigError(found)

    started, records, here, call = time.monotonic(), {}, commit(), f"{time.time():.0f}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interrupt: the rung is ended first
    if here is None or here.endswith("+changes"):
        given = "no commit is known (set EASEL_COMMIT where there is no git)" if here is None else f"the tree is {here}"
        log.info(f"{ladder.name}: {given}, so every rung runs again; those without a record first")
    if text := _kept_problem(folders["runs"], ladder, here):
        raise ConfigError([text])
    paths = {rung: folders["results"] / ladder.name / f"{rung.name}.json" for rung in ladder.rungs}
    # Those without a record first. Of the others one that needs a call for itself: what is refused again would take its time.
    for rung, path in sorted(paths.items(), key=lambda p: (p[1].is_file(), p[1].is_file() and p[0].limit_sec is None)):
        if _done(path, here):
            print(f"{rung.name}: has a record of this commit", flush=True)
        elif time.monotonic() - started > (room := ladder.room_sec(rung)):
            print(f"{rung.name}: not started, {room} s are spent; call again to resume", flush=True)
            continue
        else:
            record = {"call": call, **run_rung(rung, rung.limit_sec or ladder.limit_sec, folders["runs"], ladder.name)}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, record)
            why = "" if record["status"] == "ok" else f"; the end of what it said: {path}"
            print(f"{rung.name}: {record['status']} after {record['process_seconds']} s{why}", flush=True)
        records[rung.name] = json.loads(path.read_text())
    rows = with_ratios(ladder, records)
    print(*dict.fromkeys(str(row.get("device")) for row in rows), sep="\n")
    print(table(rows))
    is_quality = any(f"{kind}s" in row for row in rows for kind in OF_POINTS)
    if sum(bool(row.get(SPEED)) for row in rows) > 1 and not is_quality:
        draw(rows, folders["results"] / ladder.name / "ladder.png", f"{ladder.name}, {rows[0].get('device')}")
    is_bad = any(record["status"] in ("failed", "timeout", "killed") for record in rows)
    return 1 if is_bad or not any(record["status"] == "ok" for record in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
