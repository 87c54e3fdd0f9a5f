"""Which samples an epoch has of streams with weights: streaming's own choice, bit for bit, in half of its time.

An epoch has whole repeats of a stream, and picks the rest of it: so many samples at a time, each time from a shard at random.
Then it draws which of a shard's samples these are (streaming/base/sampling.py, StreamingDataset.resample_streams). Here the
same random numbers are drawn in the same order, but only that last draw goes shard by shard.

Imports numpy alone, as stages/shuffling.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def sampled(
    sizes: Array, streams: Sequence[tuple[int, int]], *, granularity: int, seed: int, epoch: int, new_picks: bool
) -> tuple[Array, Array]:
    """Return what an epoch has of some streams, in the order of their shards.

    Args:
        sizes: (shards,) int64, samples of each shard; of a stream those behind those of the one before.
        streams: of each its number of shards, and of the samples that an epoch has of it.
        granularity: samples that are picked at a time.
        new_picks: each epoch picks other shards; samples of a shard are chosen anew in any case.

    Returns:
        (units,) int64, each above 0: samples of each shard's repeats, and of the part that is chosen of it;
        (N,) int32 or int64: the numbers of these samples.
    """
    chosen, at = np.empty_like(sizes), 0
    for num_shards, choose in streams:
        of_stream = slice(at, at + num_shards)
        chosen[of_stream] = _chosen_of(sizes[of_stream], choose, granularity, seed + epoch if new_picks else seed)
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
    dtype = np.int32 if max(total, int(sizes.sum())) < 2**31 else np.int64
    ids = np.arange(total, dtype=dtype)
    ids += np.repeat((np.repeat(begins, units_of_shard) - starts).astype(dtype), units)
    # Of a part they are drawn.
    rng = np.random.default_rng(seed + epoch)
    drawn = (sizes[in_part], begins[in_part], starts[of_part], units[of_part])
    for size, begin, start, num in zip(*(each.tolist() for each in drawn), strict=True):
        some = rng.choice(size, num, replace=False)
        some.sort()
        ids[start : start + num] = some + begin
    return units, ids


def _chosen_of(sizes: Array, choose: int, granularity: int, seed: int) -> Array:
    """Return how many samples an epoch has of each shard of a stream; streaming's `get_sampling`."""
    total = int(sizes.sum())
    repeats, rest = divmod(choose, total)
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
