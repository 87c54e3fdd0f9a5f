"""Faults of whole runs: each hits a tiny run at a moment, the same command is given again, and the end is the unbroken run's.

    python -m tests.faults
    python -m tests.faults only=kill_rank_0_checkpoint,twice_mid_epoch out=none

only=ROW,...                       some of the rows (rows.py); default all
slack=1                            times the limits of all waits
out=reports/results/faults.json    the record, which keeps rows that are not run; faults.csv next to it; none: no file

The run is the miniature's, on two ranks by `composer -n 2`: twelve batches at most, checkpoints, evaluations, a target and an
MLPerf log. It trains in separate processes, forked from one that has imported the libraries (tests/warm_processes.py); in the
rows about imports they start cold. They halt at the row's moment (trainer.py) and are hit from outside.

Prints a line a row, then the counts. Exit code: 0, 1 when a row is not as it should be, 2 when the words cannot be read. As
root it goes into a mount namespace with a separate /dev/shm, and a row that leaves anything there is not good.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from common.files import write_atomic, write_json  # noqa: E402
from tests.faults.rows import MOMENTS, ROWS, Row  # noqa: E402
from tests.faults.runs import At, Setting, Skipped, Verdict  # noqa: E402

APART = "EASEL_FAULTS_APART"
SHARED_MEMORY = Path("/dev/shm")
SCHEMA = 1
COLUMNS = ("row", "fault", "moment", "outcome", "exit_code", "ended_sec", "load_average", "commit")
"""Columns of the CSV file; all but the first are keys of a row of the record."""


@dataclass
class Options:
    """The words of the command line."""

    only: list[str] = field(default_factory=lambda: list(ROWS))
    slack: float = 1.0
    out: str = "reports/results/faults.json"


def parse(words: Sequence[str]) -> Options:
    """Read the command line. Raises ValueError, with the choices."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    only = given.pop("only", ",".join(ROWS)).split(",")
    slack, out = float(given.pop("slack", "1")), given.pop("out", Options.out)
    if len(given) or not all("=" in word for word in words) or not set(only) <= set(ROWS):
        raise ValueError(
            f"{' '.join(words)}: not possible. Possible: only=ROW,... slack= out=. Rows: {', '.join(ROWS)}."
        )
    return Options(only, slack, out)


# --- rows ---


def draw(commit: str, recorded: Mapping[str, Mapping[str, Any]], num: int) -> list[str]:
    """Return the names of a few rows, others for each commit, of those that are quick and need no right to mount.

    Args:
        recorded: the rows of the committed record.
    """
    usual = statistics.median(row["seconds"] for row in recorded.values())
    quick = [name for name in ROWS if recorded[name]["seconds"] <= usual and not name.startswith("disk_")]
    return sorted(quick, key=lambda name: hashlib.sha256(f"{commit} {name}".encode()).digest())[:num]


def is_good(row: Row, verdict: Verdict) -> bool:
    """True when a row ended as it should, to the bit, and the message came that should come."""
    return verdict.outcome == row.outcome and not verdict.problems and not verdict.bits_lost


