"""Run the same job rung by rung, each in a separate process, and keep one record a rung.

    python -m bench.ladder yamls/ladders/sd2_512.yaml                            # on a GPU machine; see also bench.gpu
    python -m bench.ladder yamls/ladders/sd2_tiny_cpu.yaml results=/tmp/ladder   # the same code on a CPU

A rung is a YAML of yamls/ with the ladder's keys and the rung's; the first one is the baseline. The table sets each
against the last one before it that ran, or against the one that it names as `over`, and against the baseline, where device
and commit are the same (and the call, where no commit names the code). A rung's record,
RESULTS/LADDER/RUNG.json, is the run's summary.json with the rung's name, command, evaluations, validations, status:
ok, or refused (by the configuration check), out_of_memory, timeout, killed, failed, with the end of what the run printed. A
rung that has an `ok` record of this commit is not run again, so that the command can be called until all are there; no call
takes longer than `budget_sec` and `limit_sec` together. In a copy of the tree, EASEL_COMMIT says which commit this is.
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
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from common.command import command
from common.command_line import parse_command_line
from common.errors import ConfigError
from common.files import write_json, write_problem
from common.log import log, render_table
from common.value_types import kind_of_path, truncate
from config import load, to_yaml
from run_folder import processes
from run_folder.environment import commit, device_name
from run_folder.files import read_lines
from run_folder.history import TARGET_KEYS, VAL_LOSS, WINDOWS, read_history, rounded

SPEED = "images_per_sec"
COLUMNS = ("status", SPEED, "over_before", "over_first", f"{SPEED}_min", f"{SPEED}_max")
COLUMNS += ("mfu", "peak_mem_gib", "first_step_seconds")
PROGRAMS = {
    "benchmark": ["benchmark.py"],
    "predecessor": ["-m", "bench.predecessor"],
    "evaluation": ["-m", "bench.evaluation"],
}
"""What runs a rung, as composer's launcher takes it."""
MOST_RANKS = 64  # of one machine
OF_A_POINT = ("batch", "images", "seconds", "weights")
OF_POINTS = {
    "evaluation": (*OF_A_POINT, "seconds_with_eval", "guidance", "num_images", "fid", "clip"),
    "validation": (*OF_A_POINT, "num_samples", "val_loss", "val_loss_bins"),
}
"""What a record keeps of each evaluation, and of each validation."""


@dataclass(frozen=True)
class Rung:
    """One run of a ladder."""

    name: str
    yaml: str
    keys: list[str]
    program: str = "benchmark"
    ranks: int = 1
    """Processes, see `composer -n`."""
    over: str | None = None
    """The rung that it is compared with; None: the last one before it that ran."""
    limit_sec: int | None = None
    """Its own limit, for one that takes longer than the ladder's; it is then the only one of its call."""


@dataclass(frozen=True)
class Ladder:
    """A file of yamls/ladders/."""

    limit_sec: int
    budget_sec: int
    rungs: list[Rung]
    keys: list[str] = field(default_factory=list)
    """What each rung begins with."""
    needs_gpu: bool = False
    """Its rungs mean nothing elsewhere: it is refused there."""
    name: str = ""
    """The file's."""

    def room_sec(self, rung: Rung) -> int:
        """Return how late in a call a rung is started, so that none takes longer than budget and limit together."""
        return self.budget_sec + self.limit_sec - (rung.limit_sec or self.limit_sec)


@dataclass(frozen=True)
class LadderConfig:
    """The keys of this command."""

    results: str = "reports/results"
    """Folder of the records."""
    runs: str | None = None
    """Folder that keeps the rungs' runs. null: they are removed."""


def read_ladder(path: str) -> Ladder:
    """Read a ladder's file. Raises ConfigError: it is not there, or not a ladder."""
    if kind_of_path(path) != "file":
        known = ", ".join(sorted(str(file) for file in Path(__file__).parent.parent.glob("yamls/ladders/*.yaml")))
        raise ConfigError([f"{truncate(path, 300)}: no such file. Known: {known}."])
    try:
        ladder: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Ladder), OmegaConf.load(path)))
        _check(ladder)
    except Exception as error:  # the YAML reader's exceptions are of several unrelated classes
        own, of_rung = (", ".join(each.name for each in of) for of in (fields(Ladder)[:-1], fields(Rung)))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            [f"{path}: is not a ladder ({reason}). Possible keys: {own}; of a rung: {of_rung}."]
        ) from error
    rungs = [replace(rung, keys=[*ladder.keys, *rung.keys]) for rung in ladder.rungs]
    return replace(ladder, name=Path(path).stem, rungs=rungs)


