"""Stops a run at the first evaluation, or validation, that meets its target, and reports how long that took.

The decision depends only on the lines in the run record, so it is the same on all ranks and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer import Callback, Logger, State

from common.log import log
from run_folder.history import TARGET_METRICS, TARGET_RESULTS
from run_folder.metric_names import alert, format_scores


class QualityTarget(Callback):
    """Ends training once the target is met.

    Args:
        is_met: whether an evaluation, or a validation, meets the target.
        evaluations: those of this run so far, in order.
        metrics: the keys of a line that the target is about.
    """

    def __init__(
        self,
        is_met: Callable[[Mapping[str, Any]], bool],
        evaluations: Callable[[], Sequence[Mapping[str, Any]]],
        metrics: Sequence[str] = TARGET_METRICS,
    ):
        self.is_met, self.evaluations, self.metrics = is_met, evaluations, metrics

    @property
    def reached(self) -> Mapping[str, Any] | None:
        """The first evaluation that meets the target."""
        return next((line for line in self.evaluations() if self.is_met(line)), None)

    def fit_start(self, state: State, logger: Logger) -> None:
        self.batch_checkpoint(state, logger)  # a missed evaluation is made at the start

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if (line := self.reached) is not None:
            state.stop_training()
            log.info(f"target: {format_metrics(line)}. Training stops.")
            alert(logger.destinations, "target reached", format_metrics(line))

    def result(self) -> dict[str, Any]:
        """Return the keys of the evaluation that met the target; else the last one's metrics and `missed`."""
        return target_outcome(self.evaluations(), self.reached, self.metrics)


def target_outcome(
    evaluations: Sequence[Mapping[str, Any]], reached: Mapping[str, Any] | None, metrics: Sequence[str] = TARGET_METRICS
) -> dict[str, Any]:
    """Return TARGET_RESULTS and metrics for a list of evaluations; `reached` is the one that met the target, or None."""
    last = reached or (evaluations[-1] if evaluations else {})
    to_target = reached or {}
    values = (
        "missed" if reached is None else "reached",
        to_target.get("images"),
        to_target.get("seconds"),
        to_target.get("seconds_with_eval"),
    )
    return {**dict(zip(TARGET_RESULTS, values, strict=True)), **{key: last.get(key) for key in metrics}}


def format_metrics(line: Mapping[str, Any]) -> str:
    """Describe an evaluation that met its target."""
    scores = " and ".join(format_scores(line))
    return f"reached with {scores} after {line['images']:,} images and {line['seconds']:.1f} s of training"
