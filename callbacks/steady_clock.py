"""Seconds of a training by a clock that only goes forward.

Composer takes a batch's seconds from the machine's clock (trainer.py, `datetime.now()`). Set back by an hour, it made an hour
less of the training, and seconds_to_target negative (seen with 0.32.1).
"""

from __future__ import annotations

import datetime
import time

from composer import Callback, Logger, State


class SteadyClock(Callback):
    """Replaces the seconds of each batch by those of time.monotonic. It comes before every callback that reads the time."""

    def __init__(self) -> None:
        self._at: float | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        self._at = None

    def epoch_start(self, state: State, logger: Logger) -> None:
        if self._at is None:  # Composer's first batch begins here
            self._at = time.monotonic()

    def batch_end(self, state: State, logger: Logger) -> None:
        before, self._at = self._at, time.monotonic()
        if before is None:
            return
        now, took = state.timestamp, datetime.timedelta(seconds=self._at - before)
        wrong = now.batch_wct - took
        state.timestamp = now.copy(
            total_wct=now.total_wct - wrong,
            iteration_wct=now.iteration_wct - wrong,
            epoch_wct=now.epoch_wct - wrong,
            batch_wct=took,
        )