def _check(ladder: Ladder) -> None:
    """Raise ValueError for what a ladder cannot be. Each rung has its own record, and is compared with one before it."""
    if not ladder.rungs or ladder.limit_sec < 1:
        raise ValueError("it has no rungs, or no time for one")
    before: set[str] = set()
    most = ladder.budget_sec + ladder.limit_sec
    for rung in ladder.rungs:
        if not re.fullmatch(r"[\w-]+", rung.name) or rung.name in before:
            raise ValueError(f"rung {rung.name!r} needs a unique name of letters, digits, _ and -")
        if rung.program not in PROGRAMS or rung.over not in (None, *before):
            raise ValueError(f"rung {rung.name!r} has an unknown program, or `over` is not an earlier rung")
        if not (1 <= rung.ranks <= MOST_RANKS and (rung.limit_sec is None or 1 <= rung.limit_sec <= most)):
            raise ValueError(f"rung {rung.name!r}: ranks are 1 to {MOST_RANKS}, limit_sec 1 to {most}")
        if any(not isinstance(key, str) for key in (*ladder.keys, *rung.keys)):
            raise ValueError(f"rung {rung.name!r} has a key that is not a string such as 'seed=1'")
        before.add(rung.name)


def run_rung(rung: Rung, limit_sec: int, runs: Path | None = None, group: str | None = None) -> dict[str, Any]:
    """Run one rung to its end or its limit and return its record; its run stays in `runs`, or is removed.

    Args:
        group: of the runs, where they are logged.
    """
    program = PROGRAMS[rung.program]
    record = {"rung": rung.name, "command": f"composer -n {rung.ranks} {' '.join([*program, rung.yaml, *rung.keys])}"}
    with contextlib.nullcontext(runs) if runs else tempfile.TemporaryDirectory() as folder:
        words = [rung.yaml, *rung.keys, f"run_folder={folder}", f"run_name={rung.name}", "loggers.progress_bar=false"]
        if group and rung.program == "benchmark" and not any(key.startswith("loggers.group=") for key in rung.keys):
            words.append(f"loggers.group={group}")
        started = time.monotonic()
        code, output = processes.run(processes.composer_command(rung.ranks, *program, *words), limit_sec)
        record["process_seconds"] = round(time.monotonic() - started, 1)
        summary = Path(folder, rung.name, "summary.json")
        if code == 0 and summary.is_file():
            return {**record, "status": "ok", **json.loads(summary.read_text()), **_of_run(summary.parent)}
    ended = {"status": processes.status_of(code, output), "limit_sec": limit_sec}
    return {**record, **ended, "device": device_name(), "commit": commit(), "output_end": output[-2000:]}


def _of_run(run: Path) -> dict[str, Any]:
    """Return what a record keeps of a finished run besides its summary: windows, evaluations, validations."""
    lines, extra = list(read_lines(run / "metrics.jsonl")), {}
    if windows := [rounded(float(speed)) for speed in read_history(run).speeds]:
        extra[WINDOWS] = windows
    for kind, keys in OF_POINTS.items():
        if points := [{key: line[key] for key in keys} for line in lines if line.get(kind)]:
            extra[f"{kind}s"] = points
    return extra


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a rung's record, or None: there is none, or no whole one."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and {"rung", "status"} <= record.keys() else None


def is_clean(name: str | None) -> bool:
    """True for the name of a commit without changes to it."""
    return name is not None and not name.endswith("+changes")


def is_of(record: Mapping[str, Any] | None, here: str | None) -> bool:
    """True for a record of this commit; without one, or with changes, nothing says that a record is of this code."""
    return is_clean(here) and record is not None and record.get("commit") == here


