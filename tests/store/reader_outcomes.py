"""A reading: ranks at work in processes of their own, what they have seen so far, and a verdict on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.store import processes
from tests.store.server import free_ports

ROOT = Path(__file__).resolve().parents[2]
POLL_SEC = 0.01
LAUNCHER_SEC = 3.0  # after a rank has failed, until the others are ended; composer's launcher gives them 30

RIGHT = "right"
NAMED = "stopped, cause named"
UNNAMED = "stopped, no cause"
WRONG = "WRONG DATA"
SHORT = "SHORT EPOCH"
HANG = "HANG"
LEFT = "WORKERS LEFT"
MISSED = "fault missed"
OUTCOMES = (RIGHT, NAMED, UNNAMED, SHORT, HANG, LEFT, WRONG, MISSED)

Orders = list[list[list[int]]]
"""Rank -> batch -> numbers of its samples."""


@dataclass
class Verdict:
    """What became of a reading."""

    outcome: str
    detail: str = ""


@dataclass
class Rank:
    """What a rank has told."""

    pid: int = 0
    batches: list[list[int]] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    epochs: int = 0
    owed_batches: int | None = None
    shared_memory: tuple[int, int] | None = None
    """Number of plain streaming's shared memory, and the inode that tells it from a later one; None: Easel has no such."""
    error: tuple[str, str] | None = None
    """Type and text of the exception that ended it."""
    ended: bool = False
    """It said that it was through."""
    status: int | None = None
    """Exit code, or the negative number of a signal; None: it lives."""
    ended_by_launcher: bool = False
    _read: int = 0

    def take(self, folder: Path, rank: int) -> None:
        """Read the lines that are new."""
        with contextlib.suppress(FileNotFoundError), open(folder / f"{rank}.jsonl", "rb") as file:
            file.seek(self._read)
            for line in file.read().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._note(json.loads(line))

    def _note(self, line: dict[str, Any]) -> None:
        if line["event"] == "ready":
            self.owed_batches = line["batches"]
            self.shared_memory = line["shared_memory"] and tuple(line["shared_memory"])
        elif line["event"] == "batch":
            self.batches.append(line["numbers"])
            self.wrong += line["wrong"]
        elif line["event"] == "epoch":
            self.epochs += 1
        elif line["event"] == "error":
            self.error = (line["type"], line["text"])
        elif line["event"] == "end":
            self.ended = True


class Nursery:
    """The process that forks ranks (reader.py)."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "tests.store.reader", str(folder)]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with open(folder / "reader.log", "w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stderr=log, text=True, start_new_session=True, **pipes
            )

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Versions, commit and device; to be asked for once, it waits until everything is imported."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the reader did not start: {(self.folder / 'reader.log').read_text()[-2000:]}")
        return json.loads(line)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The stage: name -> content."""
        assert self.facts
        return {path.name: path.read_bytes() for path in sorted((self.folder / "stage").iterdir())}

    def ask(self, task: dict[str, Any]) -> None:
        """Start a reading's ranks."""
        assert self.facts and self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it, and every rank with it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(30)


