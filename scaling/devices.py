"""How fast a device is: by a record of a run, or as that of a published series at the same TFLOP/s.

A record is what reports.compare takes: a run's folder, its summary.json, or a rung of bench.ladder.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from common.value_types import format_value, truncate
from model import AUTOCAST_DTYPES, weights_dtype
from reports.compare import ALIKE_FRAC, NOT_RECORDED, RUN, SPEED, WORK, Measurement, Record, read_record
from scaling.law import (
    CLUSTER_LINKS,
    NODE_LINKS,
    REPORTS,
    SETUPS,
    Array,
    Interval,
    Law,
    Points,
    Setup,
    fixed_of,
    jacobian,
    law_from_record,
    log_speed,
    points_of,
)

RESULTS = REPORTS / "results"
MICROBATCH = "device_train_microbatch_size"
FASTEST = 30.0  # of log rates: what a tiny network's pass takes at any size is thousands of its images
DEVICE_COUNT_KEYS = ("device_batch_size", WORK)
"""Keys of what is trained that follow from the number of devices, or are compared apart."""
SETTINGS = (
    *("precision", "compile", "compile_mode", "cuda_graphs", "channels_last", "attention", "sharding"),
    *("gradient_checkpointing", "async_loss"),
)
"""Settings that have to be the same in records of one configuration."""
Links = tuple[str, str, int]
"""A node link, a cluster link, and the devices that the first one joins."""


@dataclass(frozen=True)
class GPUModel:
    """A kind of GPU: the published series that its speed is taken from without a record, FLUX's own, and its usual links.

    devices: their whole names, since the series and the links are those of SXM modules: an H100 NVL or PCIe is another one.
    """

    series: str
    links: Links
    devices: tuple[str, ...]
    flux: str | None = None


HOPPER = "nvlink4", "infiniband_ndr", 8
A100 = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"
CARDS = {
    "A100": GPUModel("mosaicml_latents_512", ("nvlink3", "infiniband_hdr", 8), A100),
    "H100": GPUModel("mlperf_h100_v41", HOPPER, ("NVIDIA H100 80GB HBM3",)),
    "H200": GPUModel("mlperf_h200_v41", HOPPER, ("NVIDIA H200",)),
    "B200": GPUModel("mlperf_b200_v50", ("nvlink5", "infiniband_ndr", 8), ("NVIDIA B200",), "flux_b200"),
    "GB200": GPUModel("mlperf_gb200", ("nvlink5", "infiniband_ndr", 72), ("NVIDIA GB200",), "flux_gb200"),
}


@dataclass(frozen=True)
class Exchange:
    """What a run exchanges.

    gradient_bytes: of a parameter. volume: passes of so many bytes over all parameters. each_pass: it is exchanged in each
    microbatch's pass, not once in a step.
    """

    gradient_bytes: int = 4
    volume: float = 2.0
    each_pass: bool = False

    def batch(self, setup: Setup, num: int, batch: float) -> float:
        """Return the global batch that the law is asked for in place of the run's.

        Where each pass exchanges, and hides what it can behind its own backward pass, a step of p passes is p steps of one.
        """
        most = setup.microbatch
        return batch / math.ceil(batch / num / most - 1e-9) if self.each_pass and most else batch


AS_DDP = Exchange()


def exchange_of(precision: str, sharding: str) -> Exchange:
    """Return what a run exchanges.

    Without sharding DDP makes one all-reduce in the last pass: twice the gradients, in the weights' type. Sharded weights
    (training/sharding.py: reshard_after_forward) are gathered before each block's forward pass and again before its
    backward pass, in the type that is computed in, and gradients are scattered in float32: all three in each microbatch's
    pass, since nothing there puts the scattering off. `hybrid` scatters within a machine, then has an all-reduce in float32
    between machines: as many bytes in bf16 and bf16_params; in float32 this is too much by a half between machines.
    """
    wide = weights_dtype(precision).itemsize
    if sharding == "off":
        return Exchange(wide)
    compute = AUTOCAST_DTYPES.get(precision, torch.float32).itemsize
    return Exchange(wide, (2 * compute + 4) / wide, True)


@dataclass(frozen=True)
class Predictor:
    """Predicts images/s of a run on any number of devices. rate: the name of the rate in the law, of a device."""

    law: Law
    rate: str
    setup: Setup
    exchange: Exchange = AS_DDP

    def points(self, nums_and_batches: Sequence[tuple[int, float]]) -> Points:
        """Return the points of numbers of devices and global batches."""
        rate_index, batch = self.law.series.index(self.rate), self.exchange.batch
        return points_of(
            [(self.setup, num, batch(self.setup, num, size), rate_index) for num, size in nums_and_batches]
        )

    def predict(self, num: int, batch: float) -> Interval:
        """Return images/s on `num` devices at a global batch."""
        return self.law.predict_points(self.points([(num, batch)]))[0]


def _with_rate(law: Law, name: str, log_rate: float, slope: Array, variance: float = 0.0) -> Law:
    """Return the law with one more rate, which moves with the others by `slope`, and by itself with `variance`."""
    index = len(law.series)
    to = np.insert(np.eye(len(law.theta)), index, slope, axis=0)
    covariance = to @ law.covariance @ to.T
    covariance[index, index] += variance
    theta = np.insert(law.theta, index, log_rate)
    return dataclasses.replace(law, series=(*law.series, name), theta=theta, covariance=covariance)


def at_tflop(law: Law, series: str, tflop: float) -> tuple[Law, str]:
    """Return the law with one more rate, and its name: a series' device, at the FLOPs of another network."""
    index, name = law.series.index(series), f"as {series}"
    log_rate = law.theta[index] + math.log(SETUPS[series].tflop / tflop)
    return _with_rate(law, name, log_rate, np.eye(len(law.theta))[index]), name


