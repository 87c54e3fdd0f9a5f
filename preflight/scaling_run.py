"""What a run takes on N devices: images/s by the law, then data, evaluation, checkpoints and failures, in hours and money.

A device is as fast as that of a record, or of a published series. FLOPs carry the rate from one network to another: the same
TFLOP/s of a device, so at the same utilisation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cli.limits import shown
from preflight.plan import images_of
from preflight.scaling_devices import MICROBATCH, RESULTS, SETTINGS, Exchange, Measured, Step, exchange_of
from preflight.scaling_failures import daly_sec, overhead_frac
from preflight.scaling_fit import Interval, Law, jacobian
from preflight.scaling_law import REFERENCE_TFLOP, Setup, doublings_of, fixed_of, points_of
from reports.compare_records import NOT_RECORDED
from zoo import load_family

GENERATED, STEPS, PASSES = 30_000, 50, 2  # images of an evaluation, steps, with and without the caption
EVAL_IMAGES = GENERATED * STEPS * PASSES / 3  # forward passes in training images: a backward pass is twice one
SCORING_SEC = 8 * 65.0  # of a device: NVIDIA's logs, 65 s on 8 H100
BYTES_A_SAMPLE = {"moments": "ours_bytes_a_sample", "images": "images_bytes_a_sample"}
CPU_A_SAMPLE = {
    "moments": ("data_speed", "ours_worker_cpu_us_a_sample"),
    "images": ("images_speed", "ours_cpu_us_an_image"),
}
"""Stage -> where reports/results/ has the bytes (data_speed.json) and the processor time of a sample of 512 px."""
GPUS_A_NODE = 8
ENDS = ("", "_low", "_high")
MEASURED_PX = 512 * 512  # images of those records
MEASURED_MOMENTS_BYTES = 2 * 8 * 64 * 64  # of SD2 at 512 px; the rest of a sample there is its caption


@dataclass(frozen=True)
class Facts:
    """What a run is, as far as its cost goes. TFLOP: an image and training step.

    each_pass: see Exchange. save_images: images between two checkpoints; 0: it saves none. area: of an image, over 512 x 512
    px. floats: bytes of a sample's stored moments and text states over SD2's moments at 512 px.
    """

    name: str
    tflop: float
    parameters: int
    batch: int
    microbatch: int | None
    images: int
    fixed: str = "plain"
    gradient_bytes: int = 4
    volume: float = 2.0
    stage: str | None = None
    num_evals: int = 0
    checkpoint_gib: float = 0.0
    each_pass: bool = False
    save_images: int = 0
    area: float = 1.0
    floats: float = 1.0

    @property
    def step(self) -> Step:
        """Its step."""
        exchange = Exchange(self.gradient_bytes, self.volume, self.each_pass)
        return Step(self.fixed, self.tflop, self.parameters, self.microbatch, exchange)


def facts_of(config: Any, cost: Any, name: str, images: int | None) -> Facts:
    """Return the facts of a run.

    Args:
        config: its configuration; cost: of its step, traced.
        images: to train; None: those of max_duration.

    Raises:
        ValueError: max_duration is in epochs, and no images are given.
    """
    images = images or images_of(config.max_duration, config.global_batch_size)
    if images is None:
        given = f"{config.max_duration}; how many images that is cannot be known before the data is read"
        raise ValueError(f"max_duration: {given}. Possible: batches or samples. Give images=NUMBER, or 850000ba.")
    of = exchange_of(config.precision, config.sharding)
    microbatch = config.device_train_microbatch_size
    every = config.eval.every_images if config.eval.when == "in_training" else None
    saves = config.save.is_on
    return Facts(
        name,
        cost.flops_per_image / 1e12,
        cost.trained_parameters,
        config.global_batch_size,
        microbatch if isinstance(microbatch, int) else None,
        images,
        fixed_of(config.model.family, config.cuda_graphs),
        of.gradient_bytes,
        of.volume,
        stage=None if config.data.synthetic else config.data.stage,
        num_evals=images // every if every else 0,
        checkpoint_gib=cost.checkpoint_gib(ema=config.ema.enabled) if saves else 0.0,
        each_pass=of.each_pass,
        save_images=config.save.every_images or 0,
        area=math.prod(config.size) / MEASURED_PX,
        floats=_stored_bytes(config) / MEASURED_MOMENTS_BYTES,
    )


def _stored_bytes(config: Any) -> int:
    """Return the bytes of a sample's columns of numbers with a fraction, as a stage of moments stores them."""
    family = load_family(config.model.family, config.model.preset, config.model.variant)
    columns = family.columns("moments", config.size, stored_text=config.data.text == "stored").values()
    return sum(math.prod(of.shape) * of.dtype.itemsize for of in columns if of.dtype.is_floating_point)


