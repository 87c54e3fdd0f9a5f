"""Where each rank is, seen by threads that need no rank's main thread: a rank that is lost or stalled ends the run on all.

    beat       each rank writes into the ranks' store every BEAT_SEC where its main thread is
    lost       a rank whose beats stop: its process is stopped, dead or cut off. The limit is LOST_SEC, or stall_sec if less
    stalled    beats come, but no main thread gets on for stall_sec; the one that has come least far is behind

Rank 0 reads the beats and tells all (cli/ranks.py). Rank 0 itself is lost where its store does not answer; then each of the
others ends by itself. A process that was stopped with all others, as by `scontrol suspend`, begins to count anew. A run of
one rank watches itself for a stall in the same way.
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

from composer.utils import dist

from cli import meeting, ranks

BEAT_SEC = 2.0
LOST_SEC = 120.0  # no library keeps Python's lock for so long
GUARD_SEC = 1.0
SLEPT_SEC = 15.0  # a watch that was away for longer had been stopped itself


@dataclass(frozen=True)
class Beat:
    """Where a rank's main thread is."""

    marks: int
    """Events of the training that it has come through in this start: the same number means the same place on all ranks."""
    batch: int
    """Batches of the run that are done."""
    phase: str
    """One of start, train, waiting for data, evaluation, checkpoint, between batches, end; see training/health.py."""
    doing: str
    """The last event, in words."""
    sec: float
    """Since then."""
    may_stay: bool
    """It may be long there: building, a first batch with its compiling, evaluation, a checkpoint."""
    number: int = 0
    has_ended: bool = False

    def said(self) -> str:
        """Return it as a message has it."""
        return f"batch {self.batch}, {self.phase} ({self.doing}) for {self.sec:.0f} s"


class Progress:
    """What a rank's main thread leaves for its watch: it only sets values, and waits for nothing."""

    def __init__(self) -> None:
        self.marks, self.batch, self.doing, self.phase = 0, 0, "building", lambda: "start"
        self.is_warm = False  # a batch of this start is done, and its last one is not
        self.is_over = False  # the training has ended, and ranks leave
        self.since = time.monotonic()

    def mark(self, doing: str, batch: int) -> None:
        """Note that the main thread has come to an event of the training."""
        self.marks, self.doing, self.batch, self.since = self.marks + 1, doing, batch, time.monotonic()

    def tick(self) -> None:
        """Note that the main thread waits for something that it knows of, and is well."""
        self.since = time.monotonic()

    def beat(self, number: int, *, has_ended: bool = False) -> Beat:
        """Return where it is now."""
        phase = self.phase()
        may_stay = not self.is_warm or phase in ("start", "evaluation", "checkpoint", "end")
        sec = round(time.monotonic() - self.since, 1)
        return Beat(self.marks, self.batch, phase, self.doing, sec, may_stay, number, has_ended)


def stall(beats: Mapping[int, Beat], limit_sec: float) -> str | None:
    """Return what is to be said of ranks that do not get on, or None: they do, or one of them may be long where it is."""
    live = {rank: beat for rank, beat in beats.items() if not beat.has_ended}
    if not live or any(beat.may_stay for beat in live.values()):
        return None
    waited = max(beat.sec for beat in live.values())
    if waited <= limit_sec:
        return None
    last = min(live, key=lambda rank: (live[rank].marks, -live[rank].sec, rank))  # the one that has come least far
    others = {rank: beat for rank, beat in live.items() if rank != last}
    if not others:
        return f"no progress for {waited:.0f} s: rank 0 is at {live[last].said()}"
    ahead = others[max(others, key=lambda rank: others[rank].marks)]
    who = meeting.named([last])
    if ahead.marks == live[last].marks:
        return f"no progress for {waited:.0f} s: all ranks are at {ahead.said()}, {who} first"
    return f"no progress for {waited:.0f} s: {who} is behind, at {live[last].said()}; others: {ahead.said()}"


