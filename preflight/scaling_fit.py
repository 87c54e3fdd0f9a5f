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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import least_squares

from preflight.scaling_law import (
    NAMES,
    PARAMETERS,
    SETUPS,
    Array,
    Points,
    Row,
    doublings_of,
    log_speed,
    points_of,
    to_theta,
    to_values,
)

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

    @classmethod
    def of_log(cls, middle: float, reach: float) -> Interval:
        """Return the interval of a logarithm and what it reaches to each side."""
        return cls(*map(float, np.exp([middle, middle - reach, middle + reach])))

    def times(self, factor: float) -> Interval:
        """Return it in another unit."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def named(self, name: str) -> dict[str, float]:
        """Return it for a record: NAME, NAME_low, NAME_high."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


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

    def predict_points(self, points: Points) -> list[Interval]:
        """Return images/s of each point."""
        slope, grown = jacobian(self.theta, points), self.by_doubling * doublings_of(points)
        deviation = np.sqrt(self.noise**2 + np.einsum("ri,ij,rj->r", slope, self.covariance, slope) + grown**2)
        return [*map(Interval.of_log, log_speed(self.theta, points), self.reach(deviation))]

    def reach(self, deviation: Any) -> Any:
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


def jacobian(theta: Array, points: Points) -> Array:
    """Return d log images/s / d theta, (R, S + P), by central differences."""
    moved = np.eye(len(theta)) * STEP
    above, below = (log_speed(theta + sign * moved, points) for sign in (1.0, -1.0))
    return (above - below).T / (2 * STEP)


def row_points(rows: Sequence[Row], series: Sequence[str]) -> Points:
    """Return the points of rows, by the places of their series."""
    setups = (dataclasses.replace(SETUPS[row.series], tensor=row.tensor) for row in rows)
    of = zip(setups, rows, strict=True)
    return points_of([(setup, row.num, row.batch or 0, series.index(row.series)) for setup, row in of])


def _log_speeds(rows: Sequence[Row]) -> Array:
    return np.log([row.images_per_sec or np.nan for row in rows])


def fit(rows: Sequence[Row], start: Law | None = None) -> Law:
    """Fit the law to rows; twice, the second time with the noise that the first one found.

    Args:
        start: a fit of nearly the same rows, to begin at, with its noise; then the law is fitted once.
    """
    series = tuple(dict.fromkeys(row.series for row in rows))
    points, y, num = row_points(rows, series), _log_speeds(rows), len(series)
    if start is None:
        rates = [max(y[k] - np.log(row.num) for k, row in enumerate(rows) if row.series == name) for name in series]
        theta = np.concatenate([rates, _MEDIANS])
    else:
        rates = [start.theta[start.series.index(name)] for name in series]
        theta = np.concatenate([rates, start.theta[len(start.series) :]])
    noise, freedom = start.noise if start else FIRST_NOISE, len(rows) - len(theta)
    of_priors = np.hstack([np.zeros((len(NAMES), num)), np.diag(1 / _DEVIATIONS)])

    def residuals(theta: Array, noise: float) -> Array:
        return np.concatenate([(log_speed(theta, points) - y) / noise, (theta[num:] - _MEDIANS) / _DEVIATIONS])

    def slopes(theta: Array, noise: float) -> Array:
        return np.vstack([jacobian(theta, points) / noise, of_priors])

    for _ in range(1 if start else 2):
        found = least_squares(residuals, theta, slopes, x_scale="jac", args=(noise,))
        theta = found.x
        noise = float(np.sqrt(np.sum((log_speed(theta, points) - y) ** 2) / freedom))
    return Law(series, theta, np.linalg.inv(found.jac.T @ found.jac), noise, freedom)


# --- what was held out ---


@dataclass(frozen=True)
class Held:
    """A place, predicted by a law that has not seen it.

    measured: geometric mean of the rows of its systems. fitted: error of the law that has seen it. doublings: log2 of its
    domains. alone: the prediction by a law that has seen the smallest place of this series alone, and all of the others;
    None: it is the smallest.
    """

    series: str
    num: int
    batch: int
    systems: int
    measured: float
    fitted: float
    doublings: float
    predicted: Interval
    alone: Interval | None

    def error(self, of: Interval) -> float:
        """Return how far a prediction is from what was measured, as a share of it."""
        return of.value / self.measured - 1