def settings_of(config: Any) -> dict[str, Any]:
    """Return what a record has of a run's settings, by the record's keys."""
    what = {key: getattr(config.model, key) for key in ("family", "preset", "variant")}
    what |= {"stage": config.data.stage, "synthetic": config.data.synthetic}
    what |= {"image_size": list(config.size), "ema": config.ema.enabled}
    return {**what, MICROBATCH: config.device_train_microbatch_size, **{key: getattr(config, key) for key in SETTINGS}}


def differences(settings: Mapping[str, Any], run: Measured) -> list[str]:
    """Return `key (the record's value, here the run's)` of what a record and a run do not share, as far as it has them."""
    found = []
    for key, own in settings.items():
        given = run.record.what.get(key, run.record.settings.get(key, NOT_RECORDED))
        given = [given, given] if key == "image_size" and isinstance(given, int) else given
        if given is not NOT_RECORDED and given is not None and own != "auto" and given != own:
            found.append(f"{key} ({shown(_plain(given))}, here {_plain(own)})")
    return found


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- what is not the step ---


def read_figures() -> dict[str, dict[str, float]]:
    """Return bytes and processor seconds of a sample by stage, from the committed records."""
    records = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in ("data_speed", "images_speed")}
    return {
        stage: {
            "bytes": records["data_speed"][BYTES_A_SAMPLE[stage]],
            "cpu_sec": 1e-6 * records[CPU_A_SAMPLE[stage][0]][CPU_A_SAMPLE[stage][1]],
        }
        for stage in BYTES_A_SAMPLE
    }


def eval_sec(num: int, tflops_a_device: float, share: float = 1.0, device_sec: float | None = None) -> float:
    """Return the seconds of an evaluation on N devices: 30,000 images of 50 steps with guidance, and their scoring.

    Args:
        tflops_a_device: delivered in training.
        share: of it, delivered in an evaluation.
        device_sec: a measured one's seconds times its devices; None: by FLOPs.
    """
    if device_sec is not None:
        return device_sec / num
    return (EVAL_IMAGES * REFERENCE_TFLOP / tflops_a_device + SCORING_SEC) / share / num


@dataclass(frozen=True)
class Rates:
    """What the command's keys say of machines, failures and money; see preflight.scaling.ScalingConfig."""

    mtbf_hours: float
    resume_sec: float
    write_gib_per_sec: float
    holds_up: bool
    eval_gpu_sec: float | None
    store_mb_per_sec: float | None
    cores: int | None
    price: float | None


def figures_of(facts: Facts, figures: Mapping[str, Mapping[str, float]]) -> dict[str, float] | None:
    """Return bytes and processor seconds of a sample of this run's size; None: nothing is read, or known.

    An image's file and its processor time grow with its area; moments and text states have their exact bytes, and are read
    at the processor time that was measured.
    """
    of = figures.get(facts.stage or "")
    if of is None:
        return None
    if facts.stage == "images":
        return {key: value * facts.area for key, value in of.items()}
    return {**of, "bytes": of["bytes"] + (facts.floats - 1) * MEASURED_MOMENTS_BYTES}


def limit_of(of: Mapping[str, float] | None, rates: Rates) -> dict[str, float]:
    """Return what limits a node's images/s: `the store`, `cores`; only what is given. of: see figures_of."""
    if of is None:
        return {}
    found = {}
    if rates.store_mb_per_sec is not None:
        found["the store"] = 1e6 * rates.store_mb_per_sec / of["bytes"]
    if rates.cores is not None:
        found["cores"] = rates.cores / of["cpu_sec"]
    return found


def estimate(
    law: Law,
    rate: str,
    setup: Setup,
    facts: Facts,
    num: int,
    rates: Rates,
    figures: Mapping[str, Mapping[str, float]],
    eval_share: float = 1.0,
) -> dict[str, Any]:
    """Return a row: a run on N devices. Where there are more devices than images of a batch, the batch is raised to them.

    A time without an end is inf.
    """
    batch, nodes, of = max(facts.batch, num), max(1, num / GPUS_A_NODE), figures_of(facts, figures)
    speed, limit = _speed(law, rate, setup, facts, num, limit_of(of, rates))
    tflops = float(np.exp(law.theta[law.series.index(rate)])) * facts.tflop
    evaluation = facts.num_evals * eval_sec(num, tflops, eval_share, rates.eval_gpu_sec)
    trained = {
        end: _over(facts.images, value) for end, value in zip(ENDS, (speed.value, speed.high, speed.low), strict=True)
    }
    failed = {end: _failures(facts, num, rates, seconds + evaluation) for end, seconds in trained.items()}
    wall = {end: (seconds + evaluation) * (1 + failed[end]["overhead_frac"]) for end, seconds in trained.items()}
    price = rates.price
    row: dict[str, Any] = {"num": num, "global_batch_size": batch, "limit": limit}
    row |= _ends("images_per_sec", speed)
    row |= {"train_hours": trained[""] / 3600, "eval_hours": evaluation / 3600}
    row |= {f"days{end}": seconds / 86400 for end, seconds in wall.items()}
    row |= {f"gpu_hours{end}": num * seconds / 3600 for end, seconds in wall.items()}
    row |= {f"cost{end}": None if price is None else price * num * seconds / 3600 for end, seconds in wall.items()}
    row |= failed[""]
    row |= {"node_mb_per_sec": speed.value / nodes * of["bytes"] / 1e6 if of else None}
    return row | {"node_cores": speed.value / nodes * of["cpu_sec"] if of else None}


