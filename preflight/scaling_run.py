"""What a run takes on N devices: images/s by the law, then data, evaluation, checkpoints and failures, in hours and money.

A device is as fast as that of a record, or of a published series. FLOPs carry the rate from one network to another: the same
TFLOP/s of a device, so at the same utilisation.

Failures are a Poisson process:

    M      mean time between failures of the whole run, s: that of a device over their number
    d      seconds that a checkpoint holds up training
    R      seconds from a failure until training goes on
    w      seconds of training between two checkpoints

A segment is done when w + d pass without a failure. Until then each failure costs what has passed and a restart, which may
fail too. Its expected time is M exp(R / M) (exp((w + d) / M) - 1): Daly 2006, "A higher order estimate of the optimum
checkpoint interval for restart dumps", Future Generation Computer Systems 22.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cli.limits import limited, shown
from preflight.plan import images_of
from preflight.scaling_devices import MICROBATCH, RESULTS, SETTINGS, Measured, Predictor, Step, step_of
from preflight.scaling_fit import Interval, jacobian
from preflight.scaling_law import REFERENCE_TFLOP, doublings_of
from reports.compare_records import NOT_RECORDED
from zoo import load_family

EVAL_IMAGES = (
    30_000 * 50 * 2 / 3
)  # images of 50 steps with guidance, in training images: a backward pass is two forward ones
SCORING_SEC = 8 * 65.0  # of a device: NVIDIA's logs, 65 s on 8 H100
GPUS_A_NODE = 8
ENDS = ("", "_low", "_high")
MEASURED_PX = 512 * 512  # images of the committed records of data
MEASURED_MOMENTS_BYTES = 2 * 8 * 64 * 64  # of SD2 at 512 px; the rest of a sample there is its caption
LLAMA_HOURS = 16_384 * 54 * 24 / 419
"""Device-hours a failure: 419 unexpected interruptions in 54 days on 16,384 H100. The Llama 3 Herd of Models,
arXiv:2407.21783, section 3.3.4."""
NEVER = 30.0
"""w + d and R over M, together: exp() of it is 1e13. A run that takes so many times its training never ends."""


@dataclass(frozen=True)
class ScalingConfig:
    """The keys of preflight.scaling."""

    gpu: Literal["A100", "H100", "H200", "B200", "GB200"] | None = None
    """Kind of GPU. null: the records', and H200 without one."""
    gpus: tuple[int, ...] = limited((8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), 1, 65536)
    """Numbers of GPUs."""
    node_link: Literal["nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5"] | None = None
    """Link within a domain. null: the GPU's usual one."""
    cluster_link: (
        Literal["infiniband_hdr", "infiniband_ndr", "ethernet_3200", "ethernet_1600", "ethernet_400", "ethernet_100"]
        | None
    ) = None
    """Link between domains; Ethernet by the Gbit/s of a node of 8. null: the GPU's usual one."""
    domain: int | None = limited(None, 1, 4096)
    """GPUs that the inner link joins. null: 8, of GB200 72."""
    images: int | None = limited(None, 1)
    """Images to train. null: those of the run's max_duration."""
    price_per_gpu_hour: float | None = limited(None, 0.0, above=True)
    """Price of a GPU for an hour, in any currency. null: no cost is told."""
    price_date: str | None = None
    """Of the price, as 2026-11-25; it belongs to a price."""
    mtbf_hours: float = limited(round(LLAMA_HOURS, -2), 1.0)
    """Hours between two failures of a GPU; the default is Llama 3's training: arXiv:2407.21783, section 3.3.4."""
    resume_sec: float = limited(300.0, 0.0)
    """Seconds from a failure until training goes on. The default is of the 80 to 340 that MLPerf's submissions start in."""
    write_gib_per_sec: float = limited(1.0, 0.0, above=True)
    """Speed at which a checkpoint is written."""
    holds_up: bool = True
    """Training waits while a checkpoint is written."""
    eval_gpu_sec: float | None = limited(None, 0.0, above=True)
    """Seconds of a measured evaluation times its GPUs. null: by its FLOPs."""
    store_mb_per_sec: float | None = limited(None, 0.0, above=True)
    """What the store gives each node. null: no limit is reckoned."""
    cores: int | None = limited(None, 1, 4096)
    """Processor cores of a node for its loaders. null: no limit is reckoned."""
    results: str = "scaling/scaling.json"
    """File of the record; the pictures lie beside it."""


