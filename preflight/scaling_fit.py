"""The law of preflight/scaling_law.py, fitted to the published rows: parameters with their uncertainty, and held-out errors.

Least squares on log images/s (scipy), with each parameter's prior as one more residual; the rates have none. The
covariance is the sum of two: that of the Jacobian, and that of the fits without one series each (a jackknife), since series
differ by more than their rows say. An interval is the delta method with Student's t of the residuals.

Places are predicted by fits that have not seen them, in two ways: without the place alone, and from the smallest place of
their series alone. What those fits say is too narrow for many domains, where clusters differ most. So a deviation is added
that grows by the same amount with each doubling of the domains: the least with which 90 of 100 lie in their interval, in both
ways, of all places and of those from 256 devices on. The two covariances and the noise are of all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import least_squares

from preflight.scaling_law import (
    NAMES,
    PARAMETERS,
    SHARES,
    Array,
    Points,
    Setup,
    doublings_of,
    log_speed,
    points_of,
    to_theta,
    to_values,
)
from preflight.scaling_rows import Row, batch_of, setup_of

COVERED = 0.9
LARGE = 256
"""Devices from which on places have to be covered by themselves, too."""
FIRST_NOISE = 0.04  # of log images/s, before the residuals have said what it is
STEP = 1e-6
_MEDIANS = to_theta(np.array([prior.value for prior in PARAMETERS.values()]))
_DEVIATIONS = np.log([prior.factor for prior in PARAMETERS.values()])


@dataclass(frozen=True)
class Interval:
    """A prediction, and what 90 of 100 lie between."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """Return it in another unit."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Law:
    """A fitted law.

    theta: (S + P,), logarithms of rates and parameters. covariance: (S + P, S + P). noise: deviation of log images/s.
    freedom: rows less what was fitted. by_doubling: what is added to that deviation with each doubling of the domains.
    """

    series: tuple[str, ...]
    theta: Array
    covariance: Array
    noise: float
    freedom: int
    by_doubling: float = 0.0

    def predict(self, setup: Setup, series: str, num: int, batch: float) -> Interval:
        """Return images/s over all devices of a setup whose device is as fast as a series'."""
        return self.of(self.theta, self.covariance, points_of([(setup, num, batch, self.series.index(series))]))[0]

    def of(self, theta: Array, covariance: Array, points: Points) -> list[Interval]:
        """Return the prediction of each point, for parameters (S + P,) and their covariance."""
        num_rates = len(theta) - len(NAMES)
        middle, slope = log_speed(theta, points, num_rates), jacobian(theta, points, num_rates)
        grown = self.by_doubling * doublings_of(points)
        deviation = np.sqrt(self.noise**2 + np.einsum("ri,ij,rj->r", slope, covariance, slope) + grown**2)
        reach = self.reach(deviation)
        return [
            Interval(*map(float, np.exp([m, m - r, m + r]))) for m, r in zip(middle, np.atleast_1d(reach), strict=True)
        ]

    def reach(self, deviation: Array) -> Array:
        """Return how far an interval goes to each side."""
        return stats.t.ppf((1 + COVERED) / 2, self.freedom) * deviation

    def parameter(self, name: str) -> Interval:
        """Return a shared parameter with its interval; priors count."""
        place = len(self.series) + NAMES.index(name)
        reach = self.reach(np.sqrt(self.covariance[place, place]))
        shared = self.theta[len(self.series) :] + np.array([[0.0], [-reach], [reach]]) * (np.array(NAMES) == name)
        return Interval(*map(float, to_values(shared)[:, NAMES.index(name)]))

    def as_record(self) -> dict[str, Any]:
        """Return the law for a record; see `law_of`."""
        return {
            "series": list(self.series),
            "names": list(NAMES),
            "theta": [round(float(value), 8) for value in self.theta],
            "covariance": [[float(f"{value:.6g}") for value in row] for row in self.covariance],
            "noise": float(f"{self.noise:.6g}"),
            "freedom": self.freedom,
            "by_doubling": float(f"{self.by_doubling:.6g}"),
        }


def law_of(record: Mapping[str, Any]) -> Law:
    """Return the law of a record. Raises ValueError: it is of other parameters."""
    if tuple(record["names"]) != NAMES:
        raise ValueError("the record's law has other parameters. Make it anew: python -m preflight.scaling.")
    arrays = (np.array(record["theta"]), np.array(record["covariance"]))
    return Law(tuple(record["series"]), *arrays, record["noise"], record["freedom"], record["by_doubling"])