@dataclass(frozen=True)
class Step:
    """A step of a run, as far as its time goes. fixed: which b0. tflop: an image and step. parameters: trained.

    microbatch: images of a pass at most; None: the device batch.
    """

    fixed: str
    tflop: float
    parameters: int
    microbatch: int | None
    exchange: Exchange = AS_DDP

    def over(self, links: Links) -> Setup:
        """Return how it exchanges over these links."""
        node_link, cluster_link, domain = links
        gb, inner, outer = self.exchange.gradient_bytes * self.parameters / 1e9, NODE_LINKS[node_link], cluster_link
        more = self.microbatch, self.exchange.volume, self.tflop
        return Setup(self.fixed, gb, inner, CLUSTER_LINKS[outer], domain, *more)

    def series_for(self, card: GPUModel) -> str:
        """Return a card's series of the network that is most like this one."""
        return card.flux if card.flux and self.fixed == "flux" else card.series

    def published(self, law: Law, card: GPUModel, links: Links | None = None) -> Predictor:
        """Return the predictor of a card that is as fast as its published series. links: None: its usual ones."""
        with_rate, rate = at_tflop(law, self.series_for(card), self.tflop)
        return Predictor(with_rate, rate, self.over(links or card.links), self.exchange)


def step_of(keys: Mapping[str, Any], tflop: float, parameters: int) -> Step:
    """Return the step of a run by its keys: family, cuda_graphs, device_train_microbatch_size, precision, sharding."""
    microbatch = keys.get(MICROBATCH)
    exchange = exchange_of(str(keys.get("precision") or "bf16"), str(keys.get("sharding") or "off"))
    fixed = fixed_of(str(keys.get("family")), bool(keys.get("cuda_graphs")))
    return Step(fixed, tflop, parameters, microbatch if isinstance(microbatch, int) else None, exchange)


@dataclass(frozen=True)
class MeasuredRun:
    """A record: a run on `num` devices. speed: images/s of a device."""

    name: str
    device: str
    num: int
    batch: int
    speed: Measurement
    step: Step
    record: Record

    @property
    def card(self) -> str | None:
        """The name of its card; None: none known."""
        return next((name for name, card in CARDS.items() if self.device in card.devices), None)

    def predictor(self, law: Law, links: Links, step: Step) -> Predictor:
        """Return what predicts a step of this run, or of another network at its TFLOP/s, by its record over these links.

        Raises:
            ValueError: see `measured`.
        """
        setup = self.step.over(links)
        batch = self.step.exchange.batch(setup, self.num, self.batch)
        law, rate = law_with_measured_rate(law, setup, self.name, self.num, batch, self.speed)
        law.theta[law.series.index(rate)] += math.log(self.step.tflop / step.tflop)
        return Predictor(law, rate, step.over(links), step.exchange)


