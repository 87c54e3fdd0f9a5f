"""The order of a node's samples in an epoch: streaming's algorithm `py1e`, bit for bit, in a seventh of its memory.

`py1e` puts the samples of each shard in a row, shifts each by a random number of places, at most 0.625 blocks, and sorts them
by where they then are (streaming/base/shuffle/py1e.py). Here the same random numbers are drawn in the same order. But as no
sample goes far, they are sorted window by window, and in place.

Two samples whose shifted places are equal to the last bit are left in the order of their row. There is about one such pair in
100 million samples; how streaming orders it depends on the processor that numpy sorts with.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stages.sampling import Array, sampled

WINDOW = 1 << 19  # samples that are sorted at once, beside those that wait for the next window
# Memory in all, in orders (reports/results/order.json): what is made, what is shared, what the workers have; and of buckets.
PLAIN, DEALT = 3, 7
WINDOW_BYTES = 64  # of each sample that is in the window of a sort


@dataclass(frozen=True)
class Epoch:
    """What the order of an epoch depends on, and whose part of it is wanted."""

    sizes: Array
    """(shards,) int64: their samples."""
    canonical_nodes: int
    """One divides the other: this, and the number of nodes. No more than there are samples."""
    node: int
    nodes: int
    seed: int
    epoch: int
    block_size: int
    """Samples; None of `py1e`'s shifts is larger than 0.625 of it."""
    streams: Sequence[tuple[int, int]] = ()
    """Of each its number of shards, and of the samples that an epoch has of it; (): each sample once."""
    granularity: int = 1
    """Samples of a shard that are picked at a time, where an epoch has a part of a stream."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the order's numbers."""
        return dtype_of(int(self.sizes.sum()))

    @property
    def rows(self) -> range:
        """The canonical nodes whose samples this node reads."""
        if self.canonical_nodes >= self.nodes:
            return range(self.node, self.canonical_nodes, self.nodes)
        return range(self.node % self.canonical_nodes, self.node % self.canonical_nodes + 1)


def dtype_of(num_samples: int) -> np.dtype[Any]:
    """Return the type of an order's numbers; -1 stands for none."""
    return np.dtype(np.int32 if num_samples < 2**31 else np.int64)


def memory_gib(
    num_samples: int, parts: int = 1, *, has_weights: bool = False, has_buckets: bool = False
) -> tuple[float, float]:
    """Return what an order takes on a node at most, GiB: of /dev/shm while an epoch begins; of its memory, /dev/shm included.

    Args:
        num_samples: of an epoch.
        parts: of the epoch, each read by a node, or by several.
        has_weights: a sample comes several times, or not at all: which, is kept of the whole epoch.
        has_buckets: pictures are of several sizes.
    """
    whole = num_samples * dtype_of(num_samples).itemsize / 2**30
    beside = WINDOW_BYTES * min(num_samples, 2 * WINDOW) / 2**30 + whole * has_weights
    return whole / parts, whole / parts * (DEALT if has_buckets else PLAIN) + beside


def order_of(epoch: Epoch, *, shuffle: bool = True) -> Array:
    """Return the samples that a node reads in an epoch, in their order, numbered through all shards; (M,), `epoch.dtype`."""
    if not epoch.streams:
        return _order_of_units(replace(epoch, sizes=epoch.sizes[epoch.sizes > 0]), shuffle=shuffle)
    of_run = {"granularity": epoch.granularity, "seed": epoch.seed, "epoch": epoch.epoch}
    units, ids = sampled(epoch.sizes, epoch.streams, new_picks=shuffle, **of_run)
    order = _order_of_units(replace(epoch, sizes=units), shuffle=shuffle)
    named = order if order.dtype == epoch.dtype else np.empty(len(order), epoch.dtype)
    for at in range(0, len(order), WINDOW):  # numpy would make each number of a whole order 8 bytes
        named[at : at + WINDOW] = ids[order[at : at + WINDOW]]
    return named


