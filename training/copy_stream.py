"""Copy each batch to the GPU on a separate stream, during the step before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class CopyStream:
    """Copies a batch from pinned memory to a GPU; Composer's `batch_transforms` call it before its own copy.

    On the computation's stream, a copy waits for all queued work. On its own stream it begins at once, during the step
    before. That helps only if the host is ahead of the device, which needs `async_loss`.
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            moved = {name: column.to(self.device, non_blocking=True) for name, column in batch.items()}
        computing.wait_stream(self.stream)
        for column in moved.values():
            column.record_stream(computing)  # its memory is reused only after the computation has read it
        return moved