@dataclass(frozen=True)
class Facts:
    """What a run is, as far as its cost goes.

    save_images: images between two checkpoints; 0: it saves none. sample_bytes, sample_cpu_sec: of reading a sample; None:
    nothing is read.
    """

    name: str
    step: Step
    batch: int
    images: int
    num_evals: int = 0
    checkpoint_gib: float = 0.0
    save_images: int = 0
    sample_bytes: float | None = None
    sample_cpu_sec: float | None = None


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
    keys = {key: getattr(config, key) for key in (MICROBATCH, *SETTINGS)} | {"family": config.model.family}
    step = step_of(keys, cost.flops_per_image / 1e12, cost.trained_parameters)
    every = config.eval.every_images if config.eval.when == "in_training" else None
    return Facts(
        name,
        step,
        config.global_batch_size,
        images,
        num_evals=images // every if every else 0,
        checkpoint_gib=cost.checkpoint_gib(ema=config.ema.enabled) if config.save.is_on else 0.0,
        save_images=config.save.every_images or 0,
        **({} if config.data.synthetic else _of_sample(config)),
    )


def _of_sample(config: Any) -> dict[str, float]:
    """Return bytes and processor seconds of a sample of this run's size, by the committed records of 512 px.

    An image's file and its processor time grow with its area; moments and text states have their exact bytes, and are read
    at the processor time that was measured.
    """
    speed, images = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("data_speed", "images_speed"))
    if config.data.stage == "images":
        area = math.prod(config.size) / MEASURED_PX
        cpu_sec = 1e-6 * images["ours_cpu_us_an_image"]
        return {"sample_bytes": area * speed["images_bytes_a_sample"], "sample_cpu_sec": area * cpu_sec}
    family = load_family(config.model.family, config.model.preset, config.model.variant)
    columns = family.columns("moments", config.size, stored_text=config.data.text == "stored").values()
    floats = sum(math.prod(of.shape) * of.dtype.itemsize for of in columns if of.dtype.is_floating_point)
    num_bytes = speed["ours_bytes_a_sample"] + floats - MEASURED_MOMENTS_BYTES
    return {"sample_bytes": num_bytes, "sample_cpu_sec": 1e-6 * speed["ours_worker_cpu_us_a_sample"]}


def differences(config: Any, run: Measured) -> list[str]:
    """Return `key (the record's value, here the run's)` of what a record and a run do not share, as far as it has them."""
    own = {key: getattr(config.model, key) for key in ("family", "preset", "variant")}
    own |= {"stage": config.data.stage, "synthetic": config.data.synthetic, "image_size": list(config.size)}
    own |= {"ema": config.ema.enabled, **{key: getattr(config, key) for key in (MICROBATCH, *SETTINGS)}}
    record = {**run.record.settings, **{key: of for key, of in run.record.what.items() if of is not NOT_RECORDED}}
    if isinstance(side := record.get("image_size"), int):
        record["image_size"] = [side, side]
    apart = [key for key in own if record.get(key) not in (None, own[key]) and own[key] != "auto"]
    return [f"{key} ({shown(str(record[key]))}, here {own[key]})" for key in apart]


# --- what is not the step ---


def daly_sec(d: float, m: float) -> float:
    """Return Daly's higher-order w; where checkpoints are short it is Young's, sqrt(2 d M)."""
    if d >= 2 * m:
        return m
    x = d / (2 * m)
    return math.sqrt(2 * d * m) * (1 + math.sqrt(x) / 3 + x / 9) - d


def overhead_frac(w: float, d: float, r: float, m: float) -> float:
    """Return the expected time of a run over that of its training alone, less 1: checkpoints, lost work and restarts.

    A run without checkpoints is one segment: w its whole training, d 0. inf: it never ends.
    """
    if (w + d + r) / m > NEVER or not w:
        return math.inf
    return m * math.exp(r / m) * math.expm1((w + d) / m) / w - 1


def eval_sec(num: int, tflops_a_device: float, share: float = 1.0) -> float:
    """Return the seconds of an evaluation on N devices: 30,000 images of 50 steps with guidance, and their scoring.

    Args:
        tflops_a_device: delivered in training.
        share: of it, delivered in an evaluation.
    """
    return (EVAL_IMAGES * REFERENCE_TFLOP / tflops_a_device + SCORING_SEC) / share / num


def estimates(
    predictor: Predictor, facts: Facts, nums: Sequence[int], config: ScalingConfig, eval_share: float
) -> list[dict[str, Any]]:
    """Return a row for each number of devices; times: the speed over that of the first one, a node."""
    rows = [estimate(predictor, facts, num, config, eval_share) for num in nums]
    return [{**row, **_over_one_node(predictor, row, rows[0])} for row in rows]


