"""What each rank reads in an epoch: streaming's own order (`py1e`), bit for bit, in a seventh of its memory.

An epoch has whole repeats of a stream, and a part of the rest: so many samples at a time, each time from a shard at random
(streaming/base/sampling.py). `py1e` puts the samples of each shard in a row, shifts each by a random number of places, at
most 0.625 blocks, and sorts them by where they then are (streaming/base/shuffle/py1e.py). Here the same random numbers are
drawn in the same order. But as no sample goes far, they are sorted window by window, and in place.

Two samples whose shifted places are equal to the last bit are left in the order of their row. There is about one such pair in
100 million samples; how streaming orders it depends on the processor that numpy sorts with.

The samples are dealt to nodes and ranks as in streaming's `orig` partition: the same global batches on any number of both.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WINDOW = 1 << 19  # samples that are sorted at once, beside those that wait for the next window
WINDOW_BYTES = 64  # of each sample in a window
COPIES = 2  # of an order, beside what a rank makes: one for all its workers, and their parts of it
BLOCK_SIZE = 1 << 18  # samples: how far a shuffle carries one


def order_memory_gib(num_samples: int, ranks: int) -> float:
    """Return the memory that an epoch's order takes at most, GiB.

    Args:
        num_samples: of an epoch, on this machine.
        ranks: of this machine; each makes the order.
    """
    whole = num_samples * dtype_of(num_samples).itemsize
    return (whole * (ranks + COPIES) + WINDOW_BYTES * ranks * min(num_samples, 2 * WINDOW)) / 2**30


def dtype_of(num_samples: int) -> np.dtype[Any]:
    """Return the type of an order's numbers."""
    return np.dtype(np.int32 if num_samples < 2**31 else np.int64)


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
    shuffle: bool = True
    block_size: int = BLOCK_SIZE
    """Samples; none of `py1e`'s shifts is larger than 0.625 of it."""
    streams: Sequence[tuple[int, int]] = ()
    """Of each its number of shards, and of the samples that an epoch has of it; (): each sample once."""
    granularity: int = 1
    """Samples of a shard that are picked at a time, where an epoch has a part of a stream."""

    @property
    def rows(self) -> range:
        """The canonical nodes whose samples this node reads."""
        if self.canonical_nodes >= self.nodes:
            return range(self.node, self.canonical_nodes, self.nodes)
        return range(self.node % self.canonical_nodes, self.node % self.canonical_nodes + 1)


def order_of_node(epoch: Epoch) -> Array:
    """Return the samples that a node reads in an epoch, in their order, numbered through all shards; (M,).

    M is the same for all nodes, and some samples are there twice for that.

    Raises:
        ValueError: the number of canonical nodes and that of nodes do not divide one another.
    """
    if epoch.canonical_nodes % epoch.nodes and epoch.nodes % epoch.canonical_nodes:
        problem = f"data.num_canonical_nodes: {epoch.canonical_nodes} and {epoch.nodes} nodes"
        raise ValueError(f"{problem}: neither divides the other. Give a multiple or a divisor of the nodes.")
    if not epoch.streams:
        return _order_of_units(replace(epoch, sizes=epoch.sizes[epoch.sizes > 0]))
    units, ids = choose_samples(epoch)
    order = _order_of_units(replace(epoch, sizes=units))
    named = order if order.dtype == ids.dtype else np.empty(len(order), ids.dtype)
    for at in range(0, len(order), WINDOW):  # numpy would make each number of a whole order 8 bytes
        named[at : at + WINDOW] = ids[order[at : at + WINDOW]]
    return named


def order_of_rank(order: Array, rank: int, ranks: int) -> Array:
    """Return what one of a node's ranks reads of the node's order, which is as much as each of the others."""
    if missing := -len(order) % ranks:  # some of the last samples come twice
        again = order[-ranks - missing + 1 : 1 - ranks or None]
        order = np.append(order, again if ranks + missing - 1 <= len(order) else np.resize(order, missing))
    return order[rank::ranks]


# --- which samples ---


def choose_samples(epoch: Epoch) -> tuple[Array, Array]:
    """Return what an epoch has of some streams, in the order of their shards.

    Returns:
        (units,) int64, each above 0: samples of each shard's repeats, and of the part that is chosen of it;
        (N,) int32 or int64: the numbers of these samples.
    """
    sizes, seed = epoch.sizes, epoch.seed + epoch.epoch
    chosen, at = np.empty_like(sizes), 0
    for num_shards, choose in epoch.streams:
        of_stream = slice(at, at + num_shards)
        # Without shuffling each epoch picks the same shards; samples of a shard are chosen again in any case.
        picks_seed = seed if epoch.shuffle else epoch.seed
        chosen[of_stream] = _count_by_shard(sizes[of_stream], choose, epoch.granularity, picks_seed)
        at += num_shards
    repeats, rest = np.divmod(chosen, np.maximum(sizes, 1))
    units_of_shard = repeats + (rest > 0)
    units = np.repeat(sizes, units_of_shard)
    in_part = np.flatnonzero(rest)
    of_part = np.cumsum(units_of_shard)[in_part] - 1  # the last unit of its shard
    units[of_part] = rest[in_part]
    # The samples, as if each unit had its shard's first ones.
    begins, starts = np.cumsum(sizes) - sizes, np.cumsum(units) - units
    total = int(units.sum())
    dtype = dtype_of(max(total, int(sizes.sum())))
    ids = np.arange(total, dtype=dtype)
    ids += np.repeat((np.repeat(begins, units_of_shard) - starts).astype(dtype), units)
    # Of a part they are drawn.
    rng = np.random.default_rng(seed)
    drawn = (sizes[in_part], begins[in_part], starts[of_part], units[of_part])
    for size, begin, start, num in zip(*(each.tolist() for each in drawn), strict=True):
        some = rng.choice(size, num, replace=False)
        some.sort()
        ids[start : start + num] = some + begin
    return units, ids


