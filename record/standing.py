"""How a run stands, in a line: for lists of runs, and for who waits on one.

finished    summary.json is there
running     a process holds the run's lock, or its record was written a moment ago and says of no end
failed      its last start says with which error it ended
stopped     none of these: by a signal, or killed without a word
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from record.config_file import CONFIG, LATER
from record.files import METRICS, STARTS, SUMMARY
from record.history import History, is_run, number_of, read_history

State = Literal["running", "finished", "failed", "stopped"]
FRESH_SEC = 600.0  # so long a record may rest while its run goes on where its lock cannot be seen: on another machine
LOCKS = Path("/proc/locks")
MOST_DEPTH = 3  # of runs under their folder: runs/controls/seed17 is at 2


@dataclass(frozen=True)
class Standing:
    """A run in a line; None: not known."""

    name: str
    """Its folder's place under the folder of all runs."""
    folder: Path
    state: State
    failed: str | None
    """The error that it ended with."""
    target: str | None
    """reached, missed or pending; None: it has none."""
    images_per_sec: float | None
    fid: float | None
    clip: float | None
    val_loss: float | None
    images: float | None
    seconds: float | None
    """On the clocks of all starts."""
    cost: float | None
    started: float | None
    """Its first start, in seconds since 1970."""


def runs_under(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, by name; a run's own folders are not looked into."""
    found = []

    def look(place: Path, depth: int) -> None:
        try:
            inside = sorted(
                entry.path for entry in os.scandir(place) if entry.is_dir() and not entry.name.startswith(".")
            )
        except OSError:
            return
        for path in map(Path, inside):
            if is_run(path):
                found.append(path)
            elif depth < MOST_DEPTH:
                look(path, depth + 1)

    look(folder, 1)
    return found


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


@functools.lru_cache(maxsize=4096)
def standing_of(folder: Path, parent: Path, signed: tuple[Any, ...]) -> Standing:
    """Return how a run stands; of one whose record has not changed, without reading it again.

    Args:
        parent: the folder of all runs.
        signed: its `signature`.
    """
    del signed
    history = read_history(folder)
    summary, starts, config = history.summary, history.starts, history.config
    state = state_of(folder, starts, summary)
    line = {**_so_far(history), **summary}
    batch = next((value for of in (config, summary) if (value := number_of(of, "global_batch_size"))), None)
    batches = number_of(summary, "batches")
    failed, target = (starts[-1] if starts else {}).get("failed"), line.get("target")
    price = number_of(config, "cost.per_device_hour")
    hours = number_of(summary, "device_hours") or history.device_hours
    return Standing(
        name=folder.relative_to(parent).as_posix(),
        folder=folder,
        state=state,
        failed=str(failed) if state == "failed" else None,
        target=target if isinstance(target, str) else None,
        images_per_sec=number_of(line, "images_per_sec"),
        fid=number_of(line, "fid"),
        clip=number_of(line, "clip"),
        val_loss=number_of(line, "val_loss"),
        images=batches * batch if batches and batch else number_of(line, "images"),
        seconds=number_of(summary, "wall_seconds") or history.seconds or None,
        cost=number_of(summary, "cost") or (hours * price if hours and price else None),
        started=number_of(starts[0], "unix_time") if starts else None,
    )


def _so_far(history: History) -> dict[str, Any]:
    """Return the figures of a run that is not finished: its newest evaluation's, and those of its windows."""
    windows = history.windows
    speed = float(np.median(history.speeds)) if len(history.speeds) else None
    last = {"images": float(windows["images"][-1])} if len(windows["images"]) else {}
    scores = history.evaluations[-1] if history.evaluations else {}
    loss = history.validations[-1].get("val_loss") if history.validations else None
    return {"images_per_sec": speed, "fid": scores.get("fid"), "clip": scores.get("clip"), "val_loss": loss, **last}
