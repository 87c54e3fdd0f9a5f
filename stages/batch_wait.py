"""The wait for a batch: told while it lasts, ended by a signal, and by the clock only when nothing arrives any more.

torch's DataLoader knows one limit, from the asking for a batch to its coming. The first batch of a stage may have to wait
for nearly every shard that is shuffled together: that is hours from a slow store, and nothing is wrong.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cli.log import EVERY_RANK, log
from cli.private_api import require_private_api
from stages.fetch import SAY_SEC, StreamFailure

SLICE_SEC = 1.0  # of a wait: so late a signal is heard, by the ranks that have their batch too
LOOK_SEC = 5.0  # between two looks at what has arrived: a walk over the cache, which may have 400,000 files
LOOK_PART = 10  # of a wait the looks take one in so many seconds
END = object()
"""What `next_batch` returns after the last batch."""
NOT_YET = object()

require_private_api(
    "torch.utils.data.dataloader", "_BaseDataLoaderIter._timeout", why="a wait for workers is interrupted each second"
)


def next_batch(
    iterator: Iterator[Any], arrived: Callable[[], Any], limit_sec: float, while_waiting: Callable[[], None]
) -> Any:
    """Return what a loader gives next, or END.

    Args:
        iterator: of a torch DataLoader.
        arrived: its value changes when more of the stage has come.
        limit_sec: longest wait for workers in which nothing has come; without workers the stream has its own limit.
        while_waiting: called about once a second; what it raises ends the wait.

    Raises:
        StreamFailure: nothing has come for too long.
    """
    usual, began, said_at, look_at = iterator._timeout, time.monotonic(), 0.0, -math.inf
    seen, since = None, began
    poll = _of_workers(iterator) if usual else _of_a_thread(iterator)
    limit_sec = limit_sec if usual else math.inf
    iterator._timeout = min(SLICE_SEC, usual)
    try:
        while (batch := poll()) is NOT_YET:
            while_waiting()
            now = time.monotonic()
            if now >= look_at or now - since > limit_sec:
                if (here := arrived()) != seen:
                    seen, since = here, now if seen is not None else began
                look_at = now + max(LOOK_SEC, LOOK_PART * (time.monotonic() - now))
            if now - since > limit_sec:
                text = f"no batch for {now - began:.0f} s, and nothing of the stage has arrived for {now - since:.0f} s"
                raise StreamFailure(f"data: {text}: the loader's workers hang. Start the run again: it resumes.")
            if now - began - said_at >= SAY_SEC:
                said_at = now - began
                log.info(f"data: {said_at:.0f} s: waiting for a batch ({here[1]:,} bytes are here)", extra=EVERY_RANK)
        return batch
    finally:
        iterator._timeout = usual


def _of_workers(iterator: Iterator[Any]) -> Callable[[], Any]:
    """Return what gives the next batch, or NOT_YET after the iterator's own timeout."""

    def poll() -> Any:
        try:
            return next(iterator, END)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            return NOT_YET
        except ValueError as error:  # of a worker: torch puts its whole trace into the text
            text = str(error).rstrip().rpartition("\nValueError: ")[2]
            if not text.startswith("data"):
                raise
            raise StreamFailure(text) from error

    return poll


def _of_a_thread(iterator: Iterator[Any]) -> Callable[[], Any]:
    """The same where there are no workers: the main thread would not hear a signal while it reads."""
    given: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def read() -> None:
        try:
            given.put((next(iterator, END), None))
        except BaseException as error:  # the caller's
            given.put((None, error))

    def poll() -> Any:
        try:
            batch, error = given.get(timeout=SLICE_SEC)
        except queue.Empty:
            return NOT_YET
        if error is not None:
            raise error
        return batch

    threading.Thread(target=read, daemon=True).start()
    return poll


def files_and_bytes(folders: Sequence[str]) -> tuple[int, int]:
    """Return how many files lie under some folders, unfinished ones included, and their bytes."""
    files = num_bytes = 0
    for place, _, names in (entry for folder in folders for entry in os.walk(folder)):
        for name in names:
            try:
                num_bytes += Path(place, name).stat().st_size
                files += 1
            except OSError:
                continue  # renamed or removed in the meantime
    return files, num_bytes
