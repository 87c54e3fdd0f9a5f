"""The stage `moments` in batches: each column one array, filled row by row from the bytes of its shards."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stages.images import SampleError
from stages.shard_file import ShardError, ShardFile
from stages.stream import Bad, BatchStream


class MomentsStream(BatchStream):
    """Batches of moments: {"moments": float16 (B, 2C, h, w), each text column: int64 (B, L), ..., "bad": [...]}.

    A sample with a value that is not finite is a broken one: in the loss it would look like too high a learning rate.

    Args:
        columns: name -> (shape of one sample, numpy type as stored, numpy type of the batch).
        arguments: keyword arguments of StreamingDataset.
    """

    def __init__(self, *, columns: Mapping[str, tuple[tuple[int, ...], str, str]], **arguments: Any):
        super().__init__(**arguments)
        self.columns = dict(columns)
        self._files: dict[int, ShardFile] = {}

    def read_batch(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        """Fill one array a column, shard by shard, each row at its place in the batch."""
        batch = {n: np.empty((len(sample_ids), *shape), stored) for n, (shape, stored, _) in self.columns.items()}
        places: dict[int, list[tuple[int, int]]] = {}
        bad: list[Bad] = []
        for place, sample_id in enumerate(sample_ids):
            shard_id, row = self.spanner[sample_id]
            places.setdefault(shard_id, []).append((place, row))
        for shard_id, wanted in places.items():
            rows = self._rows(shard_id, [row for _, row in wanted])
            for (place, _), found in zip(wanted, rows, strict=True):
                try:
                    _put(found, batch, place)
                except SampleError:
                    bad += self.first_good(sample_ids[place], functools.partial(self._put_sample, batch, place))[1]
        tensors = {n: torch.from_numpy(batch[n].astype(last, copy=False)) for n, (*_, last) in self.columns.items()}
        return {**tensors, "bad": bad}

    def _put_sample(self, batch: Mapping[str, np.ndarray], place: int, sample_id: int) -> None:
        shard_id, row = self.spanner[sample_id]
        _put(self._rows(shard_id, [row])[0], batch, place)

    def _rows(self, shard_id: int, rows: Sequence[int], retry: int = 7) -> list[dict[str, memoryview]]:
        """Read rows of a shard, fetching it where it is missing or was put out of the cache."""
        for _ in range(1 + retry):
            try:
                self.open_shard(shard_id)
                if shard_id not in self._files:
                    self._files[shard_id] = ShardFile(self.shards[shard_id])
                self._shard_access_times[shard_id] = time.time_ns()
                return self._files[shard_id].read(rows)
            except FileNotFoundError:
                self.prepare_shard(shard_id)
        raise ShardError(f"data: {self.shards[shard_id].raw_data.basename} cannot be kept: a larger data.cache_limit?")


def _put(found: Mapping[str, memoryview], batch: Mapping[str, np.ndarray], place: int) -> None:
    """Copy a row to its place. Raises SampleError: it has a value that is not finite."""
    for name, array in batch.items():
        values = np.frombuffer(found[name], array.dtype)
        if array.dtype.kind == "f" and not _is_finite(values):
            raise SampleError(f"{name} are not finite")
        array[place] = values.reshape(array.shape[1:])


def _is_finite(values: np.ndarray) -> bool:
    if values.dtype != np.float16:
        return bool(np.isfinite(values).all())
    # numpy widens each float16 by itself, which takes longer than reading it: the exponent of inf and nan is all ones.
    return bool((values.view(np.uint16) & 0x7FFF).max(initial=0) < 0x7C00)
