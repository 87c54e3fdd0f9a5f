"""The loss of every batch. The host reads it at the batch's end, or one batch later (async_loss=true).

A non-finite loss stops the run on all ranks before anything of that batch is saved.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Logger, State
from torch import Tensor

from checkpointing.files import FULL, list_checkpoints
from common import dist
from run_folder.metric_names import alert

TOTAL = "loss/train/total"


@dataclass(frozen=True)
class Loss:
    """A batch's loss: batch number from 0, mean over all ranks, and this rank's own loss."""

    batch: int
    mean: float
    own_loss: float


class AsyncLosses:
    """Losses being copied from the device, in the order of the batches."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def put(self, batch: int, loss: Tensor) -> None:
        """Start copying a batch's loss, (1,), to the host, without waiting."""
        losses = loss.detach().float().repeat(2)
        dist.all_reduce(losses[:1], reduce_operation="SUM")
        host_losses = torch.empty(2, pin_memory=losses.is_cuda).copy_(losses, non_blocking=True)
        arrived = None
        if losses.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((batch, host_losses, arrived))

    def take(self, leave: int) -> list[Loss]:
        """Return all but the newest `leave` losses, which may still be computed. Waits for the returned ones.

        All ranks get the same batches, since they decide together.
        """
        taken = []
        while len(self._waiting) > leave:
            batch, host_losses, arrived = self._waiting.popleft()
            if arrived is not None:
                arrived.synchronize()
            total, own_loss = host_losses.tolist()
            taken.append(Loss(batch, total / dist.get_world_size(), own_loss))
        return taken


class StreamLosses:
    """Samples and losses of each of several streams (data.streams), over all ranks, since the last window's end.

    The sums stay on the device until a window or a checkpoint needs them, so that no batch waits.

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
        sums = (batch["stream"].to(losses.device) == numbers[:, None]).double() @ each  # (S, B) @ (B, 2)
        self._own = sums if self._own is None else self._own + sums

    def settle(self) -> None:
        """Add what all ranks have counted. All ranks call it."""
        sums = self._nothing().to(self.device) if self._own is None else self._own
        dist.all_reduce(sums, reduce_operation="SUM")
        self.sums, self._own = self.sums + sums.cpu(), None

    def restart(self) -> None:
        """Begin a new window."""
        self.sums, self._own = self._nothing(), None

    def line(self) -> dict[str, dict[str, Any]]:
        """Return each stream's samples and mean loss; null for one without samples."""
        return {
            name: {"samples": int(num), "loss": total / num if num else None}
            for name, (num, total) in zip(self.names, self.sums.tolist(), strict=True)
        }


class Losses:
    """The losses since the last window's end.

    Args:
        checkpoints: folder of the run's checkpoints; the message for a non-finite loss names the newest one.
        async_losses: losses that arrive one batch late; None: Composer reads each at its batch's end.
        stream_losses: those of each of several streams; None: there is one.
    """

    def __init__(
        self, checkpoints: Path, async_losses: AsyncLosses | None = None, stream_losses: StreamLosses | None = None
    ):
        self.checkpoints, self.async_losses, self.stream_losses = checkpoints, async_losses, stream_losses
        self.window_losses: list[float] = []
        self._state: State | None = None
        self._loggers: Sequence[Any] = ()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take the loss of the batch that ends; with async_loss, those before it."""
        self._state, self._loggers = state, logger.destinations
        if self.async_losses is not None:
            self.settle(leave=1)
            logger.log_metrics(state.total_loss_dict)
            return
        loss = state.total_loss_dict[TOTAL]  # mean over all ranks; Composer has read it already
        if not math.isfinite(loss):
            last = state.loss if isinstance(state.loss, torch.Tensor) else torch.tensor(float("nan"))
            self._stop(state.timestamp.batch.value - 1, loss, bool(torch.isfinite(last).all()))
        self.window_losses.append(loss)

    def settle(self, leave: int = 0) -> None:
        """Read all losses of ended batches but the newest `leave`, and check that they are finite. All ranks call it.

        Raises:
            ValueError: a loss is not finite; names batch, ranks and the last good checkpoint.
        """
        for loss in [] if self.async_losses is None else self.async_losses.take(leave):
            assert self._state is not None
            self._state.total_loss_dict = {TOTAL: loss.mean}  # where Composer keeps it, for other readers
            if not math.isfinite(loss.mean):
                self._stop(loss.batch, loss.mean, math.isfinite(loss.own_loss))
            self.window_losses.append(loss.mean)
        if self.stream_losses is not None and not leave:
            self.stream_losses.settle()

    def restart(self, window_losses: Sequence[float] = ()) -> None:
        """Begin a new window; after a resume, with what it had."""
        self.window_losses = list(window_losses)
        if self.stream_losses is not None:
            self.stream_losses.restart()

    def mean(self) -> float:
        """Return the mean since the last window's end."""
        return sum(self.window_losses) / len(self.window_losses)

    def _stop(self, batch: int, loss: float, is_finite_here: bool) -> None:
        # Every rank sees the same mean and calls this, so the gather cannot hang.
        finite = dist.all_gather_object(is_finite_here)
        ranks = ", ".join(str(rank) for rank, is_finite in enumerate(finite) if not is_finite)
        where = f"rank {ranks}" if ranks else "an earlier microbatch of some rank"
        newest = next(iter(list_checkpoints(self.checkpoints, FULL)), None)
        last_good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
        text = (
            f"loss: {loss} in batch {batch} (counted from 0), first seen on {where}. The run stops before anything of this "
            f"batch is kept; {last_good}. If training diverges, lower optimizer.lr, set optimizer.clip_norm=1, or use "
            f"precision=bf16 instead of fp16. If a run with optimizer.lr=1e-30 and another run_name stops at the same batch, "
            f"the cause is a sample or the network."
        )
        alert(self._loggers, "loss is not finite", text)
        raise ValueError(text)
