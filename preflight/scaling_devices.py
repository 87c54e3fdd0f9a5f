"""How fast a device is: by a record of a run, or as that of a published series at the same TFLOP/s.

A record is what reports.compare takes: a run's folder, its summary.json, or a rung of bench.ladder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from cli.files import read_regular
from cli.limits import given_as, shown
from model import AUTOCAST_DTYPES, weights_dtype
from preflight.scaling_fit import Interval, Law, jacobian, law_of
from preflight.scaling_law import CLUSTER_LINKS, NODE_LINKS, Setup, fixed_of, log_speed, points_of
from preflight.scaling_rows import SETUPS
from record.history import number_of
from reports.compare_records import ALIKE_FRAC, NOT_RECORDED, RUN, SPEED, WORK, Record, read
from reports.verdicts import Sample

RESULTS = Path(__file__).resolve().parent.parent / "reports/results"
MICROBATCH = "device_train_microbatch_size"
SMALLEST_TFLOP, MOST = 1e-9, 1e13  # of an image and step; of any number of a record
LAW = RESULTS / "scaling.json"
"""Record with the fitted law."""
FASTEST = 30.0  # of log rates: what a tiny network's pass takes at any size is thousands of its images
OF_A_NUMBER = ("device_batch_size", WORK)
"""Keys of what is trained that follow from the number of devices, or are compared apart."""
SETTINGS = (
    *("precision", "compile", "compile_mode", "cuda_graphs", "channels_last", "attention", "sharding"),
    *("gradient_checkpointing", "async_loss", "copy_stream"),
)
"""Settings that have to be the same in records of one configuration."""


@dataclass(frozen=True)
class Card:
    """A kind of GPU: the published series that its speed is taken from without a record, FLUX's own, and its usual links."""

    series: str
    node_link: str
    cluster_link: str
    domain: int = 8
    flux: str | None = None

    def series_for(self, setup: Setup) -> str:
        """Return the series of the network that is most like a run's."""
        return self.flux if self.flux and setup.fixed == "flux" else self.series


CARDS = {
    "A100": Card("mosaicml_latents_512", "nvlink3", "infiniband_hdr"),
    "H100": Card("mlperf_h100_v41", "nvlink4", "infiniband_ndr"),
    "H200": Card("mlperf_h200_v41", "nvlink4", "infiniband_ndr"),
    "B200": Card("mlperf_b200_v50", "nvlink5", "infiniband_ndr", flux="flux_b200"),
    "GB200": Card("mlperf_gb200", "nvlink5", "infiniband_ndr", 72, "flux_gb200"),
}
NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
}
"""A device's name -> the card, whose series and links are those of SXM modules: an H100 NVL or PCIe is another one."""


def card_of(device: str) -> str | None:
    """Return the name of a device's card; None: none known."""
    return NAMES.get(device)


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
class Step:
    """A step of a run, as far as its time goes. fixed: which b0. tflop: an image and step. parameters: trained.

    microbatch: images of a pass at most; None: the device batch.
    """

    fixed: str
    tflop: float
    parameters: int
    microbatch: int | None
    exchange: Exchange

    def over(self, node_link: str, cluster_link: str, domain: int) -> Setup:
        """Return how it exchanges over these links."""
        gb, volume = self.exchange.gradient_bytes * self.parameters / 1e9, self.exchange.volume
        links = NODE_LINKS[node_link], CLUSTER_LINKS[cluster_link]
        return Setup(self.fixed, gb, *links, domain, self.microbatch, volume, self.tflop)

    def on(self, card: Card) -> Setup:
        """Return the same over a card's usual links."""
        return self.over(card.node_link, card.cluster_link, card.domain)

    def predict(self, law: Law, rate: str, setup: Setup, num: int, batch: int) -> Interval:
        """Return images/s on `num` devices at a global batch."""
        return law.predict(setup, rate, num, self.exchange.batch(setup, num, batch))

    def published(self, law: Law, card: Card, num: int, batch: int) -> Interval:
        """Return images/s on `num` devices of a card as fast as its published series, over its usual links."""
        setup = self.on(card)
        with_rate, rate = rated(law, card.series_for(setup), self.tflop)
        return self.predict(with_rate, rate, setup, num, batch)


