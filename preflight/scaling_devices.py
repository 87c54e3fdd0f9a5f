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
from scipy.optimize import brentq

from cli.limits import shown
from preflight.scaling_fit import Interval, Law, jacobian, law_of
from preflight.scaling_law import CLUSTER_LINKS, NODE_LINKS, Setup, fixed_of, log_speed, points_of
from preflight.scaling_rows import SETUPS
from reports.compare_records import ALIKE_FRAC, NOT_RECORDED, RUN, SPEED, WORK, Record, read
from reports.verdicts import Sample

RESULTS = Path(__file__).resolve().parent.parent / "reports/results"
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
"""Part of a device's name -> the card."""


def card_of(device: str) -> str | None:
    """Return the name of the card that a device's name has, the longest that fits; None: none known."""
    return max((name for name in CARDS if name in device), key=len, default=None)


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

    def setup(self, node_link: str, cluster_link: str, domain: int) -> Setup:
        """Return how this run exchanges gradients over these links: an all-reduce of its weights' type."""
        settings = self.record.settings
        wide = 2 if settings.get("precision") == "bf16_params" else 4
        fixed = fixed_of(str(self.record.what.get("family")), bool(settings.get("cuda_graphs")))
        links = NODE_LINKS[node_link], CLUSTER_LINKS[cluster_link]
        return Setup(fixed, wide * self.parameters / 1e9, *links, domain, self.microbatch, tflop=self.tflop)


def read_measured(place: str) -> Measured:
    """Read a record. Raises ValueError: it is none of a run, or has no FLOPs."""
    record = read(place)
    if record.kind != RUN:
        raise ValueError(f"{shown(place, 300)}: is of {record.kind}, no run. Give runs/NAME, or a rung's record.")
    tflop, parameters = (record.what.get(key) for key in (WORK, "trained_parameters"))
    if not isinstance(tflop, int | float) or not isinstance(parameters, int):
        raise ValueError(f"{shown(place, 300)}: it has no {WORK} or trained_parameters. Give a run of this version.")
    num = record.machine["num_devices"]
    microbatch = record.settings.get("device_train_microbatch_size")
    batch = round(record.what["device_batch_size"] * num)
    size = microbatch if isinstance(microbatch, int) else None
    device = str(record.machine.get("device"))
    return Measured(record.name, device, num, batch, size, record.figures[SPEED], tflop, parameters, record)


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


def measured(law: Law, setup: Setup, name: str, num: int, batch: int, speed: Sample) -> tuple[Law, str]:
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
    name = card_of(run.device)
    if name is None:
        said = f"a record of {shown(run.device)}. Possible: {', '.join(CARDS)}: the law is fitted to GPUs"
        raise ValueError(f"{said}. Give measure.expected_images_per_sec.")
    card = CARDS[name]
    setup = run.setup(card.node_link, card.cluster_link, card.domain)
    with_rate, rate = measured(law, setup, run.name, run.num, run.batch, run.speed)
    return with_rate.predict(setup, rate, num, batch)


# --- the first records of GPUs ---


def gpu_records(folder: Path = RESULTS) -> list[Measured]:
    """Return the records of runs on a GPU that a folder has, sorted by path; what is no such record is passed over."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            if (
                isinstance(content, dict)
                and SPEED in content
                and not str(content.get("device", "CPU")).startswith("CPU")
            ):
                found.append(read_measured(str(path)))
        except ValueError:
            continue
    return found


def against(law: Law, run: Measured) -> dict[str, Any] | None:
    """Set a record of a GPU against what the law says of its card without it; None: the card is not known."""
    name = card_of(run.device)
    if name is None:
        return None
    card = CARDS[name]
    setup = run.setup(card.node_link, card.cluster_link, card.domain)
    with_rate, rate = rated(law, card.series_for(setup), run.tflop)
    told = with_rate.predict(setup, rate, run.num, run.batch)
    value = run.num * run.speed.middle
    said: Mapping[str, Any] = {"name": run.name, "device": run.device, "num": run.num, "global_batch_size": run.batch}
    ends = {"predicted": told.value, "predicted_low": told.low, "predicted_high": told.high}
    return {**said, "measured": value, **ends, "error": told.value / value - 1}
