"""The time of a step on N devices: what is computed, what all devices exchange, and how much of that is hidden.

    step = (b + p b0) / r * (1 + s * sqrt(2 ln N)) + max(0, within + across - hidden) + 2 h log2(n)

    N devices in n domains of g, whose inner link is fast; b images a device and step, r images/s of a device
    b0         what a pass takes at any size, in images: kernels too small for the device, the optimizer's step; p passes
    s          the slowest of N devices: sqrt(2 ln N) is what the maximum of N normal variables grows by
    within     a ring all-reduce in a domain: 2 G (g - 1) / g bytes over the inner link, and 2 log2(g) hops for each bucket
    across     the same of each device's share over the outer link: 2 (G / g) (n - 1) / n
    hidden     a share of the last pass's backward pass, which is 2/3 of its time: DDP exchanges in that one alone
    h          a hop between domains, for all buckets together; a tree has log2(n) of them, up and down

Where t devices share the matrices of each layer, each has b images for a t-th of the work: of their batch the t-th part is
counted. Each has a t-th of G, and exchanges it with the devices that have the same part.

G is the gradient in bytes. Sharded weights are gathered in passes of G bytes each, so `volume` says how many such passes a
step makes: an all-reduce 2. The maximum is rounded off over `ROUNDED_SEC`, so that a fit has a derivative everywhere.
Rings: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms; DDP's buckets and overlap: Li et al. 2020,
arXiv:2006.15704.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import least_squares

Array = np.ndarray

ROUNDED_SEC = 0.003
BACKWARD_FRAC = 2 / 3  # of a pass's time: twice the matrix products of the forward pass
INNER_HOP_SEC = 4e-6  # NCCL's own table (src/graph/tuning.cc): a tree's hop over NVLink, protocol Simple
BUCKET_GB = 0.025  # of DDP: 25 MB of gradients are exchanged together
INNER_SHARE = 0.8  # of an inner link's nominal bandwidth, what NCCL's tests reach within a node
REFERENCE_TFLOP = 2.41  # an image and step of SD2 at 512 px from moments: what b0 is counted in
NODE_LINKS = {"nvlink3": 300.0, "nvlink4": 450.0, "nvlink5": 900.0, "pcie4": 32.0, "pcie5": 64.0}
"""Inner link -> GB/s of a device and direction: NVIDIA's data sheets of A100, H100 and B200; PCIe x16."""
CLUSTER_LINKS = {"infiniband_hdr": 25.0, "infiniband_ndr": 50.0}
CLUSTER_LINKS |= {f"ethernet_{gbit}": gbit / 64 for gbit in (3200, 1600, 400, 100)}
"""Outer link -> GB/s of a device and direction. InfiniBand: 200 and 400 Gbit/s a device; Ethernet: Gbit/s of a node of 8."""


@dataclass(frozen=True)
class Prior:
    """What is taken for a parameter before any row is seen: its median, and by what factor one deviation changes it.

    Of a share the factor is that of its odds, v / (1 - v): no share is above 1.
    """

    value: float
    factor: float
    text: str


PARAMETERS = {
    "fixed_graphs": Prior(2.0, 2.0, "b0 of a pass in a step that is one CUDA graph, images"),
    "fixed_plain": Prior(4.0, 2.0, "b0 of a pass that is launched kernel by kernel, images"),
    "fixed_tpu": Prior(4.0, 2.0, "b0 of a TPU, images"),
    "fixed_flux": Prior(20.0, 4.0, "b0 of a pass of FLUX.1, images of SD2"),
    "link_share": Prior(0.6, 2.0, "share of an outer link's nominal bandwidth"),
    "mosaicml_online": Prior(3.0, 4.0, "outer link of MosaicML's first benchmark, GB/s a device"),
    "mosaicml_latents": Prior(10.0, 4.0, "outer link of MosaicML's second benchmark, GB/s a device"),
    "hop_sec": Prior(1e-3, 5.0, "h: a hop between domains, all buckets, s"),
    "hidden": Prior(0.8, 2.5, "share of the last backward pass that hides the exchange"),
    "jitter": Prior(0.005, 3.0, "s: deviation of a device's step, of the step"),
}
"""What is fitted, next to the rate of each series. The fit varies the logarithm of each, and the log odds of a share."""
NAMES = tuple(PARAMETERS)
SHARES = ("link_share", "hidden")
_IS_SHARE = np.array([name in SHARES for name in NAMES])