def jacobian(theta: Array, points: Points, num_rates: int) -> Array:
    """Return d log images/s / d theta, (R, S + P), by central differences."""
    moved = np.eye(len(theta)) * STEP
    above, below = (log_speed(theta + sign * moved, points, num_rates) for sign in (1.0, -1.0))
    return (above - below).T / (2 * STEP)


def _points(rows: Sequence[Row], series: Sequence[str]) -> Points:
    return points_of([(setup_of(row), row.num, batch_of(row) or 0, series.index(row.series)) for row in rows])


def _log_speeds(rows: Sequence[Row]) -> Array:
    return np.log([row.images_per_sec or np.nan for row in rows])


def fit(rows: Sequence[Row], start: Law | None = None, noise: float | None = None) -> Law:
    """Fit the law to rows; twice, the second time with the noise that the first one found.

    Args:
        start: a fit of nearly the same rows, to begin at.
        noise: where it is known; then the law is fitted once.
    """
    series = tuple(dict.fromkeys(row.series for row in rows))
    points, y, num = _points(rows, series), _log_speeds(rows), len(series)
    if start is None:
        rates = [max(y[k] - np.log(row.num) for k, row in enumerate(rows) if row.series == name) for name in series]
        theta = np.concatenate([rates, _MEDIANS])
    else:
        kept = [start.theta[start.series.index(name)] for name in series]
        theta = np.concatenate([kept, start.theta[len(start.series) :]])
    freedom = len(rows) - len(theta)
    deviation = noise or FIRST_NOISE
    for _ in range(1 if noise else 2):
        of_noise = deviation
        found = least_squares(
            _residuals(points, y, num, of_noise), theta, _slopes(points, num, of_noise), x_scale="jac"
        )
        theta = found.x
        deviation = float(np.sqrt(np.sum((log_speed(theta, points, num) - y) ** 2) / freedom))
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return Law(series, theta, covariance, deviation, freedom)


def _residuals(points: Points, y: Array, num: int, noise: float) -> Callable[[Array], Array]:
    return lambda theta: np.concatenate(
        [(log_speed(theta, points, num) - y) / noise, (theta[num:] - _MEDIANS) / _DEVIATIONS]
    )


def _slopes(points: Points, num: int, noise: float) -> Callable[[Array], Array]:
    of_priors = np.hstack([np.zeros((len(NAMES), num)), np.diag(1 / _DEVIATIONS)])
    return lambda theta: np.vstack([jacobian(theta, points, num) / noise, of_priors])


# --- what was held out ---


@dataclass(frozen=True)
class Held:
    """A place, predicted by a law that has not seen it.

    measured: geometric mean of its rows. error: predicted / measured - 1. alone: the prediction by a law that has seen the
    smallest place of this series alone, and all of the others; None: it is the smallest. doublings: log2 of its domains.
    """

    series: str
    num: int
    batch: int
    measured: float
    predicted: Interval
    fitted: float
    doublings: float
    alone: Interval | None = None
    systems: tuple[str, ...] = field(default=())

    @property
    def error(self) -> float:
        """Of the prediction without this place."""
        return self.predicted.value / self.measured - 1

    @property
    def alone_error(self) -> float | None:
        """Of the prediction from the smallest place of the series."""
        return None if self.alone is None else self.alone.value / self.measured - 1


