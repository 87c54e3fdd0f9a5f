"""Stops a run at the first evaluation that meets its target, and reports how long that took.

The decision depends only on the evaluations in the run record, so it is the same on all ranks and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer import Callback, Logger, State

from cli.log import log
from record.metric_names import alert

TARGET_KEYS = ("target", "images_to_target", "seconds_to_target", "seconds_to_target_with_eval", "fid", "clip")
"""Additional keys of the result line of a run with a target."""


class QualityTarget(Callback):
    """Ends training once the target is met.

    Args:
        is_met: whether an evaluation meets the target.
        evaluations: those of this run so far, in order.
    """

    def __init__(
        self, is_met: Callable[[Mapping[str, Any]], bool], evaluations: Callable[[], Sequence[Mapping[str, Any]]]
    ):
        self.is_met, self.evaluations = is_met, evaluations

    @property
    def reached(self) -> Mapping[str, Any] | None:
        """The first evaluation that meets the target."""
        return next((line for line in self.evaluations() if self.is_met(line)), None)

    def fit_start(self, state: State, logger: Logger) -> None:
        self.batch_checkpoint(state, logger)  # a missed evaluation is made at the start

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if (line := self.reached) is not None:
            state.stop_training()
            log.info(f"target: {said(line)}. Training stops.")
            alert(logger.destinations, "target reached", said(line))

    def result(self) -> dict[str, Any]:
        """Return TARGET_KEYS of the evaluation that met the target; else the last one's metrics and `missed`."""
        return outcome(self.evaluations(), self.reached)


def outcome(evaluations: Sequence[Mapping[str, Any]], reached: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return TARGET_KEYS for a list of evaluations; `reached` is the one that met the target, or None."""
    last = reached or (evaluations[-1] if evaluations else {})
    to_target = reached or {}
    values = (
        "missed" if reached is None else "reached",
        to_target.get("images"),
        to_target.get("seconds"),
        to_target.get("seconds_with_eval"),
        last.get("fid"),
        last.get("clip"),
    )
    return dict(zip(TARGET_KEYS, values, strict=True))


def said(line: Mapping[str, Any]) -> str:
    """Describe an evaluation that met its target."""
    figures = " and ".join(f"{key.upper()} {line[key]:.6g}" for key in ("fid", "clip") if line.get(key) is not None)
    return f"reached with {figures} after {line['images']:,} images and {line['seconds']:.1f} s of training"