@dataclass(frozen=True)
class Setup:
    """How a series or a run exchanges gradients.

    fixed: which b0. gradient_gb: G, 1e9 bytes. inner, outer: GB/s of a device; outer may name a parameter. domain: devices
    within the inner link. microbatch: images of a pass at most; None: the device batch. volume: see the head of this file.
    tflop: an image and step. tensor: devices that share each layer.
    """

    fixed: str
    gradient_gb: float
    inner: float
    outer: float | str
    domain: int
    microbatch: int | None = None
    volume: float = 2.0
    tflop: float = REFERENCE_TFLOP
    tensor: int = 1


class Points(NamedTuple):
    """Points to predict, as arrays (R,): of a setup each its devices, global batch and the place of its rate."""

    rate: Array
    outer_of: Array
    fixed_of: Array
    num: Array
    batch: Array
    domain: Array
    inner_sec: Array
    across_gb: Array
    outer: Array
    scale: Array
    microbatch: Array
    passes: Array


def to_theta(values: Array) -> Array:
    """Return what the fit moves of parameters (..., P)."""
    with np.errstate(divide="ignore", invalid="ignore"):  # of what is no share
        return np.log(np.where(_IS_SHARE, values / (1 - np.where(_IS_SHARE, values, 0.0)), values))


def to_values(shared: Array) -> Array:
    """Return the parameters (..., P) of what the fit moves."""
    values = np.exp(shared)
    return np.where(_IS_SHARE, values / (1 + values), values)


def fixed_of(family: str, has_graphs: bool) -> str:
    """Return which b0 a run has."""
    return "flux" if family == "flux" else "graphs" if has_graphs else "plain"


def domain_of(setup: Setup, num: int) -> int:
    """Return the devices of a domain: a whole number of domains of one size; of 512 in racks of 72 these are 64."""
    size = min(setup.domain, num)
    while num % size:
        size -= 1
    return size


def points_of(measured: Sequence[tuple[Setup, int, float, int]]) -> Points:
    """Return (setup, devices, global batch, place of its rate) as arrays."""
    rows = []
    for setup, num, batch, rate in measured:
        domain, gb = domain_of(setup, num), setup.volume * setup.gradient_gb / setup.tensor
        inner = domain / setup.tensor  # devices of a domain that exchange one part with each other
        hops = np.ceil(setup.gradient_gb / setup.tensor / BUCKET_GB) * 2 * np.log2(inner) * INNER_HOP_SEC
        inner_sec = gb * (1 - 1 / inner) / (INNER_SHARE * setup.inner) + hops
        across_gb = gb / inner * (1 - domain / num)
        outer, outer_of = (1.0, setup.outer) if isinstance(setup.outer, str) else (setup.outer, "link_share")
        microbatch = min(setup.microbatch or np.inf, batch / num)
        passes = np.ceil(batch / num / microbatch - 1e-9)
        places = rate, NAMES.index(outer_of), NAMES.index(f"fixed_{setup.fixed}")
        of_setup = outer, REFERENCE_TFLOP / setup.tflop, microbatch, passes
        rows.append((*places, num, batch, domain, inner_sec, across_gb, *of_setup))
    columns = np.array(rows, float).T
    return Points(*columns[:3].astype(int), *columns[3:])


def doublings_of(points: Points) -> Array:  # -> (R,)
    """Return log2 of the domains of each point: 0 where one joins all devices."""
    return np.log2(points.num / points.domain)