class Watch:
    """Watches the ranks from threads, until `ranks.be_quiet`.

    Args:
        stall_sec: see the head of this file; None: nothing is watched.
    """

    def __init__(self, stall_sec: float | None):
        self.stall_sec = stall_sec
        self.lost_sec = None if stall_sec is None else min(stall_sec, LOST_SEC)
        self.progress = Progress()
        self._rank = dist.get_global_rank()
        self._beats = {rank: self.progress.beat(0) for rank in range(dist.get_world_size())}
        self._changed = dict.fromkeys(self._beats, time.monotonic())  # rank -> when its beat last changed
        self._known: set[int] = set()  # ranks that have a beat in the store
        self._answered = time.monotonic()  # the store

    def begin(self) -> None:
        """Begin to watch; the ranks have met."""
        if self.lost_sec is None:
            return
        self._store = ranks.own_store()
        if self._store is None:
            ranks.begin_watching(self._watch_alone)
        else:
            ranks.begin_watching(self._exchange, *([self._guard] if self._rank else []))

    def _exchange(self, quiet: threading.Event) -> None:
        """Tell the others where this rank is; rank 0 reads what they tell."""
        assert self._store is not None
        number, looked = 0, time.monotonic()
        with contextlib.suppress(Exception):  # rank 0 has ended, and the store with it: `_guard` sees that
            while not quiet.wait(BEAT_SEC):
                number += 1
                self._store.set(f"beat/{self._rank}", json.dumps(asdict(self.progress.beat(number))))
                self._store.check(["beat/0"])  # comes back when the store has answered
                self._answered = time.monotonic()
                if self._rank == 0:
                    if self._answered - looked > SLEPT_SEC:
                        self._changed = dict.fromkeys(self._changed, self._answered)
                    looked = self._answered
                    self._read(looked)
                    if text := self._verdict(looked):
                        ranks.end_all_ranks(self._store, text)
                        return
            self._store.set(f"beat/{self._rank}", json.dumps(asdict(self.progress.beat(number + 1, has_ended=True))))

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
        """Return why the run cannot go on, or None."""
        if self.stall_sec is None or self.lost_sec is None:
            return None
        beats = self._beats
        away = [rank for rank, at in self._changed.items() if now - at > self.lost_sec and not beats[rank].has_ended]
        if away:
            text = f"nothing heard of {meeting.named(away)} for {now - self._changed[away[0]]:.0f} s"
            return _ending(f"{text}; last: {beats[away[0]].said()}. It is stopped, dead or cut off")
        text = stall(beats, self.stall_sec)
        return None if text is None else _ending(text)

    def _guard(self, quiet: threading.Event) -> None:
        """End this rank where rank 0's store does not answer; this thread asks nobody."""
        assert self.lost_sec is not None
        looked = time.monotonic()
        while not quiet.wait(GUARD_SEC):
            now = time.monotonic()
            if now - looked > SLEPT_SEC or self.progress.is_over:
                self._answered = now
            looked = now
            if now - self._answered > self.lost_sec + 2 * BEAT_SEC:  # rank 0's own word comes first
                text = f"rank 0 ({meeting.hosts()[0]}) does not answer for {now - self._answered:.0f} s"
                here = f"rank {self._rank} ({meeting.hosts()[self._rank]}) is at {self.progress.beat(0).said()}"
                ranks.leave(_ending(f"{text}; {here}. Rank 0 is stopped, dead or cut off"), 1)

    def _watch_alone(self, quiet: threading.Event) -> None:
        """The same for a run of one rank."""
        assert self.stall_sec is not None
        looked = time.monotonic()
        while not quiet.wait(BEAT_SEC):
            now = time.monotonic()
            if now - looked > SLEPT_SEC:
                self.progress.tick()
            looked = now
            if text := stall({0: self.progress.beat(0)}, self.stall_sec):
                ranks.leave(_ending(text), 1)


def _ending(text: str) -> str:
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
