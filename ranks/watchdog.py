"""Where each rank is, seen by threads that need no rank's main thread: a rank that is lost or stalled ends the run on all.

    beat       each rank writes into the ranks' store every BEAT_SEC where its main thread is
    lost       a rank whose beats stop: its process is stopped, dead or cut off. The limit is LOST_SEC, or stall_sec if less
    stalled    beats come, but no main thread makes progress for stall_sec; the one furthest behind is named

Rank 0 reads the beats and tells all (ranks/collectives.py). Rank 0 itself is lost where its store does not answer; then each
of the others ends by itself. A process that was stopped with all others, as by `scontrol suspend`, restarts its timer. A
run of one rank watches itself for a stall in the same way.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from common import dist
from ranks import collectives, rendezvous

BEAT_SEC = 2.0
LOST_SEC = 120.0  # no library keeps Python's lock for so long
GUARD_SEC = 1.0
SUSPENDED_SEC = 15.0  # a watch that was away for longer had been stopped itself


@dataclass(frozen=True)
class Beat:
    """Where a rank's main thread is."""

    marks: int
    """Events of the training that it has come through in this start: the same number means the same place on all ranks."""
    batch: int
    """Batches of the run that are done."""
    phase: str
    """One of start, train, waiting for data, evaluation, checkpoint, between batches, end; see training/health.py."""
    event: str
    """The last event, in words."""
    sec: float
    """Since then."""
    may_take_long: bool
    """It may be long there: building, a first batch with its compiling, evaluation, a checkpoint."""
    number: int = 0
    has_finished: bool = False

    def format(self) -> str:
        """Return it as a message has it."""
        return f"batch {self.batch}, {self.phase} ({self.event}) for {self.sec:.0f} s"


class RankProgress:
    """What a rank's main thread leaves for its watch: it only sets values, and waits for nothing."""

    def __init__(self) -> None:
        self.marks, self.batch, self.event, self.phase = 0, 0, "building", lambda: "start"
        self.is_warm = False  # a batch of this start is done, and its last one is not
        self.is_over = False  # the training has ended, and ranks leave
        self.since = time.monotonic()

    def mark(self, event: str, batch: int) -> None:
        """Note that the main thread has come to an event of the training."""
        self.marks, self.event, self.batch, self.since = self.marks + 1, event, batch, time.monotonic()

    def mark_alive(self) -> None:
        """Note that the main thread waits for something that it knows of, and is well."""
        self.since = time.monotonic()

    def beat(self, number: int, *, has_finished: bool = False) -> Beat:
        """Return the position of the main thread now."""
        phase = self.phase()
        may_take_long = not self.is_warm or phase in ("start", "evaluation", "checkpoint", "end")
        sec = round(time.monotonic() - self.since, 1)
        return Beat(self.marks, self.batch, phase, self.event, sec, may_take_long, number, has_finished)


def describe_stall(beats: Mapping[int, Beat], limit_sec: float) -> str | None:
    """Describe a stall of the ranks; None: they progress, or one of them may take long at its present event."""
    live = {rank: beat for rank, beat in beats.items() if not beat.has_finished}
    if not live or any(beat.may_take_long for beat in live.values()):
        return None
    waited = max(beat.sec for beat in live.values())
    if waited <= limit_sec:
        return None
    last = min(live, key=lambda rank: (live[rank].marks, -live[rank].sec, rank))  # the one that has come least far
    others = {rank: beat for rank, beat in live.items() if rank != last}
    if not others:
        return f"no progress for {waited:.0f} s: rank 0 is at {live[last].format()}"
    ahead = others[max(others, key=lambda rank: others[rank].marks)]
    who = rendezvous.format_ranks([last])
    if ahead.marks == live[last].marks:
        return f"no progress for {waited:.0f} s: all ranks are at {ahead.format()}, {who} first"
    return f"no progress for {waited:.0f} s: {who} is behind, at {live[last].format()}; others: {ahead.format()}"


