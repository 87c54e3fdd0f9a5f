"""Evaluates a run while it trains: at every point of its cadence, with training's clock stopped.

A point is a batch's end at a multiple of `every_images`, after the checkpoints of that batch. A run that was ended between a
point's checkpoint and its evaluation has the evaluation first when it goes on: no point is left out, none comes twice.

The seconds of an evaluation's line are those of training up to it, from the run's first start, without evaluations:
Composer's clock runs on through what a callback does, so what it has counted of them is taken off again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer import Callback, Logger, State, Timestamp

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
    """

    def __init__(
        self,
        score: Callable[[], Line],
        *,
        every_images: int,
        with_average: bool,
        clock: Callable[[], contextlib.AbstractContextManager],
        earlier: Callable[[], Sequence[Line]],
        keep: Callable[[Line, Logger | None], None],
    ):
        self.score, self.every_images, self.with_average = score, every_images, with_average
        self.clock, self.earlier, self.keep = clock, earlier, keep
        self._counted_sec = 0.0  # of evaluations, in Composer's clock

    def state_dict(self) -> dict[str, Any]:
        return {"counted_sec": self._counted_sec}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counted_sec = state["counted_sec"]

    def fit_start(self, state: State, logger: Logger) -> None:
        self.catch_up(state.timestamp, self._average(state), logger)  # Composer's clock does not run yet

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._counted_sec += self.catch_up(state.timestamp, self._average(state), logger)

    def catch_up(self, now: Timestamp, average: Any, logger: Logger | None) -> float:
        """Evaluate where the run is at a point that has not been evaluated yet.

        Args:
            average: the run's ema.EMA, or None.

        Returns:
            the seconds that it took.
        """
        is_point = now.sample.value > 0 and now.sample.value % self.every_images == 0
        if not is_point or any(line["batch"] == now.batch.value for line in self.earlier()):
            return 0.0
        average = average if self.with_average else None
        with self.clock(), contextlib.nullcontext() if average is None else average.applied():
            score = self.score()
        seconds = now.total_wct.total_seconds() - self._counted_sec
        evaluations_sec = score["eval_sec"] + sum(line["eval_sec"] for line in self.earlier())
        where = {
            "batch": now.batch.value,
            "images": now.sample.value,
            "seconds": seconds,
            "seconds_with_eval": seconds + evaluations_sec,
            "weights": "ema" if average is not None and average.weights else "training",
        }
        self.keep({**where, **score}, logger)
        return score["eval_sec"]

    def _average(self, state: State) -> Any:
        return next((algorithm for algorithm in state.algorithms if type(algorithm).__name__ == "EMA"), None)
