"""Stops a run at the first evaluation that meets its target, and says how long that took.

The decision is made of the evaluations that the run record keeps: they are the same on all ranks, and after a restart, and
so is the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer import Callback, Logger, State

from cli.log import log

TARGET_KEYS = ("target", "images_to_target", "seconds_to_target", "seconds_to_target_with_eval", "fid", "clip")
"""What a run with a target has on its result line beside the rest."""


class QualityTarget(Callback):
    """Ends training once the target is met.

    Args:
        is_met: whether an evaluation meets it.
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
        self.batch_checkpoint(state, logger)  # an evaluation that was owed comes at the start

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if (line := self.reached) is not None:
            state.stop_training()
            log.info(f"target: {said(line)}. Training stops.")

    def result(self) -> dict[str, Any]:
        """Return TARGET_KEYS: of the evaluation that met it, or figures of the last one and `missed`."""
        return outcome(self.evaluations(), self.reached)


def outcome(evaluations: Sequence[Mapping[str, Any]], reached: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return TARGET_KEYS for a list of evaluations of which one, or none, met the target."""
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
    """Return an evaluation that met its target in words."""
    figures = " and ".join(f"{key.upper()} {line[key]:.6g}" for key in ("fid", "clip") if line.get(key) is not None)
    return f"reached with {figures} after {line['images']:,} images and {line['seconds']:.1f} s of training"
