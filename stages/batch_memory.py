"""Shared memory of batches that loader workers hand over, used again.

A new page of shared memory costs a worker some microseconds: for a picture of 512 px as much as decoding it, for stored
moments several times what reading them does. So a worker takes an earlier batch's memory for the next one, as soon as the
training process says that it has its own copy.

    worker              take: memory and a receipt; writes the batch; hands over both
    training process    collect: copies the batch, where it is not pinned, which is a copy; notes the receipt's number
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

MAX_WORKERS = 512
KEPT = 3  # of a worker: one that is written, and two that wait, as many as torch's DataLoader lets it work ahead
RECEIPT = "receipt"
ALIGNED = 64  # bytes: where a column of several begins


class BatchMemory:
    """What a stream's loader workers write their batches to. It is made before they start, and shared by all."""

    def __init__(self) -> None:
        self.collected = torch.zeros(MAX_WORKERS, dtype=torch.int64).share_memory_()
        """Number of each worker's last batch that the training process has copied; a worker counts its own from 1."""
        self._number: int | None = None
        self._kept: deque[tuple[int, Tensor]] = deque()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, dict[str, tuple[int, int]]]:
        """Return memory for a batch, and what the batch needs beside it: a receipt (worker, number), in workers alone."""
        worker, num_bytes = get_worker_info(), math.prod(shape) * dtype.itemsize
        if worker is None:
            # numpy asks the system for large pages, torch does not: the first touch of each costs a reader time.
            return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype).view(*shape), {}
        collected = int(self.collected[worker.id])
        self._number = (collected if self._number is None else self._number) + 1
        memory = self._kept.popleft()[1] if self._kept and self._kept[0][0] <= collected else None
        if memory is None or len(memory) < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
        if len(self._kept) < KEPT:
            self._kept.append((self._number, memory))
        return memory[:num_bytes].view(dtype).view(*shape), {RECEIPT: (worker.id, self._number)}

    def take_columns(
        self, columns: Mapping[str, tuple[Sequence[int], torch.dtype]]
    ) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
        """Return memory for several columns, name -> (shape, type), cut from one piece; and what `take` has beside it."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in columns.values()]
        begins = [0, *itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
        memory, receipt = self.take((begins.pop(),), torch.uint8)
        cut = {
            name: memory[begin : begin + size].view(dtype).view(*shape)
            for (name, (shape, dtype)), begin, size in zip(columns.items(), begins, sizes, strict=True)
        }
        return cut, receipt

    def collect(self, batch: dict[str, Any]) -> None:
        """Make a batch the training process's own, in place, and let its worker have the memory again."""
        worker, number = batch.pop(RECEIPT)
        for name, column in batch.items():
            if isinstance(column, Tensor) and column.is_shared():
                batch[name] = column.clone()
        self.collected[worker] = number