def log_speed(theta: Array, points: Points) -> Array:
    """Return log images/s over all devices.

    Args:
        theta: (..., S + P): logarithms of the S rates, images/s of a device, then `to_theta` of PARAMETERS.

    Returns:
        (..., R).
    """
    rate, shared = np.exp(theta[..., points.rate]), to_values(theta[..., -len(NAMES) :])

    def of(name: str) -> Array:
        return shared[..., NAMES.index(name), None]

    fixed = shared[..., points.fixed_of] * points.scale
    jitter = 1 + of("jitter") * np.sqrt(2 * np.log(points.num))
    computed = (points.batch / points.num + points.passes * fixed) / rate * jitter
    exchanged = points.inner_sec + points.across_gb / (points.outer * shared[..., points.outer_of])
    seen = exchanged - of("hidden") * BACKWARD_FRAC * (points.microbatch + fixed) / rate
    seen = (seen + np.sqrt(seen**2 + ROUNDED_SEC**2)) / 2 * (points.num > 1)
    return np.log(points.batch) - np.log(computed + seen + 2 * of("hop_sec") * doublings_of(points))


# --- the published rows, reports/scaling_published.csv: one source a row ---

# Steady images/s where the log's blocks have it (is_steady = 1), else those of the whole run, start and checkpoints included;
# where both are known they differ by 3 % at most. How a series exchanges gradients is in reports/scaling_series.csv, as far
# as its source says: NVIDIA's in fp16, autocast's in fp32, FLUX.1's in bf16. SHARD_GRAD_OP reduces and scatters in float32,
# and gathers the weights once in half of that. The links of a TPU v5p are ICI, 4,800 Gbit/s (Google's documentation), and a
# pod is one domain. NeMo's row of 4 nodes has 32 images a device, which are assumed of its others. A series without these
# columns is not fitted.
REPORTS = Path(__file__).resolve().parent.parent / "reports"
PUBLISHED = REPORTS / "scaling_published.csv"


@dataclass(frozen=True)
class PublishedPoint:
    """One published figure. batch: as published, or images a device that are assumed of the series, times the devices."""

    series: str
    system: str
    num: int
    batch: int | None
    images_per_sec: float | None
    minutes: float | None
    tensor: int
    note: str

    @property
    def place(self) -> tuple[str, int]:
        """Series and devices: rows of one place are left out together."""
        return self.series, self.num


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _setup(row: dict[str, str]) -> Setup:
    outer = row["outer"] if row["outer"][0].isalpha() else float(row["outer"])
    numbers = float(row["gradient_gb"]), float(row["inner_gb_per_sec"]), outer, int(row["domain"])
    return Setup(row["fixed"], *numbers, int(row["microbatch"] or 0) or None, float(row["volume"]), float(row["tflop"]))


_SERIES = {of["series"]: of for of in _read(REPORTS / "scaling_series.csv")}
TITLES = {name: of["title"] for name, of in _SERIES.items()}
SETUPS = {name: _setup(of) for name, of in _SERIES.items() if of["fixed"]}


def read_rows() -> list[PublishedPoint]:
    """Return all published rows, in the file's order."""

    def read(of: dict[str, str]) -> PublishedPoint:
        num, assumed = int(of["num_devices"]), _SERIES.get(of["series"], {}).get("assumed_device_batch")
        return PublishedPoint(
            of["series"],
            of["system"],
            num,
            int(of["global_batch_size"] or num * int(assumed or 0)) or None,
            float(of["images_per_sec"] or 0) or None,
            float(of["minutes_to_target"] or 0) or None,
            int(of["tensor_parallel"] or 1),
            of["note"],
        )

    return [read(of) for of in _read(PUBLISHED)]


def usable_rows(rows: Sequence[PublishedPoint]) -> list[PublishedPoint]:
    """Return the rows that say something of scaling: of a series with a setup, measured once, the batch known or assumed."""
    usable = [row for row in rows if row.series in SETUPS and row.images_per_sec and row.batch]
    return [row for row in usable if "not counted twice" not in row.note]


