"""Noisy times first: a flow begins with times shifted towards noise, and goes on with its own.

    algorithms='["algorithms.noise_first:NoiseFirst(until_images=15360, shift=3.0)"]'

The layout of an image is decided in the noise, and low noise is learned slowest. Kim et al. 2024 (arXiv:2403.10348) train
clusters of timesteps one after the other, from the noisiest on. Here all times occur from the beginning: up to
`until_images` they are those of `objective.shift=SHIFT` (see families/objectives.py), then those of the run's own shift.

The training loss of logs and records is that of the times drawn, so it changes at `until_images`; validation does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from composer import Algorithm, Event, Logger, State

from families.objectives import RectifiedFlow
from families.spec import Family


class NoiseFirst(Algorithm):
    """Replace a rectified flow's shift by `shift` until `until_images` images have been seen.

    Raises:
        ValueError: an argument is outside.
    """

    def __init__(self, until_images: int, shift: float = 3.0):
        if type(until_images) is not int or until_images < 1:
            raise ValueError(f"until_images is {until_images!r}. Possible: an integer from 1")
        if type(shift) not in (int, float) or not 0.0 < shift < math.inf:
            raise ValueError(f"shift is {shift!r}. Possible: a number above 0; above 1 is towards noise")
        self.until_images, self.shift = until_images, shift
        self._own_shift: float | None = None

    def problem(self, family: Family, keys: Mapping[str, Any]) -> str | None:
        """Say why a run cannot use it, or None. `keys`: of a resolved run."""
        if (prediction := keys["objective.prediction"]) == RectifiedFlow.prediction:
            return None
        text = f"noise_first needs a rectified flow, but the prediction is {prediction}"
        return f"{text}. Set objective.prediction=flow, or leave it out."

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BATCH_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        objective: Any = getattr(state.model, "module", state.model).objective  # without DDP
        if self._own_shift is None:
            self._own_shift = objective.shift
        is_first = state.timestamp.sample.value < self.until_images
        objective.shift = self.shift if is_first else self._own_shift