def places_of(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Return the places of series with several numbers of devices, ascending in a series."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.num):
        found.setdefault(row.place, []).append(row)
    nums = [series for series, _ in found]
    return {place: of for place, of in found.items() if nums.count(place[0]) > 1}


def jackknife(rows: Sequence[Row], whole: Law) -> Array:
    """Return the covariance (P, P) of the shared parameters over fits without one series each."""
    laws = [fit([row for row in rows if row.series != name], whole) for name in whole.series]
    shared = np.array([law.theta[len(law.series) :] for law in laws])
    return np.cov(shared.T, bias=True) * (len(shared) - 1)


def with_shared(law: Law, more: Array) -> Law:
    """Return a law whose shared parameters vary by more (P, P); each rate goes along as the rows ask."""
    num = len(law.series)
    along = law.covariance[:num, num:] @ np.linalg.inv(law.covariance[num:, num:])
    to = np.vstack([along, np.eye(len(NAMES))])
    return dataclasses.replace(law, covariance=law.covariance + to @ more @ to.T)


def held_out(rows: Sequence[Row], whole: Law) -> tuple[Law, list[Held]]:
    """Leave each place out once; and of each series all but the smallest.

    Returns:
        the law with intervals as wide as the series differ, and the places.
    """
    places, more = places_of(rows), jackknife(rows, whole)
    smallest: dict[str, int] = {}
    for name, num in places:
        smallest.setdefault(name, num)

    def fit_without(is_left_out: Any) -> Law:
        return with_shared(fit([row for row in rows if not is_left_out(row)], whole), more)

    from_smallest = {
        name: fit_without(lambda row, name=name, num=num: row.series == name and row.num != num)
        for name, num in smallest.items()
    }
    held = []
    for (name, num), of in places.items():
        law, measured = fit_without(lambda row, of=of: row.place == of[0].place), float(np.exp(_log_speeds(of).mean()))
        fitted = _predict_place(whole, of).value / measured - 1
        doublings = float(doublings_of(row_points(of[:1], whole.series))[0])
        alone = None if num == smallest[name] else _predict_place(from_smallest[name], of)
        predicted = _predict_place(law, of)
        held.append(Held(name, num, of[0].batch or 0, len(of), measured, fitted, doublings, predicted, alone))
    by_doubling = _by_doubling(held, whole)
    law = dataclasses.replace(with_shared(whole, more), by_doubling=by_doubling)
    return law, [_widened(each, by_doubling, whole) for each in held]


def _by_doubling(held: Sequence[Held], law: Law) -> float:
    """Return the least deviation for each doubling of the domains with which intervals hold what they are said to."""

    def needed(of: Interval, place: Held) -> float:
        """Return how much one place needs; in one domain nothing is added, so it needs nothing."""
        own, wanted = (np.log(value / of.value) / law.reach(1.0) for value in (of.high, place.measured))
        return float(np.sqrt(max(0.0, wanted**2 - own**2)) / place.doublings) if place.doublings else 0.0

    of_groups = []
    for least in (0, LARGE):
        large = [each for each in held if each.num >= least]
        for way in ([needed(of.predicted, of) for of in large], [needed(of.alone, of) for of in large if of.alone]):
            of_groups.append(float(np.quantile(way, COVERED, method="higher")))
    return max(of_groups)


def _predict_place(law: Law, of: Sequence[Row]) -> Interval:
    """Return the prediction of a place: the geometric mean over its rows, with the interval of the first."""
    intervals = law.predict_points(row_points(of, law.series))
    mean = float(np.exp(np.mean([np.log(each.value) for each in intervals])))
    return intervals[0].times(mean / intervals[0].value)


def _widened(held: Held, by_doubling: float, law: Law) -> Held:
    """Return a place with the intervals of a law whose deviation grows."""

    def wide(of: Interval) -> Interval:
        own = np.log(of.high / of.value) / law.reach(1.0)
        factor = float(np.exp(law.reach(np.hypot(own, by_doubling * held.doublings))))
        return Interval(of.value, of.value / factor, of.value * factor)

    return dataclasses.replace(held, predicted=wide(held.predicted), alone=held.alone and wide(held.alone))