def is_done(path: Path, here: str | None) -> bool:
    """True for a record of this commit that is whole."""
    record = read_record(path)
    return is_of(record, here) and record is not None and record["status"] == "ok"


def log_unknown_commit(name: str, here: str | None) -> None:
    """Say why every rung runs again, where it does."""
    if not is_clean(here):
        text = "no commit is known (set EASEL_COMMIT where there is no git)" if here is None else f"the tree is {here}"
        log.info(f"{name}: {text}, so every rung runs again; those without a record first")


def _problems(ladder: Ladder, path: str, config: LadderConfig, here: str | None) -> list[str]:
    """Return what would be known only after minutes: folders, the device, and a kept run of another commit."""
    folders = {"results": config.results, "runs": config.runs}
    texts = [f"{key}: {text}" for key, folder in folders.items() if folder and (text := write_problem(folder))]
    if ladder.needs_gpu and not torch.cuda.is_available():
        way = "Run it on a GPU; on a CPU: python -m bench.ladder yamls/ladders/sd2_tiny_cpu.yaml results=FOLDER"
        texts.append(f"{path}: its rungs need a GPU, and torch finds none here. {way}")
    for rung in ladder.rungs if config.runs else ():
        summary = Path(config.runs or "", rung.name, "summary.json")
        made_by = json.loads(summary.read_text()).get("commit") if summary.is_file() else here
        if made_by != here:
            text = f"{summary.parent} is a finished run of commit {made_by}"
            texts.append(f"runs: {text}. Remove it, or give another folder.")
    return texts


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
    same = ("device", "commit") if is_clean(record.get("commit")) else ("device", "commit", "call")
    is_same = all(record.get(key) == other.get(key) for key in same)
    return float(f"{record[SPEED] / other[SPEED]:.3g}") if is_same else None


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format records as a table for the terminal, one row a rung; with what became of its target, where one has a target."""
    columns = COLUMNS if all(record.get("target") is None for record in records) else (*COLUMNS, *TARGET_KEYS)
    if any(record.get(VAL_LOSS) is not None for record in records):
        columns = (*columns, VAL_LOSS)
    rows = [[record["rung"], *(record.get(column) for column in columns)] for record in records]
    return render_table(("rung", *columns), rows, "ll" + "r" * (len(columns) - 1))


@command(keys=LadderConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    ladder, here = read_ladder(argv[0]), commit()
    command_line = parse_command_line(argv[1:], {})
    config = load(LadderConfig, command_line, check=lambda config: [])
    if command_line.print_config:
        print(to_yaml(config), end="")
        return 0
    if problems := _problems(ladder, argv[0], config, here):
        raise ConfigError(problems)
    started, call, records = time.monotonic(), f"{time.time():.0f}", {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interrupt: the rung is ended first
    log_unknown_commit(ladder.name, here)
    results, runs = Path(config.results).resolve() / ladder.name, Path(config.runs).resolve() if config.runs else None
    results.mkdir(parents=True, exist_ok=True)
    # Those without a record first. Then those with their own limit_sec, before the time is used up by others.
    paths = [(results / f"{rung.name}.json", rung) for rung in ladder.rungs]
    for path, rung in sorted(paths, key=lambda of: (of[0].is_file(), of[0].is_file() and of[1].limit_sec is None)):
        if is_done(path, here):
            print(f"{rung.name}: has a record of this commit", flush=True)
        elif time.monotonic() - started > (room := ladder.room_sec(rung)):
            print(f"{rung.name}: not started, {room} s are spent; call again to resume", flush=True)
            continue
        else:
            record = {"call": call, **run_rung(rung, rung.limit_sec or ladder.limit_sec, runs, ladder.name)}
            write_json(path, record)
            why = "" if record["status"] == "ok" else f"; the end of its output: {path}"
            print(f"{rung.name}: {record['status']} after {record['process_seconds']} s{why}", flush=True)
        records[rung.name] = json.loads(path.read_text())
    rows = with_ratios(ladder, records)
    print(*dict.fromkeys(str(row.get("device")) for row in rows), sep="\n")
    print(table(rows))
    is_bad = any(record["status"] in ("failed", "timeout", "killed") for record in rows)
    return 1 if is_bad or not any(record["status"] == "ok" for record in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
