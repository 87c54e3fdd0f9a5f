"""What each rank takes for itself, before it waits for the others; the slowest one is told by it.

    forward    from the first microbatch's forward pass to the last one's backward pass, in which gradients are averaged
    data       from the wish for a batch to its arrival at this rank, before it waits for the others to have theirs

The clocks of callbacks/throughput.py are the same on all ranks up to a step's length: no rank gets on without the slowest.
On a GPU a forward pass is timed by events in the device's queue, which are read at a window's edge, when it is empty anyway.
Where weights are shared out (training/sharding.py) a forward pass waits for the others too: then only data is told.
"""

from __future__ import annotations

import time

import torch
from composer import Callback, Logger, State

Moment = float | torch.cuda.Event


class OwnClocks(Callback):
    """Sums up a window's own times of this rank; `take` returns them and begins anew.

    Args:
        has_own_forward: a forward pass needs no other rank.
    """

    def __init__(self, *, has_own_forward: bool):
        self.has_own_forward = has_own_forward
        self._data_sec = 0.0
        self._asked: float | None = None
        self._passes: list[tuple[Moment, Moment]] = []
        self._begun: Moment | None = None
        self._last: Moment | None = None

    def has_arrived(self) -> None:
        """Note that this rank's batch is here; the loader says so before it waits for the others."""
        if self._asked is not None:
            self._data_sec += time.perf_counter() - self._asked
            self._asked = None

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._asked = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.has_arrived()  # of a loader that asks nobody, as for synthetic data
        self._begun = self._last = None

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._begun is None and self.has_own_forward:
            self._begun = _now(state)

    def before_backward(self, state: State, logger: Logger) -> None:
        if self.has_own_forward:
            self._last = _now(state)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self._begun is not None and self._last is not None:
            self._passes.append((self._begun, self._last))

    def take(self) -> tuple[float, float]:
        """Return seconds of forward passes and of waits for data since the last call. The device is idle."""
        forward = sum(_between(begun, last) for begun, last in self._passes)
        found = (forward, self._data_sec)
        self._passes, self._data_sec = [], 0.0
        return found


def _now(state: State) -> Moment:
    if state.device.name != "gpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begun: Moment, last: Moment) -> float:
    if isinstance(begun, float) or isinstance(last, float):
        assert isinstance(begun, float) and isinstance(last, float)
        return last - begun
    return begun.elapsed_time(last) / 1000.0
