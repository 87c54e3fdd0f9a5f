"""Images to the target over the global batch, and the batch at which a number of devices gets there first.

    images = E (1 + B / C)

E is what tiny batches need, C the critical batch, at which twice as many are needed: McCandlish et al. 2018, "An Empirical
Model of Large-Batch Training", arXiv:1812.06162, with batches times steps for the examples. It is fitted to the logarithms of
the images of a benchmark's reference points. Their learning rates and warm-ups differ: the reference chose them for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import least_squares

from preflight.scaling_devices import Predictor
from preflight.scaling_fit import COVERED, Array, Interval
from preflight.scaling_law import TITLES, Row
from zoo.mlperf_flux import FLUX
from zoo.mlperf_rules import Benchmark

OUTSIDE = 2.0  # batches are tried from the smallest point's over this to the largest's times this
BATCHES_OCTAVE = 8
MOST_A_DEVICE = 64


@dataclass(frozen=True)
class Convergence:
    """A fitted law of images to the target. theta: log E, log C. covariance: (2, 2). batches: of the points."""

    theta: Array
    covariance: Array
    batches: tuple[int, ...]

    def _reach(self, variance: Any) -> Any:
        """Return how far an interval goes: runs of one point share its learning rate, so points count, not runs."""
        return stats.t.ppf((1 + COVERED) / 2, max(1, len(self.batches) - 2)) * np.sqrt(variance)

    def images(self, batch: float) -> Interval:
        """Return the mean images to the target at a global batch."""
        e, c = np.exp(self.theta)
        slope = np.array([1.0, -(batch / c) / (1 + batch / c)])
        return Interval.of_log(np.log(e * (1 + batch / c)), self._reach(slope @ self.covariance @ slope))

    def parameters(self) -> tuple[Interval, Interval]:
        """Return E and C."""
        e, c = map(Interval.of_log, self.theta, self._reach(np.diag(self.covariance)))
        return e, c


def convergence(benchmark: Benchmark, ruleset: str | None = None) -> Convergence:
    """Fit a ruleset's reference points, the newest's with None.

    The covariance is that of points: their means scatter more than their runs say.
    """
    points = benchmark.points_of(ruleset)
    batches = np.array([point.global_batch_size for point in points], float)
    logs = [np.log(point.images) for point in points]
    y = np.array([np.mean(of) for of in logs])
    start = np.array([y.min() - 0.1, np.log(batches.max())])
    found = least_squares(lambda theta: theta[0] + np.log1p(batches / np.exp(theta[1])) - y, start)
    within = np.concatenate([of - np.mean(of) for of in logs])
    of_runs = np.sum(within**2) / (len(within) - len(points)) / np.mean([len(of) for of in logs])
    between = np.sum(found.fun**2) / max(1, len(points) - 2)
    covariance = np.linalg.inv(found.jac.T @ found.jac) * max(between, of_runs)
    return Convergence(found.x, covariance, tuple(map(int, batches)))


def batches_of(law: Convergence, num: int) -> list[int]:
    """Return the global batches to try on a number of devices: whole images a device, not far outside the points."""
    low, high = law.batches[0] / OUTSIDE, law.batches[-1] * OUTSIDE
    octaves = int(np.log2(high / low) * BATCHES_OCTAVE)
    wanted = low * 2 ** (np.arange(octaves + 1) / BATCHES_OCTAVE)
    whole = np.unique(np.maximum(1, np.round(wanted / num)) * num).astype(int)
    return [int(batch) for batch in whole if low <= batch <= high and batch / num <= MOST_A_DEVICE]


def seconds_to_target(images: Interval, speed: Interval, extra_sec: float = 0.0) -> Interval:
    """Return the time to the target; its interval joins both, which are independent.

    Args:
        extra_sec: not of training: evaluations that count.
    """
    reach = np.hypot(np.log(speed.high / speed.value), np.log(images.high / images.value))
    value = images.value / speed.value
    return Interval(value + extra_sec, *(float(value * np.exp(sign * reach)) + extra_sec for sign in (-1, 1)))


def target_of(
    title: str,
    benchmark: Benchmark,
    ruleset: str | None,
    predictors: Mapping[int, Predictor],
    published: Sequence[Row],
    price: float | None,
) -> dict[str, Any]:
    """Return time, device-hours and money to the target over the batch, for each number of devices.

    Args:
        published: results that are shown beside these. price: of an hour of a device.
    """
    images, curves = convergence(benchmark, ruleset), []
    for num, predictor in predictors.items():
        tried = [_tried(benchmark, images, predictor, num, batch, price) for batch in batches_of(images, num)]
        if tried:
            curves.append({"num": num, "best": min(tried, key=lambda of: of["minutes"]), "tried": tried})
    e, c = images.parameters()
    return {
        "title": title,
        "target": benchmark.target_said,
        "ruleset": ruleset or benchmark.newest,
        "price": price,
        "images": {**e.named("e"), **c.named("c")},
        "points": [point.global_batch_size for point in benchmark.points_of(ruleset)],
        "curves": curves,
        "published": [_published(row) for row in published if row.minutes],
    }


def _tried(
    benchmark: Benchmark, convergence: Convergence, predictor: Predictor, num: int, batch: int, price: float | None
) -> dict[str, Any]:
    images, speed, extra_sec = convergence.images(batch), predictor.predict(num, batch), 0.0
    if (
        benchmark is FLUX
    ):  # its evaluations are in the time, those of SD may be made afterwards: a forward pass a sample
        extra_sec = images.value / benchmark.every_images * (benchmark.eval_samples / 3 / speed.value)
    seconds = seconds_to_target(images, speed, extra_sec)
    hours = seconds.times(num / 3600)
    return {
        "global_batch_size": batch,
        "images_per_sec": speed.value,
        "images": images.value,
        **seconds.times(1 / 60).named("minutes"),
        **hours.named("device_hours"),
        **({} if price is None else hours.times(price).named("cost")),
    }


def _published(row: Row) -> dict[str, Any]:
    of = {"title": TITLES[row.series], "system": row.system, "num": row.num, "global_batch_size": row.batch}
    return {**of, "minutes": row.minutes, "device_hours": row.num * (row.minutes or 0.0) / 60}