def estimate(predictor: Predictor, facts: Facts, num: int, config: ScalingConfig, share: float = 1.0) -> dict[str, Any]:
    """Return a row: a run on N devices. Where there are more devices than images of a batch, the batch is raised to them.

    A time without an end is inf.
    """
    batch, nodes = max(facts.batch, num), max(1, num / GPUS_A_NODE)
    speed, limit = _limited(predictor.predict(num, batch), nodes, facts, config)
    tflops = math.exp(predictor.law.theta[predictor.law.series.index(predictor.rate)]) * facts.step.tflop
    each = config.eval_gpu_sec / num if config.eval_gpu_sec else eval_sec(num, tflops, share)
    evaluation, price = facts.num_evals * each, config.price_per_gpu_hour
    row = {"num": num, "global_batch_size": batch, "limit": limit, **speed.named("images_per_sec")}
    row |= {"train_hours": facts.images / speed.value / 3600, "eval_hours": evaluation / 3600}
    for end, value in zip(ENDS, (speed.value, speed.high, speed.low), strict=True):
        seconds = facts.images / value + evaluation
        failures = _failures(facts, num, config, seconds)
        wall = seconds * (1 + (failures["overhead_frac"] or 0.0))
        row |= {f"days{end}": wall / 86400, f"gpu_hours{end}": num * wall / 3600}
        row |= {f"cost{end}": None if price is None else price * num * wall / 3600}
        row |= {} if end else failures
    for key, of, unit in (("mb_per_sec", facts.sample_bytes, 1e-6), ("cores", facts.sample_cpu_sec, 1.0)):
        row[f"node_{key}"] = None if of is None else speed.value / nodes * of * unit
    return row


def _limited(speed: Interval, nodes: float, facts: Facts, config: ScalingConfig) -> tuple[Interval, str | None]:
    """Return images/s, and what limits them where data do: the store or the cores of a node."""
    limits = []
    if facts.sample_bytes and config.store_mb_per_sec:
        limits.append((nodes * (1e6 * config.store_mb_per_sec / facts.sample_bytes), "the store"))
    if facts.sample_cpu_sec and config.cores:
        limits.append((nodes * (config.cores / facts.sample_cpu_sec), "cores"))
    most, limit = min(limits, default=(math.inf, None))
    if most >= speed.value:
        return speed, None
    return Interval(most, min(most, speed.low), min(most, speed.high)), limit


def _over_one_node(predictor: Predictor, row: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    """Return the speed of a row over that of one node of 8, `base`, with its interval by the law's delta method on both.

    What both depend on, the rate first of all, cancels out. Where data limit one of them, their intervals are divided.
    """
    speeds, of_base = ([of[f"images_per_sec{end}"] for end in ENDS] for of in (row, base))
    if row["num"] == base["num"]:
        return Interval(1.0, 1.0, 1.0).named("times")
    times, law = speeds[0] / of_base[0], predictor.law
    if row["limit"] or base["limit"]:
        return Interval(times, speeds[1] / of_base[2], speeds[2] / of_base[1]).named("times")
    points = predictor.points([(of["num"], of["global_batch_size"]) for of in (row, base)])
    slope, other = jacobian(law.theta, points)
    slope = slope - other
    grown = law.by_doubling * np.diff(doublings_of(points))[0]
    deviation = np.sqrt(2 * law.noise**2 + slope @ law.covariance @ slope + grown**2)  # a noise each
    factor = float(np.exp(law.reach(deviation)))
    return Interval(times, times / factor, times * factor).named("times")


def _failures(facts: Facts, num: int, config: ScalingConfig, seconds: float) -> dict[str, float | None]:
    """Return the best cadence and what it costs; and what the run's own costs. `seconds`: of training and evaluations.

    A checkpoint written beside training holds up nothing, but takes its time. Without checkpoints the run is one segment, and
    has no cadence.
    """
    between, resume = 3600 * config.mtbf_hours / num, config.resume_sec
    writes = facts.checkpoint_gib / config.write_gib_per_sec
    held = writes if config.holds_up else 0.0
    every, own = (max(daly_sec(held, between) if held else 0.0, writes, 1.0) if writes else None), None
    if writes and facts.save_images:
        own = max(min(facts.save_images / facts.images, 1.0) * seconds, 0.0 if config.holds_up else writes)
    return {
        "mtbf_hours": config.mtbf_hours / num,
        "save_every_sec": every,
        "overhead_frac": overhead_frac(seconds if every is None else every, held, resume, between),
        "own_every_sec": own,
        "own_frac": None if own is None else overhead_frac(own, held, resume, between),
    }
