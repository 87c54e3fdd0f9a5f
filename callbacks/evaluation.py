"""Evaluates a run during training, at fixed intervals, with training's clock stopped.

An evaluation point is a batch's end at a multiple of `every_images`, after that batch's checkpoints. If a run was stopped
between a point's checkpoint and its evaluation, it evaluates first when it resumes. So every point is evaluated once.

An evaluation line's `seconds` is the training time up to it, since the run's first start, without evaluations. Composer's
clock keeps running in callbacks and adds that time to the next batch. We subtract it there from the clock itself. Since
checkpoints save that clock, nothing else has to be saved for resumes or for starts without evaluation.

A signal can also stop an evaluation. Its sums so far are saved, and the next start resumes from them
(evaluation/scoring.py).
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from composer import Callback, Logger, State

from cli.ranks import Signalled

if TYPE_CHECKING:
    from ema import EMA

Line = dict[str, Any]


class Evaluation(Callback):
    """Scores the model at each evaluation point and passes the line to the record.

    Args:
        score: returns the model's metrics and settings; called on all ranks.
        every_images: a multiple of the global batch size.
        average: evaluate these EMA weights once they exist; None: the training weights.
        clock: context in which the evaluation clock runs instead of training's.
        earlier: evaluations of this run so far.
        keep: called with each new evaluation.
        stop: ends the run after a signal has stopped an evaluation; called on all ranks, with the training weights restored.
    """

    def __init__(
        self,
        score: Callable[[], Line],
        *,
        every_images: int,
        average: EMA | None,
        clock: Callable[[], contextlib.AbstractContextManager],
        earlier: Callable[[], Sequence[Line]],
        keep: Callable[[Line, Logger], None],
        stop: Callable[[State], None] = lambda state: None,
    ):
        self.score, self.every_images, self.average = score, every_images, average
        self.clock, self.earlier, self.keep, self.stop = clock, earlier, keep, stop
        self._owed_sec = 0.0  # an evaluation's time, which Composer's clock will add to the next batch

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

    def catch_up(self, state: State, logger: Logger) -> None:
        """Evaluate if the run is at an evaluation point that has not been evaluated yet."""
        now, average = state.timestamp, self.average
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
            "eval_weights": "training" if average is None else "ema",  # as configured: the EMA may begin later
        }
        self.keep({**where, **score}, logger)
