"""The wait for a batch: told while it lasts, ended by a signal, and by the clock only when nothing arrives any more.

torch's DataLoader knows one limit, from the asking for a batch to its coming. The first batch of a stage may have to wait
for nearly every shard that is shuffled together: that is hours from a slow store, and nothing is wrong.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from fetch import SAY_SEC, StreamFailure

SLICE_SEC = 5.0
END = object()
"""What `next_batch` returns after the last batch."""

if not hasattr(iter(DataLoader([0])), "_timeout"):
    raise ImportError("torch's DataLoader has another inside than that of 2.7 to 2.11, on which this reader is built.")


def next_batch(
    iterator: Iterator[Any], arrived: Callable[[], Any], limit_sec: float, while_waiting: Callable[[], None]
) -> Any:
    """Return what a loader's workers give next, or END.

    Args:
        iterator: of a torch DataLoader.
        arrived: its value changes when more of the stage has come.
        limit_sec: longest wait in which nothing has come.
        while_waiting: called every few seconds; what it raises ends the wait.

    Raises:
        StreamFailure: nothing has come for too long.
    """
    usual, began, said_at = iterator._timeout, time.monotonic(), 0.0
    seen, since = None, began
    iterator._timeout = min(SLICE_SEC, usual)  # 0: there are no workers
    try:
        while True:
            try:
                return next(iterator, END)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
            while_waiting()
            now = time.monotonic()
            if (here := arrived()) != seen:
                seen, since = here, now if seen is not None else began
            if now - since > limit_sec:
                text = f"no batch for {now - began:.0f} s, and nothing of the stage has arrived for {now - since:.0f} s"
                raise StreamFailure(f"data: {text}: the loader's workers hang. Start the run again: it goes on.")
            if now - began - said_at >= SAY_SEC:
                said_at = now - began
                print(f"data: {said_at:.0f} s: waiting for a batch ({here[1]:,} bytes are here)", file=sys.stderr)
    finally:
        iterator._timeout = usual


def files_and_bytes(folder: str | Path) -> tuple[int, int]:
    """Return how many files lie under a folder, unfinished ones included, and their bytes."""
    files = num_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += Path(place, name).stat().st_size
                files += 1
            except OSError:
                continue  # renamed or removed in the meantime
    return files, num_bytes