def _speed(
    law: Law, rate: str, setup: Setup, facts: Facts, num: int, limits: Mapping[str, float]
) -> tuple[Interval, str | None]:
    """Return images/s on N devices, and what limits them where data do; limits: of a node."""
    speed, nodes = facts.step.predict(law, rate, setup, num, max(facts.batch, num)), max(1, num / GPUS_A_NODE)
    limit = min(limits, key=limits.__getitem__, default=None)
    if limit is None or (most := nodes * limits[limit]) >= speed.value:
        return speed, None
    return Interval(most, min(most, speed.low), min(most, speed.high)), limit


def over_one_node(
    law: Law,
    rate: str,
    setup: Setup,
    facts: Facts,
    row: Mapping[str, Any],
    base: Mapping[str, Any],
) -> dict[str, float]:
    """Return the speed of a row over that of one node of 8, `base`, with its interval by the law's delta method on both.

    What both depend on, the rate first of all, cancels out. Where data limit one of them, their intervals are divided.
    """
    ends = [row[f"images_per_sec{end}"] for end in ENDS]
    if row["num"] == base["num"]:
        return _ends("times", Interval(1.0, 1.0, 1.0))
    times = _over(ends[0], base["images_per_sec"])
    if row["limit"] or base["limit"]:
        low, high = _over(ends[1], base["images_per_sec_high"]), _over(ends[2], base["images_per_sec_low"])
        return _ends("times", Interval(times, low, high))
    place, exchange = law.series.index(rate), facts.step.exchange
    of = [
        (setup, each["num"], exchange.batch(setup, each["num"], each["global_batch_size"]), place)
        for each in (row, base)
    ]
    points = points_of(of)
    one, other = jacobian(law.theta, points, len(law.series))
    grown = law.by_doubling * np.diff(doublings_of(points))[0]
    deviation = np.sqrt(2 * law.noise**2 + (one - other) @ law.covariance @ (one - other) + grown**2)  # a noise each
    reach = float(np.exp(law.reach(deviation)))
    return _ends("times", Interval(times, times / reach, times * reach))


def _over(value: float, by: float) -> float:
    return value / by if by else math.inf


def _ends(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _failures(facts: Facts, num: int, rates: Rates, seconds: float) -> dict[str, float | None]:
    """Return the best cadence and what it costs; and what the run's own costs. `seconds`: of training and evaluations.

    A checkpoint written beside training holds up nothing, but takes its time. Without checkpoints the run is one segment, and
    has no cadence.
    """
    between = 3600 * rates.mtbf_hours / num
    if not facts.checkpoint_gib:
        cost = overhead_frac(seconds, 0.0, rates.resume_sec, between)
        cadence: dict[str, float | None] = {"save_sec": 0.0, "save_every_sec": None, "without_failures_frac": 0.0}
        own: dict[str, float | None] = {"own_every_sec": None, "own_frac": None}
        return {"mtbf_hours": rates.mtbf_hours / num, **cadence, "overhead_frac": cost, **own}
    writes = facts.checkpoint_gib / rates.write_gib_per_sec
    held = writes if rates.holds_up else 0.0
    every = max(daly_sec(held, between) if held else 0.0, writes, 1.0)
    said: dict[str, float | None] = {
        "mtbf_hours": rates.mtbf_hours / num,
        "save_sec": held,
        "save_every_sec": every,
        "overhead_frac": overhead_frac(every, held, rates.resume_sec, between),
        "without_failures_frac": held / every,
    }
    own_sec = max(min(facts.save_images / facts.images, 1.0) * seconds, 0.0 if rates.holds_up else writes)
    own = {"own_every_sec": own_sec, "own_frac": overhead_frac(own_sec, held, rates.resume_sec, between)}
    return said | (own if facts.save_images else dict.fromkeys(own))
