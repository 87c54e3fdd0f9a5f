"""Images to the target over the global batch, and the batch at which a number of devices gets there first.

    images = E (1 + B / C)

E is what tiny batches need, C the critical batch, at which twice as many are needed: McCandlish et al. 2018, "An Empirical
Model of Large-Batch Training", arXiv:1812.06162, with batches times steps for the examples. It is fitted to the logarithms of
the images of a benchmark's reference points. Their learning rates and warm-ups differ: the reference chose them for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.optimize import least_squares

from preflight.scaling_fit import COVERED, Interval
from zoo.mlperf_rules import Benchmark

BEYOND = 2.0  # batches are tried from the smallest point's over this to the largest's times this
BATCHES_OCTAVE = 8


@dataclass(frozen=True)
class Convergence:
    """A fitted law of images to the target.

    theta: log E, log C. covariance: (2, 2). noise: of a run's log images. batches: of the points. runs: how many were fitted.
    """

    theta: np.ndarray
    covariance: np.ndarray
    noise: float
    batches: tuple[int, ...]
    runs: int

    @property
    def freedom(self) -> int:
        """Points less parameters: runs of one point share its learning rate, so they are not as good as points."""
        return max(1, len(self.batches) - 2)

    def images(self, batch: float) -> Interval:
        """Return the mean images to the target at a global batch."""
        e, c = np.exp(self.theta)
        slope = np.array([1.0, -(batch / c) / (1 + batch / c)])
        reach = stats.t.ppf((1 + COVERED) / 2, self.freedom) * np.sqrt(slope @ self.covariance @ slope)
        middle = np.log(e * (1 + batch / c))
        return Interval(*map(float, np.exp([middle, middle - reach, middle + reach])))

    def parameters(self) -> tuple[Interval, Interval]:
        """Return E and C."""
        reach = stats.t.ppf((1 + COVERED) / 2, self.freedom) * np.sqrt(np.diag(self.covariance))
        found = [Interval(*map(float, np.exp([m, m - r, m + r]))) for m, r in zip(self.theta, reach, strict=True)]
        return found[0], found[1]


def convergence(benchmark: Benchmark, ruleset: str | None = None) -> Convergence:
    """Fit a ruleset's reference points, the newest's with None.

    The covariance is that of points: their means scatter more than their runs say.
    """
    points = benchmark.points_of(ruleset)
    batches = np.array([point.global_batch_size for point in points], float)
    y = np.array([np.mean(np.log(point.images)) for point in points])

    def of(theta: np.ndarray) -> np.ndarray:
        return theta[0] + np.log1p(batches / np.exp(theta[1]))

    start = np.array([y.min() - 0.1, np.log(batches.max())])
    found = least_squares(lambda theta: of(theta) - y, start)
    within = np.concatenate([np.log(point.images) - np.mean(np.log(point.images)) for point in points])
    noise = float(np.sqrt(np.sum(within**2) / (len(within) - len(points))))
    between = np.sum(found.fun**2) / max(1, len(points) - 2)
    of_runs = noise**2 / np.mean([len(point.images) for point in points])
    covariance = np.linalg.inv(found.jac.T @ found.jac) * max(between, of_runs)
    return Convergence(found.x, covariance, noise, tuple(map(int, batches)), len(within))


def batches_of(law: Convergence, num: int, most_a_device: float) -> list[int]:
    """Return the global batches to try on a number of devices: whole images a device, not far beyond the points."""
    low, high = law.batches[0] / BEYOND, law.batches[-1] * BEYOND
    octaves = int(np.log2(high / low) * BATCHES_OCTAVE)
    wanted = low * 2 ** (np.arange(octaves + 1) / BATCHES_OCTAVE)
    whole = np.unique(np.maximum(1, np.round(wanted / num)) * num).astype(int)
    return [int(batch) for batch in whole if low <= batch <= high and batch / num <= most_a_device]


@dataclass(frozen=True)
class Choice:
    """A number of devices at a global batch: images/s, images and seconds to the target."""

    num: int
    batch: int
    images_per_sec: Interval
    images: Interval
    seconds: Interval


def choice(num: int, batch: int, speed: Interval, images: Interval, extra_sec: Callable[[float], float]) -> Choice:
    """Return the time to the target; its interval joins both, which are independent.

    Args:
        extra_sec: images -> seconds that are not training: evaluations that count.
    """
    value = images.value / speed.value
    reach = np.hypot(np.log(speed.high / speed.value), np.log(images.high / images.value))
    more = extra_sec(images.value)
    return Choice(
        num, batch, speed, images, Interval(value + more, value * np.exp(-reach) + more, value * np.exp(reach) + more)
    )


def best(choices: Sequence[Choice]) -> Choice | None:
    """Return the choice that is there first; None: there is none."""
    return min(choices, key=lambda each: each.seconds.value, default=None)
