"""Rows whose value another row has had before them, in tables of any length, with little memory.

A value is known by 128 bits of its digest. Each part's digests are written in sorted runs. All runs are then read side by
side, one range of digests after the other, each as large as fits into memory.

Two different values share a digest with a probability below 10**-20 among 10**9 values.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

DIGEST = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<u4")])
"""A row's digest in two halves, and its number in its part."""
MOST_ROWS = 2**32  # of a part


def digests(values: Sequence[str | bytes | int | float], rows: np.ndarray) -> np.ndarray:
    """Return DIGEST of values, none of which is missing. `rows`: number of each in its part."""
    made = np.empty(len(rows), DIGEST)
    joined = b"".join(map(xxhash.xxh3_128_digest, map(_as_bytes, values)))
    halves = np.frombuffer(joined, ">u8").reshape(-1, 2)
    made["high"], made["low"], made["row"] = halves[:, 0], halves[:, 1], rows
    return made


def _as_bytes(value: str | bytes | int | float) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def write_runs(chunks: Iterable[np.ndarray], most: int, put: Callable[[int, np.ndarray], None]) -> tuple[int, int]:
    """Sort digests in runs of at most so many, and pass each on; return how many runs and digests there were."""
    held: list[np.ndarray] = []
    num_held = num_runs = total = 0

    def flush() -> None:
        nonlocal held, num_held, num_runs
        run = np.concatenate(held)
        put(num_runs, run[np.lexsort((run["row"], run["low"], run["high"]))])
        held, num_held, num_runs = [], 0, num_runs + 1

    for chunk in chunks:
        total += len(chunk)
        while len(chunk):
            part = chunk[: most - num_held]
            held.append(part)
            num_held, chunk = num_held + len(part), chunk[len(part) :]
            if num_held == most:
                flush()
    if held:
        flush()
    return num_runs, total


def later_rows(runs: Sequence[tuple[int, Path]], most: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (part, numbers of its rows that have a value of an earlier row), of each range of digests anew.

    Args:
        runs: part and file of each; parts count in their order.
        most: digests in memory, about.
    """
    files = [(part, np.load(path, mmap_mode="r")) for part, path in runs]
    num_ranges = max(1, -(-2 * sum(len(run) for _, run in files) // most))  # twice: ranges are not all alike
    ends = [number * 2**64 // num_ranges for number in range(1, num_ranges)]
    starts = [0] * len(files)
    for end in [*ends, None]:
        taken = []
        for number, (part, run) in enumerate(files):
            stop = len(run) if end is None else bisect.bisect_left(_Highs(run), end, lo=starts[number])
            if stop > starts[number]:
                taken.append((part, np.array(run[starts[number] : stop])))
            starts[number] = stop
        yield from _later_of(taken)


class _Highs:
    """The first halves of a run, read one by one."""

    def __init__(self, run: np.ndarray):
        self._run = run

    def __len__(self) -> int:
        return len(self._run)

    def __getitem__(self, number: int) -> int:
        return int(self._run[number]["high"])


def _later_of(taken: Sequence[tuple[int, np.ndarray]]) -> Iterator[tuple[int, np.ndarray]]:
    if not taken:
        return
    parts = np.concatenate([np.full(len(run), part, np.uint32) for part, run in taken])
    both = np.concatenate([run for _, run in taken])
    order = np.lexsort((both["row"], parts, both["low"], both["high"]))
    both, parts = both[order], parts[order]
    high, low, rows = both["high"], both["low"], both["row"]
    is_later = np.zeros(len(rows), bool)
    is_later[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    for part in np.unique(parts[is_later]):
        yield int(part), rows[is_later & (parts == part)]


def duplicates_of(runs: Sequence[tuple[int, Path]], most: int, folder: Path, put: Callable[[int, Any], None]) -> None:
    """Find every part's later rows, and pass them on sorted, part by part.

    Args:
        folder: for the rows of each range, until all are known.
        put: called with each part that has some, and its rows.
    """
    paths = {part: folder / f"later-{part:05d}" for part in sorted({part for part, _ in runs})}
    for part, rows in later_rows(runs, most):
        with open(paths[part], "ab") as file:
            rows.astype("<u4").tofile(file)
    for part, path in paths.items():
        if path.is_file():
            put(part, np.sort(np.fromfile(path, "<u4")))