# --- the law, fitted ---
#
# Least squares on log images/s (scipy), with each parameter's prior as one more residual; the rates have none. The
# covariance is the sum of two: that of the Jacobian, and that of the fits without one series each (a jackknife), since
# series differ by more than their rows say. An interval is the delta method with Student's t of the residuals.
#
# Places are predicted by fits that have not seen them, in two ways: without the place alone, and from the smallest
# place of their series alone. What those fits say is too narrow for many domains, where clusters differ most. So a
# deviation is added that grows by the same amount with each doubling of the domains: the least with which 90 of 100 lie
# in their interval, in both ways, of all places and of those from 256 devices on. The two covariances and the noise are
# of all rows.

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
    def of_log(cls, middle: float, radius: float) -> Interval:
        """Return the interval of a logarithm and what it reaches to each side."""
        return cls(*map(float, np.exp([middle, middle - radius, middle + radius])))

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
        return [*map(Interval.of_log, log_speed(self.theta, points), self.log_radius(deviation))]

    def log_radius(self, deviation: Any) -> Any:
        """Return how far an interval goes to each side."""
        return stats.t.ppf((1 + COVERED) / 2, self.freedom) * deviation

    def parameter(self, name: str) -> Interval:
        """Return a shared parameter with its interval; priors count."""
        index = len(self.series) + NAMES.index(name)
        log_width = self.log_radius(np.sqrt(self.covariance[index, index]))
        shared = self.theta[len(self.series) :] + np.array([[0.0], [-log_width], [log_width]]) * (
            np.array(NAMES) == name
        )
        return Interval(*map(float, to_values(shared)[:, NAMES.index(name)]))

    def as_record(self) -> dict[str, Any]:
        """Return the law for a record; see `law_from_record`."""
        return {
            "series": list(self.series),
            "names": list(NAMES),
            "theta": [round(float(value), 8) for value in self.theta],
            "covariance": [[float(f"{value:.6g}") for value in row] for row in self.covariance],
            "noise": float(f"{self.noise:.6g}"),
            "freedom": self.freedom,
            "by_doubling": float(f"{self.by_doubling:.6g}"),
        }


def law_from_record(record: Mapping[str, Any]) -> Law:
    """Return the law of a record. Raises ValueError: it is of other parameters."""
    if tuple(record["names"]) != NAMES:
        raise ValueError("the record's law has other parameters. Make it again: python -m scaling.")
    arrays = (np.array(record["theta"]), np.array(record["covariance"]))
    return Law(tuple(record["series"]), *arrays, record["noise"], record["freedom"], record["by_doubling"])


def jacobian(theta: Array, points: Points) -> Array:
    """Return d log images/s / d theta, (R, S + P), by central differences."""
    moved = np.eye(len(theta)) * STEP
    above, below = (log_speed(theta + sign * moved, points) for sign in (1.0, -1.0))
    return (above - below).T / (2 * STEP)


def row_points(rows: Sequence[PublishedPoint], series: Sequence[str]) -> Points:
    """Return the points of rows, by the places of their series."""
    setups = (dataclasses.replace(SETUPS[row.series], tensor=row.tensor) for row in rows)
    pairs = zip(setups, rows, strict=True)
    return points_of([(setup, row.num, row.batch or 0, series.index(row.series)) for setup, row in pairs])


def _log_speeds(rows: Sequence[PublishedPoint]) -> Array:
    return np.log([row.images_per_sec or np.nan for row in rows])


def fit(rows: Sequence[PublishedPoint], start: Law | None = None) -> Law:
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
        solution = least_squares(residuals, theta, slopes, x_scale="jac", args=(noise,))
        theta = solution.x
        noise = float(np.sqrt(np.sum((log_speed(theta, points) - y) ** 2) / freedom))
    return Law(series, theta, np.linalg.inv(solution.jac.T @ solution.jac), noise, freedom)


# --- what was held out ---


@dataclass(frozen=True)
class HeldOutPlace:
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


def places_of(rows: Sequence[PublishedPoint]) -> dict[tuple[str, int], list[PublishedPoint]]:
    """Return the places of series with several numbers of devices, ascending in a series."""
    rows_by_place: dict[tuple[str, int], list[PublishedPoint]] = {}
    for row in sorted(rows, key=lambda row: row.num):
        rows_by_place.setdefault(row.place, []).append(row)
    nums = [series for series, _ in rows_by_place]
    return {place: place_rows for place, place_rows in rows_by_place.items() if nums.count(place[0]) > 1}


