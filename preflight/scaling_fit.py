"""The law of preflight/scaling_law.py, fitted to the published rows: parameters with their uncertainty, and held-out errors.

Least squares on log images/s (scipy), with each parameter's prior as one more residual; the rates have none. The covariance
is that of the Jacobian; an interval is the delta method with Student's t of the residuals. Rows that were held out then say
how much too narrow that is, and every interval is widened by as much, so that about 90 of 100 held-out rows lie in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import least_squares

from preflight.scaling_law import NAMES, PARAMETERS, Array, Points, Setup, log_speed, points_of
from preflight.scaling_rows import Row, batch_of, setup_of

COVERED = 0.9
FIRST_NOISE = 0.04  # of log images/s, before the residuals have said what it is
STEP = 1e-6
_MEDIANS = np.log([prior.value for prior in PARAMETERS.values()])
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
    freedom: rows less what was fitted. widened: by how much intervals are wider than the fit says.
    """

    series: tuple[str, ...]
    theta: Array
    covariance: Array
    noise: float
    freedom: int
    widened: float = 1.0

    def predict(self, setup: Setup, series: str, num: int, batch: float) -> Interval:
        """Return images/s over all devices of a setup whose device is as fast as a series'."""
        return self.of(self.theta, self.covariance, points_of([(setup, num, batch, self.series.index(series))]))[0]

    def of(self, theta: Array, covariance: Array, points: Points) -> list[Interval]:
        """Return the prediction of each point, for parameters (S + P,) and their covariance."""
        num_rates = len(theta) - len(NAMES)
        middle, slope = log_speed(theta, points, num_rates), jacobian(theta, points, num_rates)
        deviation = np.sqrt(self.noise**2 + np.einsum("ri,ij,rj->r", slope, covariance, slope))
        reach = self.widened * stats.t.ppf((1 + COVERED) / 2, self.freedom) * deviation
        return [
            Interval(*map(float, np.exp([m, m - r, m + r]))) for m, r in zip(middle, np.atleast_1d(reach), strict=True)
        ]

    def parameter(self, name: str) -> Interval:
        """Return a shared parameter with its interval; priors count, so nothing is widened."""
        place = len(self.series) + NAMES.index(name)
        reach = stats.t.ppf((1 + COVERED) / 2, self.freedom) * np.sqrt(self.covariance[place, place])
        middle = self.theta[place]
        return Interval(*map(float, np.exp([middle, middle - reach, middle + reach])))

    def as_record(self) -> dict[str, Any]:
        """Return the law for a record; see `law_of`."""
        return {
            "series": list(self.series),
            "names": list(NAMES),
            "theta": [round(float(value), 8) for value in self.theta],
            "covariance": [[float(f"{value:.6g}") for value in row] for row in self.covariance],
            "noise": float(f"{self.noise:.6g}"),
            "freedom": self.freedom,
            "widened": float(f"{self.widened:.6g}"),
        }


def law_of(record: Mapping[str, Any]) -> Law:
    """Return the law of a record. Raises ValueError: it is of other parameters."""
    if tuple(record["names"]) != NAMES:
        raise ValueError("the record's law has other parameters. Make it anew: python -m preflight.scaling.")
    arrays = (np.array(record["theta"]), np.array(record["covariance"]))
    return Law(tuple(record["series"]), *arrays, record["noise"], record["freedom"], record["widened"])


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

    measured: geometric mean of its rows. error: predicted / measured - 1. z: of its logarithm, in deviations.
    """

    series: str
    num: int
    batch: int
    measured: float
    predicted: Interval
    fitted: float
    z: float
    is_largest: bool
    beyond: float | None = None
    """Error where the largest place of every series was held out at once."""
    systems: tuple[str, ...] = field(default=())

    @property
    def error(self) -> float:
        """Of the prediction without this place."""
        return self.predicted.value / self.measured - 1


def places_of(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Return the places of series with several numbers of devices, ascending in a series."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.num):
        found.setdefault(row.place, []).append(row)
    nums = [series for series, _ in found]
    return {place: of for place, of in found.items() if nums.count(place[0]) > 1}


def held_out(rows: Sequence[Row], whole: Law) -> tuple[Law, list[Held]]:
    """Leave each place out in turn, and all largest ones at once.

    Returns:
        the law with intervals as wide as the places that it had not seen ask for, and the places.
    """
    places = places_of(rows)
    largest = {(name, max(num for series, num in places if series == name)) for name, _ in places}
    small = fit([row for row in rows if row.place not in largest], whole, whole.noise)
    found = []
    for place, of in places.items():
        law = fit([row for row in rows if row.place != place], whole, whole.noise)
        seen = [_log_ratio(of_law, of) for of_law in (law, whole)]
        (middle, predicted), (fitted_error, _) = seen
        points = _points(of, law.series)
        slope = jacobian(law.theta, points, len(law.series)).mean(axis=0)
        deviation = np.sqrt(whole.noise**2 + slope @ law.covariance @ slope)
        beyond = float(np.expm1(_log_ratio(small, of)[0])) if place in largest else None
        found.append(
            Held(
                *place,
                batch=batch_of(of[0]) or 0,
                measured=float(np.exp(_log_speeds(of).mean())),
                predicted=predicted,
                fitted=float(np.expm1(fitted_error)),
                z=float(middle / deviation),
                is_largest=place in largest,
                beyond=beyond,
                systems=tuple(row.system for row in of),
            )
        )
    usual = stats.t.ppf((1 + COVERED) / 2, whole.freedom)
    widened = max(1.0, float(np.quantile([abs(each.z) for each in found], COVERED, method="higher") / usual))
    law = Law(whole.series, whole.theta, whole.covariance, whole.noise, whole.freedom, widened)
    return law, [_widened(each, widened) for each in found]


def _log_ratio(law: Law, of: Sequence[Row]) -> tuple[float, Interval]:
    """Return log predicted / measured of a place, and the prediction of its first row's batch."""
    intervals = law.of(law.theta, law.covariance, _points(of, law.series))
    middle = float(np.mean([np.log(each.value) for each in intervals] - _log_speeds(of)))
    mean = float(np.exp(np.mean([np.log(each.value) for each in intervals])))
    return middle, intervals[0].times(mean / intervals[0].value)


def _widened(held: Held, factor: float) -> Held:
    low, high = (
        held.predicted.value * (end / held.predicted.value) ** factor
        for end in (held.predicted.low, held.predicted.high)
    )
    return Held(**{**vars(held), "predicted": Interval(held.predicted.value, low, high)})


def sensitivity(law: Law, points: Points, num_rates: int) -> dict[str, tuple[float, float]]:
    """Return parameter -> (change of images/s, in %, for 1 % more of it; and for one deviation of its), of one point."""
    slope = jacobian(law.theta, points, num_rates)[0]
    deviation = np.sqrt(np.diag(law.covariance))
    names = ["rate", *NAMES]
    rate = int(points.rate[0])
    at = [rate, *range(num_rates, len(law.theta))]
    return {
        name: (float(slope[place]), float(100 * np.expm1(slope[place] * deviation[place])))
        for name, place in zip(names, at, strict=True)
    }