def places_of(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Return the places of series with several numbers of devices, ascending in a series."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.num):
        found.setdefault(row.place, []).append(row)
    nums = [series for series, _ in found]
    return {place: of for place, of in found.items() if nums.count(place[0]) > 1}


def jackknife(rows: Sequence[Row], whole: Law) -> Array:
    """Return the covariance (P, P) of the shared parameters over fits without one series each."""
    shared = []
    for name in whole.series:
        law = fit([row for row in rows if row.series != name], whole, whole.noise)
        shared.append(law.theta[len(law.series) :])
    off = np.array(shared) - np.mean(shared, axis=0)
    return (len(shared) - 1) / len(shared) * off.T @ off


def with_shared(law: Law, more: Array) -> Law:
    """Return a law whose shared parameters vary by more (P, P); each rate goes along as the rows ask."""
    num = len(law.series)
    along = law.covariance[:num, num:] @ np.linalg.inv(law.covariance[num:, num:])
    to = np.vstack([along, np.eye(len(NAMES))])
    return dataclasses.replace(law, covariance=law.covariance + to @ more @ to.T)


def held_out(rows: Sequence[Row], whole: Law) -> tuple[Law, list[Held]]:
    """Leave each place out in turn; and of each series all but the smallest.

    Returns:
        the law with intervals as wide as the series differ, and the places.
    """
    places, more = places_of(rows), jackknife(rows, whole)
    smallest = {name: min(num for series, num in places if series == name) for name, _ in places}
    from_smallest = {
        name: with_shared(fit([row for row in rows if row.series != name or row.num == num], whole, whole.noise), more)
        for name, num in smallest.items()
    }
    found = []
    for place, of in places.items():
        law = with_shared(fit([row for row in rows if row.place != place], whole, whole.noise), more)
        (name, num), measured = place, float(np.exp(_log_speeds(of).mean()))
        found.append(
            Held(
                *place,
                batch=batch_of(of[0]) or 0,
                measured=measured,
                predicted=_of_place(law, of),
                fitted=_of_place(whole, of).value / measured - 1,
                doublings=float(doublings_of(_points(of[:1], whole.series))[0]),
                alone=None if num == smallest[name] else _of_place(from_smallest[name], of),
                systems=tuple(row.system for row in of),
            )
        )
    by_doubling = _by_doubling(found, whole)
    return (
        dataclasses.replace(with_shared(whole, more), by_doubling=by_doubling),
        [_grown(each, by_doubling, whole) for each in found],
    )


def _by_doubling(held: Sequence[Held], law: Law) -> float:
    """Return the least deviation for each doubling of the domains with which intervals hold what they are said to."""
    of_groups = []
    for least in (0, LARGE):
        large = [each for each in held if each.num >= least]
        for pairs in (
            [(each.predicted, each) for each in large],
            [(each.alone, each) for each in large if each.alone is not None],
        ):
            needed = [_needed(told, each, law) for told, each in pairs]
            of_groups.append(float(np.quantile(needed, COVERED, method="higher")))
    return max(of_groups)


def _needed(told: Interval, held: Held, law: Law) -> float:
    """Return how much for each doubling one place needs; in one domain nothing is added, so it needs nothing."""
    own, wanted = (np.log(value / told.value) / law.reach(1.0) for value in (told.high, held.measured))
    return float(np.sqrt(max(0.0, wanted**2 - own**2)) / held.doublings) if held.doublings else 0.0


def _of_place(law: Law, of: Sequence[Row]) -> Interval:
    """Return the prediction of a place: the geometric mean over its rows, with the interval of the first."""
    intervals = law.of(law.theta, law.covariance, _points(of, law.series))
    mean = float(np.exp(np.mean([np.log(each.value) for each in intervals])))
    return intervals[0].times(mean / intervals[0].value)


def _grown(held: Held, by_doubling: float, law: Law) -> Held:
    """Return a place with the intervals of a law whose deviation grows."""

    def wide(of: Interval) -> Interval:
        own = np.log(of.high / of.value) / law.reach(1.0)
        factor = float(np.exp(law.reach(np.hypot(own, by_doubling * held.doublings))))
        return Interval(of.value, of.value / factor, of.value * factor)

    alone = None if held.alone is None else wide(held.alone)
    return dataclasses.replace(held, predicted=wide(held.predicted), alone=alone)


def sensitivity(law: Law, points: Points, num_rates: int) -> dict[str, tuple[float, float]]:
    """Return parameter -> (change of images/s, in %, for 1 % more of it; and for one deviation of its), of one point."""
    slope = jacobian(law.theta, points, num_rates)[0]
    deviation = np.sqrt(np.diag(law.covariance))
    names = ["rate", *NAMES]
    rate = int(points.rate[0])
    at = [rate, *range(num_rates, len(law.theta))]
    values = dict(zip(NAMES, to_values(law.theta[num_rates:]), strict=True))
    return {
        name: (
            float(slope[place] / (1 - values[name] if name in SHARES else 1)),
            float(100 * np.expm1(slope[place] * deviation[place])),
        )
        for name, place in zip(names, at, strict=True)
    }
