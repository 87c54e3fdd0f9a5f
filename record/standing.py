"""Runs under a folder, and the state of each.

finished    summary.json is there
running     a process holds the run's lock, or its record was written a moment ago and says of no end
failed      its last start says with which error it ended
stopped     none of these: by a signal, or killed without a word
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from record.config_file import CONFIG, LATER
from record.files import METRICS, STARTS, SUMMARY
from record.history import is_run

State = Literal["running", "finished", "failed", "stopped"]
FRESH_SEC = 600.0  # so long a record may rest while its run goes on where its lock cannot be seen: on another machine
LOCKS = Path("/proc/locks")
MOST_DEPTH = 3  # of runs under their folder: runs/controls/seed17 is at 2


def runs_under(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, by name; a run's own folders are not looked into."""
    found: set[Path] = set()
    for depth in range(1, MOST_DEPTH + 1):
        for path in folder.glob("/".join("*" * depth)):
            is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if not (is_hidden or found.intersection(path.parents)) and is_run(path):
                found.add(path)
    return sorted(found)


def signature(folder: Path) -> tuple[Any, ...]:
    """Return what changes whenever a run's record does, or its state; it is cheap."""
    names = (CONFIG, LATER, "environment.json", STARTS, METRICS, SUMMARY, "eval.jsonl", "bad_samples.jsonl", "samples")
    found = []
    for name in names:
        try:
            at = (folder / name).stat()
            found.append((name, at.st_mtime_ns, at.st_size))
        except OSError:
            continue
    return (*found, is_held(folder), _is_fresh(folder))


def is_held(folder: Path) -> bool:
    """True where a process of this machine trains in a run's folder. The lock is not touched: its run would be refused."""
    try:
        at = (folder / ".lock").stat()
        place = f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x}:{at.st_ino}"
        return any(place in line.split() for line in LOCKS.read_text().splitlines())
    except OSError:
        return False


def _is_fresh(folder: Path) -> bool:
    times = [path.stat().st_mtime for name in (METRICS, STARTS) if (path := folder / name).is_file()]
    return bool(times) and time.time() - max(times) < FRESH_SEC


def state_of(folder: Path, starts: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> State:
    """Return a run's state by its record and its lock."""
    last = starts[-1] if starts else {}
    if summary:
        return "finished"
    if is_held(folder):
        return "running"
    if "failed" in last:
        return "failed"
    return "running" if "seconds" not in last and _is_fresh(folder) else "stopped"
