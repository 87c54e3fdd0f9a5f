"""A reading: ranks at work in processes of their own, what they have seen so far, and a verdict on it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import warm_processes
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

    process: subprocess.Popen[bytes] | None = None
    batches: list[list[int]] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
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
        event = line["event"]
        if event == "ready":
            self.owed_batches = line["batches"]
            self.shared_memory = line["shared_memory"] and tuple(line["shared_memory"])
        elif event == "batch":
            self.batches.append(line["numbers"])
            self.wrong += line["wrong"]
        elif event == "error":
            self.error = (line["type"], line["text"])
        self.ended |= event == "end"


class Reading:
    """The ranks that read a stage once.

    Args:
        kind: plain or ours.
        folder: a new one, for what they write down.
        remote, local: as a user gives them.
        pace_sec: pause after each batch.
        patience_sec: how long ours waits for a store that is away.
        timeout_sec: streaming's download_timeout for plain; None: its own.
    """

    DEFAULTS = dict(
        environment={}, ranks=2, workers=2, shuffle=False, pace_sec=0.03, patience_sec=None, timeout_sec=None
    )

    def __init__(self, kind: str, folder: Path, *, remote: str | None, local: str, **changes: Any):
        folder.mkdir(parents=True)
        task = {**self.DEFAULTS, **changes, "kind": kind, "remote": remote, "local": local, "folder": str(folder)}
        self.folder, self.started, num = folder, time.monotonic(), task["ranks"]
        of_all = {"WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        of_all |= {"MASTER_PORT": free_ports(1), "PYTHONPATH": ROOT, **task["environment"]}
        self.ranks = [Rank(self._start(rank, task, of_all)) for rank in range(num)]

    def _start(self, rank: int, task: dict[str, Any], of_all: dict[str, Any]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.store.reader", str(rank), json.dumps(task)]
        variables = {name: str(value) for name, value in {**of_all, "RANK": rank, "LOCAL_RANK": rank}.items()}
        with open(self.folder / f"{rank}.log", "w") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": ROOT}
            return warm_processes.Process(command, env={**os.environ, **variables}, **options)

    # --- while it goes on ---

    def look(self) -> None:
        """Read what is new."""
        for number, rank in enumerate(self.ranks):
            rank.status = rank.process.poll() if rank.process else None  # before the lines: it writes no more
            rank.take(self.folder, number)

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
        return sum(len(rank.batches) for rank in self.ranks) / sum(owed)

    def wait_for(self, progress: float, limit_sec: float = 60.0) -> bool:
        """Return when so much has arrived; False: it ended before, or the time is up."""
        deadline = time.monotonic() + limit_sec
        while self.progress < progress and not self.is_over and time.monotonic() < deadline:
            time.sleep(POLL_SEC)
            self.look()
        return self.progress >= progress

    def kill_trainers(self) -> None:
        """Kill the ranks as a batch system or a lack of memory does, and not their workers."""
        for rank in self.ranks:
            rank.process.kill()

    def workers_left(self, limit_sec: float) -> int:
        """Wait for the workers of the ranks to end, and return how many live on."""
        deadline = time.monotonic() + limit_sec
        while left := sum(len(processes.members(rank.process.pid)) for rank in self.ranks):
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
        while not self.is_over and time.monotonic() < deadline:
            time.sleep(POLL_SEC)
            self.look()
            if launcher and failed_at is None and any(rank.status or self.is_short(rank) for rank in self.ranks):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + LAUNCHER_SEC:
                break
        alive = [rank for rank in self.ranks if rank.status is None]
        ended = failed_at is not None and time.monotonic() > failed_at + LAUNCHER_SEC
        self.close()
        for rank in alive:
            rank.status, rank.ended_by_launcher = None, ended  # as without the kill
        return self.ranks

    def is_short(self, rank: Rank) -> bool:
        """True when it ended in order, and without all that it was owed."""
        return rank.ended and len(rank.batches) < (rank.owed_batches or 0)

    def close(self) -> None:
        """Kill what is left, and remove what that leaves in shared memory."""
        for rank in self.ranks:
            processes.kill(rank.process.pid)
        self.workers_left(5.0)
        self.look()
        for rank in self.ranks:
            if rank.shared_memory is not None:
                processes.remove_shared_memory(*rank.shared_memory)


def judge(reading: Reading, num_samples: int, order: Orders | None, cause: Sequence[set[str]]) -> Verdict:
    """Return the verdict on a reading that is finished; of several faults the worst.

    Args:
        num_samples: of the stage; each is owed once.
        order: what each rank has to get, where that is known.
        cause: of each set one word has to stand in the text of an error that names its cause.
    """
    ranks = reading.ranks
    if wrong := [number for rank in ranks for number in rank.wrong]:
        return Verdict(WRONG, f"{len(wrong)} samples with another content, e.g. number {wrong[0]}")
    seen = Counter(number for rank in ranks for batch in rank.batches for number in batch)
    if twice := [number for number, count in seen.items() if count > 1]:
        return Verdict(WRONG, f"{len(twice)} samples more than once, e.g. number {twice[0]}")
    for number, rank in enumerate(ranks) if order is not None else ():
        for at, (batch, owed) in enumerate(zip(rank.batches, order[number], strict=False)):
            if batch != owed:
                return Verdict(WRONG, f"rank {number}: batch {at} is another than without a fault")
    arrived = f"{seen.total()} of {num_samples} samples"
    if short := [number for number, rank in enumerate(ranks) if reading.is_short(rank)]:
        return Verdict(SHORT, f"{arrived}; rank {short[0]} ended as if that were all")
    if hung := [n for n, rank in enumerate(ranks) if rank.status is None and not rank.ended_by_launcher]:
        state = ["reading", "at its end"][ranks[hung[0]].ended or ranks[hung[0]].error is not None]
        seconds = time.monotonic() - reading.started
        return Verdict(HANG, f"{arrived}; rank {hung[0]} {state}, alive after {seconds:.0f} s")
    errors = [rank.error for rank in ranks if rank.error is not None]
    for kind, text in errors:
        if all(any(word in text for word in words) for words in cause) and cause:
            return Verdict(NAMED, f"{arrived}; {kind}: {_short(text)}")
    if errors:
        return Verdict(UNNAMED, f"{arrived}; " + " | ".join(f"{kind}: {_short(text)}" for kind, text in errors))
    if died := [(n, rank.status) for n, rank in enumerate(ranks) if rank.status]:
        return Verdict(UNNAMED, f"{arrived}; rank {died[0][0]} died with status {died[0][1]}")
    if seen.total() != num_samples:
        return Verdict(SHORT, arrived)
    return Verdict(RIGHT)


def _short(text: str) -> str:
    """Return what an error says, without the traceback that a worker's has within it."""
    return text.rstrip().rpartition("\n")[2] if "Traceback (most recent call last)" in text else text