def read_measured(source: str) -> MeasuredRun:
    """Read a record. Raises ValueError: it is none of a run, or lacks a number that each run has."""
    record, where = read_record(source), truncate(source, 300)
    if record.kind != RUN:
        raise ValueError(f"{where}: is of {record.kind}, no run. Give runs/NAME, or a rung's record.")
    work, settings, num = record.what, record.settings, record.machine["num_devices"]
    microbatch = None if settings.get(MICROBATCH) == "auto" else settings.get(MICROBATCH)
    numbers = {WORK: work.get(WORK), "trained_parameters": work.get("trained_parameters"), "num_devices": num}
    for key, value in {**numbers, MICROBATCH: 1 if microbatch is None else microbatch}.items():
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(
                f"{where}: its {key} is {format_value(value)}. Possible: a number above 0. Give another record."
            )
    step = step_of({**settings, "family": work.get("family")}, work[WORK], work["trained_parameters"])
    batch, device = round(work["device_batch_size"] * num), str(record.machine.get("device"))
    return MeasuredRun(record.name, device, num, batch, record.figures[SPEED], step, record)


def problems_of(records: Sequence[MeasuredRun]) -> list[str]:
    """Say why records are not of one configuration on one kind of device."""

    def compared(run: MeasuredRun) -> dict[str, object]:
        work = {key: value for key, value in run.record.what.items() if key not in DEVICE_COUNT_KEYS}
        return {**work, **{key: run.record.settings.get(key) for key in SETTINGS}, "device": run.device}

    first, problems = records[0], []
    for other in records[1:]:
        one, two = compared(first), compared(other)
        pairs = [(key, one.get(key, NOT_RECORDED), two.get(key, NOT_RECORDED)) for key in {**one, **two}]
        if abs(first.step.tflop / other.step.tflop - 1) > ALIKE_FRAC:
            pairs.append((WORK, first.step.tflop, other.step.tflop))
        if apart := [pair for pair in pairs if pair[1] != pair[2]]:
            key, *values = apart[0]
            values_text = ", ".join(
                f"{truncate(str(value))} in {run.name}" for value, run in zip(values, (first, other), strict=True)
            )
            problems.append(f"{key}: {values_text}. Records of one configuration belong together. Leave one out.")
    return problems


def law_with_measured_rate(
    law: Law, setup: Setup, name: str, num: int, batch: float, speed: Measurement
) -> tuple[Law, str]:
    """Return the law with the rate at which it gives what was measured, and its name.

    Its uncertainty is that of the shared parameters and of the median.

    Args:
        speed: images/s of a device, of `num` at this global batch.

    Raises:
        ValueError: no device is so fast that the links allow it.
    """
    index = len(law.series)
    theta = np.insert(law.theta, index, 0.0)
    points = points_of([(setup, num, batch, index)])

    def off(rate: float) -> float:
        theta[index] = rate
        return float(log_speed(theta, points)[0] - math.log(speed.middle * num))

    near = math.log(speed.middle)
    if off(near + FASTEST) < 0.0:
        problem = (
            f"its step of {batch / (num * speed.middle):.3g} s is shorter than the exchange over these links alone"
        )
        raise ValueError(f"{name}: {problem}. Possible: node_link, cluster_link and domain of that machine. Give them.")
    theta[index] = brentq(off, near - 0.5, near + FASTEST)
    slope = jacobian(theta, points)[0]
    own_slope, other_slopes = slope[index], np.delete(slope, index)
    name = f"measured: {name}"
    return _with_rate(
        law, name, theta[index], -other_slopes / own_slope, (_median_deviation(speed) / own_slope) ** 2
    ), name


def _median_deviation(speed: Measurement) -> float:
    """The deviation of log median: from its parts where they are known, else from the extremes as if of ten parts."""
    if len(values := speed.values) > 1:
        return float(1.25 * np.std(np.log(values), ddof=1) / math.sqrt(len(values)))
    # the range of ten normal values: 3.08 deviations
    return math.log(speed.greatest / speed.least) / 3.08 / math.sqrt(10)


def committed_law() -> Law:
    """Return the law of the committed record."""
    return law_from_record(json.loads((RESULTS / "scaling.json").read_text())["law"])


def expected_speed(source: str, num: int, batch: int) -> Interval:
    """Return the images/s of a run on `num` devices, from a record of the same run on another number.

    Raises:
        ValueError: no record of a run; or one of a CPU, or of a card that has no links here.
    """
    run = read_measured(source)
    if run.card is None:
        problem = f"a record of {truncate(run.device)}. Possible: {', '.join(CARDS)}: the law is fitted to GPUs"
        raise ValueError(f"{problem}. Give measure.expected_images_per_sec.")
    return run.predictor(committed_law(), CARDS[run.card].links, run.step).predict(num, batch)
