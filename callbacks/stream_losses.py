"""Samples and losses of each of several streams (data.streams), over all ranks, for the record's windows.

The sums stay on the device until a window or a checkpoint needs them, so that no batch waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from composer.utils import dist
from torch import Tensor


class StreamLosses:
    """Counts since the last window's end.

    Args:
        names: of the streams, in their order.
        device: of the model; what ranks share lies there, since NCCL takes nothing else.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names, self.device = list(names), device
        self.sums = self._nothing()
        """(S, 2) float64, a row a stream: samples, and the sum of their losses; of all ranks, as of the last `settle`."""
        self._own: Tensor | None = None  # (S, 2) float64: of this rank since then, on the device

    def _nothing(self) -> Tensor:
        return torch.zeros(len(self.names), 2, dtype=torch.float64)

    def add(self, losses: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Count a microbatch. `losses`: (B,), of its samples; the batch's `stream`: (B,), the number of each one's stream."""
        if "stream" not in batch:  # a batch that is only measured
            return
        each = torch.stack([torch.ones_like(losses), losses.detach()], dim=1).double()  # (B, 2)
        numbers = torch.arange(len(self.names), device=losses.device)
        own = (batch["stream"].to(losses.device) == numbers[:, None]).double() @ each  # (S, B) @ (B, 2)
        self._own = own if self._own is None else self._own + own

    def settle(self) -> None:
        """Add what all ranks have counted. All ranks call it."""
        own = self._nothing().to(self.device) if self._own is None else self._own
        dist.all_reduce(own, reduce_operation="SUM")
        self.sums, self._own = self.sums + own.cpu(), None

    def restart(self) -> None:
        """Begin a new window."""
        self.sums, self._own = self._nothing(), None

    def line(self) -> dict[str, dict[str, Any]]:
        """Return each stream's samples and mean loss; null for one without samples."""
        return {
            name: {"samples": int(num), "loss": total / num if num else None}
            for name, (num, total) in zip(self.names, self.sums.tolist(), strict=True)
        }