@dataclass(frozen=True)
class Measured:
    """A record: a run on `num` devices. speed: images/s of a device."""

    name: str
    device: str
    num: int
    batch: int
    microbatch: int | None
    speed: Sample
    tflop: float
    parameters: int
    record: Record

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("CPU")

    @property
    def step(self) -> Step:
        """Its step; records that were made before there was sharding have none."""
        of, settings = self.record.what, self.record.settings
        fixed = fixed_of(str(of.get("family")), bool(settings.get("cuda_graphs")))
        exchange = exchange_of(str(settings.get("precision")), str(settings.get("sharding") or "off"))
        return Step(fixed, self.tflop, self.parameters, self.microbatch, exchange)

    @property
    def card(self) -> Card:
        """Its card. Raises KeyError: it is not known."""
        return CARDS[card_of(self.device) or ""]

    def tuned(self, law: Law, setup: Setup) -> tuple[Law, str]:
        """Return the law with the rate at which it gives this record, and its name; see `measured`."""
        batch = self.step.exchange.batch(setup, self.num, self.batch)
        return measured(law, setup, self.name, self.num, batch, self.speed)


def read_measured(place: str) -> Measured:
    """Read a record. Raises ValueError: it is none of a run, or has no FLOPs, or a number that none can be."""
    record, where = read(place), shown(place, 300)
    if record.kind != RUN:
        raise ValueError(f"{where}: is of {record.kind}, no run. Give runs/NAME, or a rung's record.")
    if any(record.what.get(key) in (None, NOT_RECORDED) for key in (WORK, "trained_parameters")):
        raise ValueError(f"{where}: it has no {WORK} or trained_parameters. Give a run of this version.")
    tflop = _positive(where, WORK, record.what[WORK], whole=False)
    parameters = int(_positive(where, "trained_parameters", record.what["trained_parameters"]))
    num = int(_positive(where, "num_devices", record.machine["num_devices"]))
    microbatch = record.settings.get(MICROBATCH)
    size = None if microbatch in (None, "auto") else int(_positive(where, MICROBATCH, microbatch))
    batch = int(_positive(where, "global_batch_size", round(record.what["device_batch_size"] * num)))
    device = str(record.machine.get("device"))
    return Measured(record.name, device, num, batch, size, record.figures[SPEED], tflop, parameters, record)


def _positive(where: str, key: str, given: Any, whole: bool = True) -> float:
    """Return a record's number. Raises ValueError: it is none that a run can have."""
    value = number_of({key: given}, key)
    least, kind = (1, "a whole number") if whole else (SMALLEST_TFLOP, "a number")
    if value is None or not least <= value <= MOST or (whole and value != int(value)):
        possible = f"{kind} from {least:g} to {MOST:.0e}"
        raise ValueError(f"{where}: its {key} is {given_as(given)}. Possible: {possible}. Give a record of a run.")
    return value


def problems_of(records: Sequence[Measured]) -> list[str]:
    """Say why records are not of one configuration on one kind of device."""
    first, problems = records[0], []
    for other in records[1:]:
        keys = [key for key in {**first.record.what, **other.record.what} if key not in OF_A_NUMBER]
        pairs = [(key, *(of.record.what.get(key, NOT_RECORDED) for of in (first, other))) for key in keys]
        pairs += [(key, *(of.record.settings.get(key) for of in (first, other))) for key in SETTINGS]
        pairs += [("device", *(re.sub(r", \d+ threads$", "", of.device) for of in (first, other)))]
        apart = [pair for pair in pairs if pair[1] != pair[2]]
        if not apart and abs(first.tflop / other.tflop - 1) > ALIKE_FRAC:
            apart = [(WORK, first.tflop, other.tflop)]
        if apart:
            key, one, two = apart[0]
            said = f"{shown(str(one))} in {first.name}, {shown(str(two))} in {other.name}"
            problems.append(f"{key}: {said}. Records of one configuration belong together. Leave one out.")
    nums = [record.num for record in records]
    if twice := [num for num in dict.fromkeys(nums) if nums.count(num) > 1]:
        problems.append(f"num_devices: {twice[0]} in several records. Give one of each number of devices.")
    return problems


def rated(law: Law, series: str, tflop: float) -> tuple[Law, str]:
    """Return the law with one more rate, and its name: a series' device, at the FLOPs of another network."""
    place, num, name = law.series.index(series), len(law.series), f"as {series}"
    to = np.insert(np.eye(len(law.theta)), num, np.eye(len(law.theta))[place], axis=0)
    theta = to @ law.theta
    theta[num] += math.log(SETUPS[series].tflop / tflop)
    return dataclasses.replace(
        law, series=(*law.series, name), theta=theta, covariance=to @ law.covariance @ to.T
    ), name