class Reading:
    """The ranks that read a stage once.

    Args:
        kind: plain, plain+hash or ours.
        folder: a new one, for what they write down.
        remote, local: as a user gives them.
        pace_sec: pause after each batch.
        patience_sec: how long ours waits for a store that is away.
        timeout_sec: streaming's download_timeout for plain; None: its own.
    """

    DEFAULTS = dict(environment={}, ranks=2, workers=2, epochs=1, shuffle=False)
    DEFAULTS |= dict(pace_sec=0.03, patience_sec=None, timeout_sec=None)

    def __init__(self, nursery: Nursery, kind: str, folder: Path, *, remote: str | None, local: str, **changes: Any):
        folder.mkdir(parents=True)
        task = {**self.DEFAULTS, **changes, "remote": remote, "local": local, "folder": str(folder)}
        self.nursery, self.kind, self.folder, self.epochs = nursery, kind, folder, task["epochs"]
        self.ranks = [Rank() for _ in range(task["ranks"])]
        self.started = time.monotonic()
        task |= {"kind": kind.partition("+")[0], "master_port": free_ports(1)}
        nursery.ask({**task, "validate_hash": nursery.facts["hash"] if kind == "plain+hash" else None})

    # --- while it goes on ---

    def look(self) -> None:
        """Read what is new."""
        ended: dict[int, int] = {}  # read before the lines: whoever has ended writes no more
        for entry in self._lines("ended.jsonl"):
            ended[entry["rank"]] = entry["status"]
        for entry in self._lines("pids.jsonl"):
            self.ranks[entry["rank"]].pid = entry["pid"]
        for number, rank in enumerate(self.ranks):
            rank.take(self.folder, number)
            rank.status = ended.get(number)

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / name).read_text().splitlines():
                with contextlib.suppress(ValueError):  # written at this moment
                    yield json.loads(line)

    @property
    def is_over(self) -> bool:
        """True when no rank lives."""
        return all(rank.status is not None for rank in self.ranks)

    @property
    def progress(self) -> float:
        """The part of the batches that has arrived, in [0, 1]."""
        owed = [rank.owed_batches for rank in self.ranks]
        if None in owed:
            return 0.0
        return sum(len(rank.batches) for rank in self.ranks) / (self.epochs * sum(owed))

    def wait_for(self, progress: float, limit_sec: float = 60.0) -> bool:
        """Return when so much has arrived; False: it ended before, or the time is up."""
        deadline = time.monotonic() + limit_sec
        while True:
            self.look()
            if self.progress >= progress:
                return True
            if self.is_over or time.monotonic() > deadline:
                return False
            time.sleep(POLL_SEC)

    def kill_trainers(self) -> None:
        """Kill the ranks as a batch system or a lack of memory does, and not their workers."""
        for rank in self.ranks:
            if rank.status is None and rank.pid in processes.members(rank.pid):
                os.kill(rank.pid, signal.SIGKILL)

    def workers_left(self, limit_sec: float) -> int:
        """Wait for the workers of the ranks to end, and return how many live on."""
        deadline = time.monotonic() + limit_sec
        while left := sum(len(processes.members(rank.pid)) for rank in self.ranks):
            if time.monotonic() > deadline:
                return left
            time.sleep(0.1)
        return 0

    # --- its end ---

    def finish(self, limit_sec: float, *, launcher: bool = False) -> list[Rank]:
        """Wait for all ranks to end, kill what lives after the limit, and return what they told.

        Args:
            launcher: end the others when one has failed, as a launcher of ranks does, or has left too early.
        """
        deadline, failed_at = time.monotonic() + limit_sec, None
        while True:
            self.look()
            if self.is_over or time.monotonic() > deadline:
                break
            if launcher and failed_at is None and any(rank.status or self.is_short(rank) for rank in self.ranks):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + LAUNCHER_SEC:
                for rank in self.ranks:
                    if rank.status is None:
                        rank.ended_by_launcher = True
                break
            time.sleep(POLL_SEC)
        alive = [rank for rank in self.ranks if rank.status is None]
        self.close()
        for rank in alive:
            rank.status = None  # what it would have come to without the kill
        return self.ranks

    def is_short(self, rank: Rank) -> bool:
        """True when it ended in order, and without all that it was owed."""
        return rank.ended and len(rank.batches) < self.epochs * (rank.owed_batches or 0)

    def close(self) -> None:
        """Kill what is left, and remove what that leaves in shared memory."""
        for rank in self.ranks:
            if rank.pid:
                processes.kill(rank.pid)
        self.workers_left(5.0)
        self.look()
        for rank in self.ranks:
            if rank.shared_memory is not None:
                processes.remove_shared_memory(*rank.shared_memory)


def judge(reading: Reading, num_samples: int, order: Orders | None, cause: Sequence[set[str]]) -> Verdict:
    """Return the verdict on a reading that is finished; of several faults the worst.

    Args:
        num_samples: of the stage; each is owed once an epoch.
        order: what each rank has to get, where that is known.
        cause: of each set one word has to stand in the text of an error that names its cause.
    """
    ranks = reading.ranks
    if wrong := [number for rank in ranks for number in rank.wrong]:
        return Verdict(WRONG, f"{len(wrong)} samples with another content, e.g. number {wrong[0]}")
    seen = Counter(number for rank in ranks for batch in rank.batches for number in batch)
    if twice := [number for number, count in seen.items() if count > reading.epochs]:
        return Verdict(WRONG, f"{len(twice)} samples more than once, e.g. number {twice[0]}")
    for number, rank in enumerate(ranks):
        if order is not None and rank.batches != (order[number] * reading.epochs)[: len(rank.batches)]:
            at = next(i for i, batch in enumerate(rank.batches) if batch != (order[number] * reading.epochs)[i])
            return Verdict(WRONG, f"rank {number}: batch {at} is another than without a fault")
    arrived = f"{seen.total()} of {reading.epochs * num_samples} samples"
    if short := [number for number, rank in enumerate(ranks) if reading.is_short(rank)]:
        return Verdict(SHORT, f"{arrived}; rank {short[0]} ended as if that were all")
    if hung := [n for n, rank in enumerate(ranks) if rank.status is None and not rank.ended_by_launcher]:
        state = ["reading", "at its end"][ranks[hung[0]].ended or ranks[hung[0]].error is not None]
        return Verdict(
            HANG, f"{arrived}; rank {hung[0]} {state}, alive after {time.monotonic() - reading.started:.0f} s"
        )
    errors = [rank.error for rank in ranks if rank.error is not None]
    for kind, text in errors:
        if all(any(word in text for word in words) for words in cause) and cause:
            return Verdict(NAMED, f"{arrived}; {kind}: {_short(text)}")
    if errors:
        return Verdict(UNNAMED, f"{arrived}; " + " | ".join(f"{kind}: {_short(text)}" for kind, text in errors))
    if died := [(n, rank.status) for n, rank in enumerate(ranks) if rank.status]:
        return Verdict(UNNAMED, f"{arrived}; rank {died[0][0]} died with status {died[0][1]}")
    if seen.total() != reading.epochs * num_samples:
        return Verdict(SHORT, arrived)
    return Verdict(RIGHT)


def _short(text: str) -> str:
    """Return what an error says, without the traceback that a worker's has within it."""
    return text.rstrip().rpartition("\n")[2] if "Traceback (most recent call last)" in text else text