def run_row(name: str, setting: Setting) -> dict[str, Any]:
    """Run a row and return its entry in the record. Raises Skipped: not on this machine."""
    from run_folder.environment import commit

    row, began = ROWS[name], time.monotonic()
    at = At(setting, name, row.ranks)
    try:
        verdict = row.act(at)
    except Skipped:
        raise
    except Exception as error:  # the other rows go on
        verdict = Verdict(f"failed: {type(error).__name__}: {error}")
    finally:
        at.close()
    if APART in os.environ and (left := sorted(path.name for path in SHARED_MEMORY.iterdir())):
        verdict.problems.append(f"left in {SHARED_MEMORY}: {left}")
    if row.said is not None and not re.search(row.said, verdict.said):
        verdict.problems.append(f"no message like '{row.said}' in: {verdict.said[-1500:]}")
    if row.said is not None and f'File "{ROOT}/benchmark.py"' in verdict.said:  # the launcher's own is not ours
        verdict.problems.append(f"a traceback: {verdict.said[-1500:]}")
    good = is_good(row, verdict)
    if good:
        shutil.rmtree(at.home, ignore_errors=True)
    ended = None if verdict.ended_sec is None or row.end_sec is None else round(verdict.ended_sec, 1)
    return {
        "fault": row.fault,
        "moment": MOMENTS[row.moment],
        "expected": row.outcome,
        "outcome": verdict.outcome[:400],
        "good": good,
        "bits_lost": verdict.bits_lost,
        "exit_code": verdict.code,
        "ended_sec": ended,
        "seconds": round(time.monotonic() - began, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "commit": commit(),
        **({} if good else {"problems": [text[:400] for text in verdict.problems]}),
    }


def run_rows(options: Options, home: Path) -> None:
    """Run rows one after the other, and keep each as soon as it has ended."""
    import miniature

    (home / "miniature").mkdir()
    setting = Setting(home, miniature.make(home / "miniature"), options.slack)
    print(f"the unbroken run: {setting.whole(2)[1]}", flush=True)
    for name in options.only:
        try:
            entry = run_row(name, setting)
        except Skipped as reason:
            print(f"{name}: skipped, {reason}", flush=True)
            keep(options, skipped={name: str(reason)})
            continue
        mark = "" if entry["good"] else f"  NOT GOOD {entry['problems']}"
        print(f"{name} {entry['seconds']} s: {entry['outcome']}{mark}", flush=True)
        keep(options, {name: entry})


# --- the record ---


def counts_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return what the table comes to."""
    outcomes = [row["outcome"] for row in rows.values() if row["good"]]
    return {
        "injected": len(rows),
        "resumed": outcomes.count("resumed"),
        "went_on": outcomes.count("went on"),
        "refused": outcomes.count("refused"),
        "not_good": sum(not row["good"] for row in rows.values()),
        "bits_lost": sum(row["bits_lost"] for row in rows.values()),
    }


def table(record: Mapping[str, Any]) -> str:
    """Return the table as CSV: a line a row."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([name, *(row[key] for key in COLUMNS[1:])] for name, row in record["rows"].items())
    return file.getvalue()


def format_counts(counts: Mapping[str, int]) -> str:
    """Return the counts in words."""
    return (
        f"{counts['injected']} faults injected: {counts['resumed']} runs resumed, {counts['went_on']} went on, "
        f"{counts['refused']} starts refused with a message, bits lost {counts['bits_lost']}"
    )


def keep(options: Options, rows: Mapping[str, Any] | None = None, skipped: Mapping[str, str] | None = None) -> None:
    """Put rows into the record, which is made again where there is none."""
    from run_folder.environment import environment

    path = Path(options.out)
    before = json.loads(path.read_text()) if path.is_file() else {"rows": {}, "skipped": {}}
    of_all = {**before["rows"], **(rows or {})}
    reasons = {**before["skipped"], **(skipped or {})}
    facts = ("device", "python_version", "torch_version", "mosaicml_version", "mosaicml_streaming_version")
    found = {name: of_all[name] for name in ROWS if name in of_all}
    record = {
        "schema": SCHEMA,
        "what": "tests/faults: a fault at a moment of a tiny run, the same command again, and the unbroken run beside it",
        "date": time.strftime("%Y-%m-%d"),
        **{key: value for key, value in environment().items() if key in facts},
        "cores": os.cpu_count(),
        "seconds": round(sum(row["seconds"] for row in found.values())),
        "counts": counts_of(found),
        "skipped": {name: reason for name, reason in reasons.items() if name in ROWS and name not in found},
        "rows": found,
    }
    write_json(path, record)
    write_atomic(path.with_suffix(".csv"), table(record))


def apart(words: Sequence[str]) -> None:
    """Go into a mount namespace with a separate /dev/shm, where this user may; else do nothing."""
    if os.geteuid() or APART in os.environ or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        return
    os.environ[APART] = "1"
    inside = f'mount -t tmpfs tmpfs {SHARED_MEMORY} && exec "$@"'
    again = [sys.executable, "-m", "tests.faults", *words]
    os.execvp("unshare", ["unshare", "-m", "bash", "-c", inside, "faults", *again])


def main(words: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    try:
        options = parse(words)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    apart(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is below is put away
    home = Path(tempfile.mkdtemp(prefix="easel-faults-"))
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    os.environ["TMPDIR"] = tempfile.tempdir = str(home)
    if options.out == "none":
        options.out = str(home / "faults.json")
    is_good = False
    try:
        run_rows(options, home)
        record = json.loads(Path(options.out).read_text())
        is_good = all(row["good"] for name, row in record["rows"].items() if name in options.only)
        print(f"\n{format_counts(record['counts'])}; {record['seconds']} s")
    finally:
        if is_good:
            shutil.rmtree(home, ignore_errors=True)
        else:
            print(f"what the runs wrote: {home}", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