def measured(law: Law, setup: Setup, name: str, num: int, batch: float, speed: Sample) -> tuple[Law, str]:
    """Return the law with the rate at which it gives what was measured, and its name.

    Its uncertainty is that of the shared parameters and of the median.

    Args:
        speed: images/s of a device, of `num` at this global batch.

    Raises:
        ValueError: no device is so fast that the links allow it.
    """
    place = len(law.series)
    theta = np.insert(law.theta, place, 0.0)
    points = points_of([(setup, num, batch, place)])

    def off(rate: float) -> float:
        theta[place] = rate
        return float(log_speed(theta, points, place + 1)[0] - math.log(speed.middle * num))

    near = math.log(speed.middle)
    if off(near + FASTEST) < 0.0:
        said = f"its step of {batch / (num * speed.middle):.3g} s is shorter than the exchange over these links alone"
        raise ValueError(f"{name}: {said}. Possible: node_link, cluster_link and domain of that machine. Give them.")
    theta[place] = brentq(off, near - 0.5, near + FASTEST)
    slope = jacobian(theta, points, place + 1)[0]
    own, others = slope[place], np.delete(slope, place)
    to = np.insert(np.eye(len(law.theta)), place, -others / own, axis=0)
    covariance = to @ law.covariance @ to.T
    covariance[place, place] += (_of_median(speed) / own) ** 2
    name = f"measured: {name}"
    return dataclasses.replace(law, series=(*law.series, name), theta=theta, covariance=covariance), name


def _of_median(speed: Sample) -> float:
    """The deviation of log median: from its parts where they are known, else from the extremes as if of ten parts."""
    if len(values := speed.parts if speed.values else []) > 1:
        return float(1.25 * np.std(np.log(values), ddof=1) / math.sqrt(len(values)))
    return (
        math.log(speed.greatest / speed.least) / 3.08 / math.sqrt(10)
    )  # the range of ten normal values: 3.08 deviations


def kept_law(path: Path = LAW) -> Law:
    """Return the law of the committed record."""
    return law_of(json.loads(path.read_text())["law"])


def expected(place: str, num: int, batch: int, law: Law | None = None) -> Interval:
    """Return the images/s of a run on `num` devices, from a record of the same run on another number.

    Raises:
        ValueError: no record of a run; or one of a CPU, or of a card that has no links here.
    """
    run, law = read_measured(place), law or kept_law()
    if card_of(run.device) is None:
        said = f"a record of {shown(run.device)}. Possible: {', '.join(CARDS)}: the law is fitted to GPUs"
        raise ValueError(f"{said}. Give measure.expected_images_per_sec.")
    setup = run.step.on(run.card)
    with_rate, rate = run.tuned(law, setup)
    return run.step.predict(with_rate, rate, setup, num, batch)


# --- the first records of GPUs ---


def gpu_records(folder: Path = RESULTS) -> tuple[list[Measured], list[dict[str, str]]]:
    """Return the records of runs on a GPU that a folder has, sorted by path, and what was passed over: `name`, `why`.

    A record of a CPU, or of something else than a run, is neither.
    """
    found, passed_over = [], []
    for path in sorted(folder.rglob("*.json")):
        try:
            if not _is_of_gpu(json.loads(read_regular(path))):
                continue
            run = read_measured(str(path))
        except (OSError, ValueError, RecursionError) as error:
            why = str(error).removeprefix(f"{shown(str(path), 300)}: ")
            passed_over.append({"name": path.relative_to(folder).as_posix(), "why": why})
            continue
        if card_of(run.device) is None:
            why = f"no published series of {shown(run.device)}"
            passed_over.append({"name": path.relative_to(folder).as_posix(), "why": why})
        else:
            found.append(run)
    return found, passed_over


def _is_of_gpu(content: Any) -> bool:
    return isinstance(content, dict) and SPEED in content and not str(content.get("device", "CPU")).startswith("CPU")


def against(law: Law, run: Measured) -> dict[str, Any]:
    """Set a record of a GPU against what the law says of its card without it."""
    told = run.step.published(law, run.card, run.num, run.batch)
    value = run.num * run.speed.middle
    said: Mapping[str, Any] = {"name": run.name, "device": run.device, "num": run.num, "global_batch_size": run.batch}
    ends = {"predicted": told.value, "predicted_low": told.low, "predicted_high": told.high}
    return {**said, "measured": value, **ends, "error": told.value / value - 1}
