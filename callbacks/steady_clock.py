"""Keeps the seconds of a training right where the machine's clock is set while it goes on.

Composer takes a batch's seconds from the machine's clock (trainer.py, `datetime.now()`). Set back by an hour, it made an hour
less of the training, and seconds_to_target negative (seen with 0.32.1).
"""

from __future__ import annotations

import datetime
import time

from composer import Callback, Logger, State
from composer.utils import dist

from cli.log import log

SET_SEC = 1.0  # what differs by less is two measurements of one batch


class SteadyClock(Callback):
    """Replaces the seconds of a batch in which the clock was set by those of a clock that only goes forward.

    It has to come before every callback that reads the time.
    """

    def __init__(self) -> None:
        self._at: float | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        self._at = None

    def epoch_start(self, state: State, logger: Logger) -> None:
        if self._at is None:  # Composer's first batch begins here
            self._at = time.monotonic()

    def batch_end(self, state: State, logger: Logger) -> None:
        before, self._at = self._at, time.monotonic()
        now = state.timestamp
        if before is None:
            return
        took = datetime.timedelta(seconds=self._at - before)
        wrong = now.batch_wct - took
        if abs(wrong.total_seconds()) < SET_SEC:
            return
        state.timestamp = now.copy(
            total_wct=now.total_wct - wrong,
            iteration_wct=now.iteration_wct - wrong,
            epoch_wct=now.epoch_wct - wrong,
            batch_wct=took,
        )
        if dist.get_global_rank() == 0:
            given = f"the machine's clock was set by {wrong.total_seconds():+.0f} s in batch {now.batch.value}"
            log.info(f"clock: {given}. The run's seconds do not count it.")
