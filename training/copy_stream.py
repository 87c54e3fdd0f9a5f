"""Batches on their way to a GPU: copied beside the step before, on a stream of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class CopyStream:
    """Copies a batch from pinned memory to a GPU; Composer's `batch_transforms` call it before its own copy.

    On the stream of the computation a copy stands behind all that is queued there. On its own it begins at once, while the
    step before is computed: where the host is ahead of the device, which it is with `async_loss` alone.
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            moved = {name: column.to(self.device, non_blocking=True) for name, column in batch.items()}
        computing.wait_stream(self.stream)
        for column in moved.values():
            column.record_stream(computing)  # its memory is free for another copy when the computation has passed it
        return moved
