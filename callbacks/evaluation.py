"""Evaluates a run while it trains: at every point of its cadence, with training's clock stopped.

A point is a batch's end at a multiple of `every_images`, after the checkpoints of that batch. A run that was ended between a
point's checkpoint and its evaluation has the evaluation first when it goes on: no point is left out, none comes twice.

The seconds of an evaluation's line are those of training up to it, from the run's first start, without evaluations:
Composer's clock runs on through what a callback does, and adds that to the next batch. There it is taken off again, from
the clock itself: checkpoints keep that, so that nothing else has to be kept through stops, and starts without evaluation.

A signal is heard within the evaluation too. What is scored by then is kept, and the next start goes on with it
(evaluation/scoring.py).
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer import Callback, Logger, State

from cli.ranks import Signalled

Line = dict[str, Any]


class Evaluation(Callback):
    """Scores the model at each point of the cadence and hands the line to the record.

    Args:
        score: returns figures and settings of the model as it is; called on all ranks.
        every_images: a multiple of the global batch size.
        with_average: evaluate the average of the weights (ema.EMA), where there is one yet.
        clock: has another clock run than training's.
        earlier: evaluations of this run so far.
        keep: takes a new one.
        stop: ends the run where an evaluation was left at a signal; called on all ranks, with training's weights back.
    """

    def __init__(
        self,
        score: Callable[[], Line],
        *,
        every_images: int,
        with_average: bool,
        clock: Callable[[], contextlib.AbstractContextManager],
        earlier: Callable[[], Sequence[Line]],
        keep: Callable[[Line, Logger], None],
        stop: Callable[[State], None] = lambda state: None,
    ):
        self.score, self.every_images, self.with_average = score, every_images, with_average
        self.clock, self.earlier, self.keep, self.stop = clock, earlier, keep, stop
        self._owed_sec = 0.0  # of an evaluation, which Composer's clock will add to the next batch

    def fit_start(self, state: State, logger: Logger) -> None:
        self.catch_up(state, logger)  # Composer's clock does not run yet

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        began = time.monotonic()
        self.catch_up(state, logger)
        self._owed_sec = time.monotonic() - began

    def batch_end(self, state: State, logger: Logger) -> None:
        owed, now = datetime.timedelta(seconds=self._owed_sec), state.timestamp
        state.timestamp = now.copy(total_wct=now.total_wct - owed, epoch_wct=now.epoch_wct - owed)
        self._owed_sec = 0.0

    def catch_up(self, state: State, logger: Logger) -> None:
        """Evaluate where the run is at a point that has not been evaluated yet."""
        now, average = state.timestamp, self._average(state) if self.with_average else None
        is_point = now.sample.value > 0 and now.sample.value % self.every_images == 0
        if not is_point or any(line["batch"] == now.batch.value for line in self.earlier()):
            return
        try:
            with self.clock(), contextlib.nullcontext() if average is None else average.applied():
                score = self.score()
        except Signalled:
            self.stop(state)
            raise
        seconds = now.total_wct.total_seconds()
        evaluations_sec = score["eval_sec"] + sum(line["eval_sec"] for line in self.earlier())
        where = {
            "batch": now.batch.value,
            "images": now.sample.value,
            "seconds": seconds,
            "seconds_with_eval": seconds + evaluations_sec,
            "weights": "ema" if average is not None and average.weights else "training",
            "eval_weights": "ema"
            if self.with_average
            else "training",  # what was asked for: the average may begin later
        }
        self.keep({**where, **score}, logger)

    def _average(self, state: State) -> Any:
        return next((algorithm for algorithm in state.algorithms if type(algorithm).__name__ == "EMA"), None)