class Watchdog:
    """Watches the ranks from threads, until `collectives.stop_watchdogs`.

    Args:
        stall_sec: see the head of this file; None: nothing is watched.
    """

    def __init__(self, stall_sec: float | None):
        self.stall_sec = stall_sec
        self.lost_sec = None if stall_sec is None else min(stall_sec, LOST_SEC)
        self.progress = RankProgress()
        self._rank = dist.get_global_rank()
        self._beats = {rank: self.progress.beat(0) for rank in range(dist.get_world_size())}
        self._changed = dict.fromkeys(self._beats, time.monotonic())  # rank -> when its beat last changed
        self._known: set[int] = set()  # ranks that have a beat in the store
        self._answered = time.monotonic()  # the store

    def begin(self) -> None:
        """Begin to watch; the ranks are connected."""
        if self.lost_sec is None:
            return
        self._store = collectives.clone_store()
        if self._store is None:
            collectives.start_watchdogs(self._watch_alone)
        else:
            collectives.start_watchdogs(self._exchange, *([self._guard] if self._rank else []))

    def _exchange(self, stop: threading.Event) -> None:
        """Tell the others where this rank is; rank 0 reads what they tell."""
        assert self._store is not None
        number, looked = 0, time.monotonic()
        with contextlib.suppress(Exception):  # rank 0 has ended, and the store with it: `_guard` sees that
            while not stop.wait(BEAT_SEC):
                number += 1
                self._store.set(f"beat/{self._rank}", json.dumps(asdict(self.progress.beat(number))))
                self._store.check(["beat/0"])  # comes back when the store has answered
                self._answered = time.monotonic()
                if self._rank == 0:
                    if self._answered - looked > SUSPENDED_SEC:
                        self._changed = dict.fromkeys(self._changed, self._answered)
                    looked = self._answered
                    self._read(looked)
                    if text := self._verdict(looked):
                        collectives.end_all_ranks(self._store, text)
                        return
            self._store.set(f"beat/{self._rank}", json.dumps(asdict(self.progress.beat(number + 1, has_finished=True))))

    def _read(self, now: float) -> None:
        assert self._store is not None
        self._known |= {rank for rank in self._beats if rank not in self._known and self._store.check([f"beat/{rank}"])}
        known = sorted(self._known)
        for rank, text in zip(known, self._store.multi_get([f"beat/{rank}" for rank in known]), strict=True):
            beat = Beat(**json.loads(text))
            if beat.number != self._beats[rank].number:
                self._changed[rank] = now
            self._beats[rank] = beat

    def _verdict(self, now: float) -> str | None:
        """Return why the run cannot continue, or None."""
        if self.stall_sec is None or self.lost_sec is None:
            return None
        beats = self._beats
        away = [rank for rank, at in self._changed.items() if now - at > self.lost_sec and not beats[rank].has_finished]
        if away:
            text = f"nothing heard of {rendezvous.format_ranks(away)} for {now - self._changed[away[0]]:.0f} s"
            return _end_message(f"{text}; last: {beats[away[0]].format()}. It is stopped, dead or cut off")
        text = describe_stall(beats, self.stall_sec)
        return None if text is None else _end_message(text)

    def _guard(self, stop: threading.Event) -> None:
        """End this rank where rank 0's store does not answer; this thread sends no request."""
        assert self.lost_sec is not None
        looked = time.monotonic()
        while not stop.wait(GUARD_SEC):
            now = time.monotonic()
            if now - looked > SUSPENDED_SEC or self.progress.is_over:
                self._answered = now
            looked = now
            if now - self._answered > self.lost_sec + 2 * BEAT_SEC:  # rank 0's own word comes first
                text = f"rank 0 ({rendezvous.rank_hosts()[0]}) does not answer for {now - self._answered:.0f} s"
                here = (
                    f"rank {self._rank} ({rendezvous.rank_hosts()[self._rank]}) is at {self.progress.beat(0).format()}"
                )
                collectives.exit_process(_end_message(f"{text}; {here}. Rank 0 is stopped, dead or cut off"), 1)

    def _watch_alone(self, stop: threading.Event) -> None:
        """The same for a run of one rank."""
        assert self.stall_sec is not None
        looked = time.monotonic()
        while not stop.wait(BEAT_SEC):
            now = time.monotonic()
            if now - looked > SUSPENDED_SEC:
                self.progress.mark_alive()
            looked = now
            if text := describe_stall({0: self.progress.beat(0)}, self.stall_sec):
                collectives.exit_process(_end_message(text), 1)


def _end_message(text: str) -> str:
    return f"health.stall_sec: {text}. The run ends on all ranks; the same command resumes it from its last checkpoint."


def dump_stacks(file: Path, limit_sec: float = 5.0) -> None:
    """Write where each thread of this process is; a disk that hangs is not waited for."""

    def dump() -> None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            with open(file, "w") as out:
                faulthandler.dump_traceback(out, all_threads=True)

    thread = threading.Thread(target=dump, daemon=True)
    thread.start()
    thread.join(limit_sec)