def _count_by_shard(sizes: Array, choose: int, granularity: int, seed: int) -> Array:
    """Return how many samples an epoch has of each shard of a stream; streaming's `get_sampling`."""
    repeats, rest = divmod(choose, int(sizes.sum()))
    if not rest:
        return sizes * repeats
    num_picks = -(-sizes // granularity)
    picked = np.full(int(num_picks.sum()), granularity)
    filled = num_picks > 0
    picked[np.cumsum(num_picks)[filled] - 1] = (sizes - (num_picks - 1) * granularity)[filled]
    order = np.random.default_rng(seed).permutation(len(picked))
    up_to = np.cumsum(picked[order])
    last = int(np.searchsorted(up_to, rest))
    order = order[: last + 1]
    picked[order[-1]] -= up_to[last] - rest
    shards = np.searchsorted(np.cumsum(num_picks), order, side="right")
    return sizes * repeats + np.bincount(shards, picked[order], len(sizes)).astype(np.int64)


def count_chosen(weight: Mapping[str, float], num_samples: int) -> int:
    """Return how many of its samples an epoch has of a stream with `repeat` or `choose`; with neither, each once."""
    return int(weight["repeat"] * num_samples if "repeat" in weight else weight.get("choose", num_samples))


def share_proportions(proportions: Sequence[float], total: int, seed: int) -> list[int]:
    """Return how many of an epoch's samples each stream has by its proportion; those left over by rounding are drawn."""
    parts = np.array(proportions, np.float64)
    chosen = (total * (parts / parts.sum())).astype(np.int64)
    chosen[np.random.default_rng(seed).choice(len(parts), total - int(chosen.sum()), replace=False)] += 1
    return chosen.tolist()


# --- their order ---


def _order_of_units(epoch: Epoch) -> Array:
    """Return the order of a node's samples of what is in a row: shards, or their repeats and parts."""
    total, (canonical, nodes) = int(epoch.sizes.sum()), (epoch.canonical_nodes, epoch.nodes)
    ends = [total * row // canonical for row in range(canonical + 1)]
    if epoch.shuffle:
        rows = shuffle_rows(epoch, ends)
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


def shuffle_rows(epoch: Epoch, ends: Sequence[int]) -> list[Array]:
    """Return the shuffled samples of each of this node's canonical nodes.

    Args:
        ends: where each canonical node begins in the row of all shards, and the number of all samples; (nodes + 1,).
    """
    begins, sizes, firsts = _cut_shards(epoch, ends)
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
        _shuffle_nearby(row, sizes[first:last], rng, epoch.block_size, is_wanted=node in epoch.rows)
        if node in epoch.rows:
            rows.append(row)
    return rows


def _cut_shards(epoch: Epoch, ends: Sequence[int]) -> tuple[Array, Array, list[int]]:
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


def _shuffle_nearby(
    row: Array, sizes: Sequence[int], rng: np.random.Generator, block_size: int, *, is_wanted: bool
) -> None:
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
        distance = max(0.0, (int(rng.integers(least, most)) - size) / 2)
        shifts = rng.uniform(low=max(-distance, -at), high=min(distance, total - at - size), size=size)
        if is_wanted:
            shifted.append(np.arange(at, at + size) + shifts)
        at += size
        if is_wanted and (at - begun >= WINDOW or at == total):
            places, samples = np.concatenate([waiting, *shifted]), np.concatenate([samples, row[begun:at]])
            order = _argsort(places)
            places = places[order]
            # Whatever comes later is shifted by less than 0.625 blocks.
            ready = total - done if at == total else int(np.searchsorted(places, at - most / 2))
            row[done : done + ready] = samples[order[:ready]]
            waiting, samples, shifted = places[ready:], samples[order[ready:]], []
            begun, done = at, done + ready
    if sizes and max(sizes) > least:
        text = f"data: shards of {max(sizes):,} samples are shuffled within themselves, as a block has {block_size:,}"
        warnings.warn(text, stacklevel=2)


def _argsort(places: Array) -> Array:
    order = np.argsort(places)
    in_order = places[order]
    return np.argsort(places, kind="stable") if (in_order[1:] == in_order[:-1]).any() else order


# --- buckets ---


def batch_by_bucket(order: Array, buckets: Array, num_batches: Sequence[int], batch_size: int) -> Array:
    """# (N,) samples in their order -> (sum of num_batches, batch_size): each batch is of one bucket.

    Samples wait in their bucket's queue, in the order given. A batch leaves when its last sample comes; what is left in the
    queues at the end is left out.

    Args:
        buckets: (N,), the bucket of each of the samples.
        num_batches: of each bucket.
    """
    batches, ready_at = [], []
    for bucket, num in enumerate(num_batches):
        positions = np.flatnonzero(buckets == bucket)[: num * batch_size].reshape(num, batch_size)
        batches.append(order[positions])
        ready_at.append(positions[:, -1])
    return np.concatenate(batches)[np.argsort(np.concatenate(ready_at), kind="stable")]
