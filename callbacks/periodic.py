"""Does something at fixed intervals of a training, with training's clock stopped: evaluation, validation, sample grids.

A point is a batch's end at a multiple of `every_images`, after that batch's checkpoints; with `from_start` also the time
before the first batch. If a run was stopped between a point's checkpoint and its work, it does that first when it resumes. So
every point is done once.

A line's `seconds` is the training time up to it, since the run's first start, without such work. Composer's
clock keeps running in callbacks and adds that time to the next batch. We subtract it there from the clock itself. Since
checkpoints save that clock, nothing else has to be saved for resumes or for starts without evaluation.

A signal can also stop it. An evaluation's sums so far are saved, and the next start resumes from them
(evaluation/scorer.py); the others begin again.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from composer import Callback, Logger, State

from ranks.collectives import Signalled

if TYPE_CHECKING:
    from ema import EMA

Line = dict[str, Any]
Measurement = TypeVar("Measurement")


class EveryNImages(Callback, Generic[Measurement]):
    """Measures at each point, and passes on the result.

    Args:
        measure: called on all ranks, with the EMA weights in place if they are wanted.
        keep: called with the point (batch, images, seconds, weights), the measurement, and the logger.
        every_images: a multiple of the global batch size.
        from_start: the time before the first batch is a point too.
        average: use these EMA weights once they exist; None: the training weights.
        clock: context in which the evaluation clock runs instead of training's.
        is_done: says whether the point of this batch was done by an earlier start.
        stop: ends the run after a signal has stopped a measurement; called on all ranks, with the training weights restored.
        release: called when the run ends.
    """

    def __init__(
        self,
        measure: Callable[[], Measurement],
        keep: Callable[[Line, Measurement, Logger], None],
        *,
        every_images: int,
        from_start: bool = False,
        average: EMA | None,
        clock: Callable[[], contextlib.AbstractContextManager],
        is_done: Callable[[int], bool],
        stop: Callable[[State], None] = lambda state: None,
        release: Callable[[], None] = lambda: None,
    ):
        self.measure, self.keep, self.every_images, self.from_start = measure, keep, every_images, from_start
        self.average, self.clock, self.is_done, self.stop, self.release = average, clock, is_done, stop, release
        self._owed_sec = 0.0  # what Composer's clock will add to the next batch

    def fit_start(self, state: State, logger: Logger) -> None:
        self.catch_up(state, logger)  # Composer's clock is not running yet

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        began = time.monotonic()
        self.catch_up(state, logger)
        self._owed_sec = time.monotonic() - began

    def batch_end(self, state: State, logger: Logger) -> None:
        owed, now = datetime.timedelta(seconds=self._owed_sec), state.timestamp
        state.timestamp = now.copy(total_wct=now.total_wct - owed, epoch_wct=now.epoch_wct - owed)
        self._owed_sec = 0.0

    def close(self, state: State, logger: Logger) -> None:
        self.release()

    def catch_up(self, state: State, logger: Logger) -> None:
        """Measure if the run is at a point that is not done yet."""
        now, average = state.timestamp, self.average
        is_point = now.sample.value % self.every_images == 0 and (self.from_start or now.sample.value > 0)
        if not is_point or self.is_done(now.batch.value):
            return
        try:
            with self.clock(), contextlib.nullcontext() if average is None else average.applied():
                measurement = self.measure()
        except Signalled:
            self.stop(state)
            raise
        where = {
            "batch": now.batch.value,
            "images": now.sample.value,
            "seconds": now.total_wct.total_seconds(),
            "weights": "ema" if average is not None and average.weights else "training",
        }
        self.keep(where, measurement, logger)