def jackknife(rows: Sequence[PublishedPoint], whole: Law) -> Array:
    """Return the covariance (P, P) of the shared parameters over fits without one series each."""
    laws = [fit([row for row in rows if row.series != name], whole) for name in whole.series]
    shared = np.array([law.theta[len(law.series) :] for law in laws])
    return np.cov(shared.T, bias=True) * (len(shared) - 1)


def widen_shared(law: Law, more: Array) -> Law:
    """Return a law whose shared parameters vary by more (P, P); each rate goes along as the rows ask."""
    num = len(law.series)
    along = law.covariance[:num, num:] @ np.linalg.inv(law.covariance[num:, num:])
    to = np.vstack([along, np.eye(len(NAMES))])
    return dataclasses.replace(law, covariance=law.covariance + to @ more @ to.T)


def hold_out_places(rows: Sequence[PublishedPoint], whole: Law) -> tuple[Law, list[HeldOutPlace]]:
    """Leave each place out once; and of each series all but the smallest.

    Returns:
        the law with intervals as wide as the series differ, and the places.
    """
    places, more = places_of(rows), jackknife(rows, whole)
    smallest: dict[str, int] = {}
    for name, num in places:
        smallest.setdefault(name, num)

    def fit_without(is_left_out: Any) -> Law:
        return widen_shared(fit([row for row in rows if not is_left_out(row)], whole), more)

    from_smallest = {
        name: fit_without(lambda row, name=name, num=num: row.series == name and row.num != num)
        for name, num in smallest.items()
    }
    held = []
    for (name, num), place_rows in places.items():
        law = fit_without(lambda row, name=name, num=num: row.place == (name, num))
        measured = float(np.exp(_log_speeds(place_rows).mean()))
        fitted = _predict_place(whole, place_rows).value / measured - 1
        doublings = float(doublings_of(row_points(place_rows[:1], whole.series))[0])
        alone = None if num == smallest[name] else _predict_place(from_smallest[name], place_rows)
        predicted = _predict_place(law, place_rows)
        held.append(
            HeldOutPlace(
                name, num, place_rows[0].batch or 0, len(place_rows), measured, fitted, doublings, predicted, alone
            )
        )
    by_doubling = _by_doubling(held, whole)
    law = dataclasses.replace(widen_shared(whole, more), by_doubling=by_doubling)
    return law, [_widened(each, by_doubling, whole) for each in held]


def _by_doubling(held: Sequence[HeldOutPlace], law: Law) -> float:
    """Return the least deviation for each doubling of the domains with which intervals cover their stated share."""

    def needed(of: Interval, place: HeldOutPlace) -> float:
        """Return how much one place needs; in one domain nothing is added, so it needs nothing."""
        log_distance, wanted = (np.log(value / of.value) / law.log_radius(1.0) for value in (of.high, place.measured))
        return float(np.sqrt(max(0.0, wanted**2 - log_distance**2)) / place.doublings) if place.doublings else 0.0

    of_groups = []
    for least in (0, LARGE):
        large = [each for each in held if each.num >= least]
        for needs in ([needed(of.predicted, of) for of in large], [needed(of.alone, of) for of in large if of.alone]):
            of_groups.append(float(np.quantile(needs, COVERED, method="higher")))
    return max(of_groups)


def _predict_place(law: Law, rows: Sequence[PublishedPoint]) -> Interval:
    """Return the prediction of a place: the geometric mean over its rows, with the interval of the first."""
    intervals = law.predict_points(row_points(rows, law.series))
    mean = float(np.exp(np.mean([np.log(each.value) for each in intervals])))
    return intervals[0].times(mean / intervals[0].value)


def _widened(held: HeldOutPlace, by_doubling: float, law: Law) -> HeldOutPlace:
    """Return a place with the intervals of a law whose deviation grows."""

    def wide(of: Interval) -> Interval:
        log_width = np.log(of.high / of.value) / law.log_radius(1.0)
        factor = float(np.exp(law.log_radius(np.hypot(log_width, by_doubling * held.doublings))))
        return Interval(of.value, of.value / factor, of.value * factor)

    return dataclasses.replace(held, predicted=wide(held.predicted), alone=held.alone and wide(held.alone))