def _order_of_units(epoch: Epoch, *, shuffle: bool) -> Array:
    """Return the same of what is in a row: shards, or their repeats and parts.

    As streaming's `orig` partition deals them out: M is the same for all nodes, and some samples are there twice for that.
    """
    total, (canonical, nodes) = int(epoch.sizes.sum()), (epoch.canonical_nodes, epoch.nodes)
    ends = [total * row // canonical for row in range(canonical + 1)]
    if shuffle:
        rows = shuffled(epoch, ends)
    else:
        rows = [np.arange(ends[row], ends[row + 1], dtype=dtype_of(total)) for row in epoch.rows]
    longest = -(-total // canonical)
    rows = [row if len(row) == longest else np.append(row, row[-1:]) for row in rows]
    if canonical >= nodes:
        return rows[0] if len(rows) == 1 else np.stack(rows, axis=1).reshape(-1)
    ratio, row = nodes // canonical, rows[0]
    if missing := -len(row) % ratio:  # those before the last ones come twice
        padded = np.append(row, row[-missing:])
        padded[-missing:] = padded[-2 * missing - ratio + 1 : -missing - ratio + 1]
        row = padded
    return np.ascontiguousarray(row[epoch.node // canonical :: ratio])


def shuffled(epoch: Epoch, ends: Sequence[int]) -> list[Array]:
    """Return the shuffled samples of each of this node's canonical nodes.

    Args:
        ends: where each canonical node begins in the row of all shards, and the number of all samples; (nodes + 1,).
    """
    begins, sizes, firsts = _spans(epoch, ends)
    rng, rows = np.random.default_rng(epoch.seed + epoch.epoch), []
    spans = np.arange(len(sizes))
    for first, last in itertools.pairwise(firsts):
        rng.shuffle(spans[first:last])
    begins, sizes = begins[spans], sizes[spans].tolist()
    for node, (first, last) in enumerate(itertools.pairwise(firsts)):
        row, at = np.empty(ends[node + 1] - ends[node], dtype_of(ends[-1])), 0
        for begin, size in zip(begins[first:last].tolist(), sizes[first:last], strict=True):
            samples = row[at : at + size]
            samples[:] = np.arange(begin, begin + size)
            rng.shuffle(samples)
            at += size
        _spread(row, sizes[first:last], rng, epoch.block_size, is_wanted=node in epoch.rows)
        if node in epoch.rows:
            rows.append(row)
    return rows


def _spans(epoch: Epoch, ends: Sequence[int]) -> tuple[Array, Array, list[int]]:
    """Put the shards in the run's order, and cut them where a canonical node ends.

    Returns:
        of each part its first sample, (spans,), and its size, (spans,); the number of each canonical node's first part, and
        the number of all parts, (canonical nodes + 1,).
    """
    run_order = np.arange(len(epoch.sizes))
    np.random.default_rng(epoch.seed).shuffle(run_order)
    begins = (np.cumsum(epoch.sizes) - epoch.sizes)[run_order]
    starts = np.cumsum(epoch.sizes[run_order]) - epoch.sizes[run_order]  # in the row of all shards
    cuts = np.union1d(starts, ends[:-1])
    shard = np.searchsorted(starts, cuts, side="right") - 1
    firsts = np.searchsorted(cuts, ends[:-1]).tolist()
    return begins[shard] + cuts - starts[shard], np.diff(cuts, append=ends[-1]), [*firsts, len(cuts)]


def _spread(row: Array, sizes: Sequence[int], rng: np.random.Generator, block_size: int, *, is_wanted: bool) -> None:
    """Shift the samples of a canonical node, and sort them in place by where they are then.

    Args:
        row: (N,), the samples of one span behind those of the other.
        sizes: of the spans.
        is_wanted: False: only draw the random numbers.
    """
    total, least, most = len(row), int(0.75 * block_size), int(1.25 * block_size)
    shifted: list[Array] = []
    waiting, samples = np.empty(0), row[:0].copy()  # shifted too far for an earlier window: places in order, and whose
    at = begun = done = 0  # of the row: drawn, taken into a window, sorted
    for size in sizes:
        reach = max(0.0, (int(rng.integers(least, most)) - size) / 2)
        shifts = rng.uniform(low=max(-reach, -at), high=min(reach, total - at - size), size=size)
        if is_wanted:
            shifted.append(np.arange(at, at + size) + shifts)
        at += size
        if is_wanted and (at - begun >= WINDOW or at == total):
            places, samples = np.concatenate([waiting, *shifted]), np.concatenate([samples, row[begun:at]])
            order = _argsorted(places)
            places = places[order]
            # Whatever comes later is shifted by less than 0.625 blocks.
            ready = total - done if at == total else int(np.searchsorted(places, at - most / 2))
            row[done : done + ready] = samples[order[:ready]]
            waiting, samples, shifted = places[ready:], samples[order[ready:]], []
            begun, done = at, done + ready
    if sizes and max(sizes) > least:
        text = f"data: shards of {max(sizes):,} samples are shuffled within themselves, as a block has {block_size:,}"
        warnings.warn(text, stacklevel=2)


def _argsorted(places: Array) -> Array:
    order = np.argsort(places)
    in_order = places[order]
    if (in_order[1:] == in_order[:-1]).any():
        return np.argsort(places, kind="stable")
    return order


def part_of_worker(order: Array, *, rank: int, ranks: int, worker: int, workers: int, batch_size: int) -> Array:
    """Return what one worker of one of a node's ranks reads, padded with -1 to whole batches; streaming's `orig` partition.

    Args:
        order: (M,), of the node; M is a multiple of `ranks`, see `padded_for`.
    """
    mine, size = order[rank::ranks], workers * batch_size
    whole = len(mine) // size * size
    batches = mine[:whole].reshape(-1, workers, batch_size)[:, worker].reshape(-1)
    if whole == len(mine):
        return np.array(batches)
    rest = np.full(size, -1, order.dtype)
    rest[: len(mine) - whole] = mine[whole:]
    return np.concatenate([batches, rest.reshape(workers, batch_size)[worker]])


def padded_for(order: Array, ranks: int) -> Array:
    """Return a node's order with some of its last samples twice, so that its ranks have as many each."""
    if not (missing := -len(order) % ranks):
        return order
    if ranks + missing - 1 <= len(order):
        return np.append(order, order[-ranks - missing + 1 : 1 - ranks])
    return np.append(order, np.resize(order, missing))


def share(order: Array, path: Path) -> None:
    """Write a node's order to shared memory. Raises ValueError: there is no room."""
    try:
        path.write_bytes(np.ascontiguousarray(order).data)
    except OSError as error:
        path.unlink(missing_ok=True)
        given = (
            f"data: {path.parent} has no room for the order of {len(order):,} samples, {order.nbytes / 2**30:.3g} GiB"
        )
        raise ValueError(
            f"{given} ({error.strerror}). Enlarge it (docker run --shm-size=16g or --ipc=host)."
        ) from error
