"""What a run takes on N devices: images/s by the law, then data, evaluation, checkpoints and failures, in hours and money.

A device is as fast as that of a record, or of a published series. FLOPs carry the rate from one network to another: the same
TFLOP/s of a device, so at the same utilization.

Failures are a Poisson process:

    M      mean time between failures of the whole run, s: that of a device over their number
    d      seconds that a checkpoint holds up training
    R      seconds from a failure until training continues
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
from scipy import stats
from scipy.optimize import least_squares

from common.value_types import limited, truncate
from families import load_family
from families.mlperf import FLUX, Benchmark
from reports.compare import NOT_RECORDED
from scaling.devices import MICROBATCH, RESULTS, SETTINGS, MeasuredRun, Predictor, Step, step_of
from scaling.law import COVERED, REFERENCE_TFLOP, TITLES, Array, Interval, PublishedPoint, doublings_of, jacobian
from training.optimizer import images_of

EVAL_IMAGES = 30_000 * 50 * 2 / 3
"""Images of 50 steps with guidance, in training images: a backward pass is two forward ones."""
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
    """The keys of scaling."""

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
    """Price of a GPU for an hour, in any currency. null: no cost is reported."""
    price_date: str | None = None
    """Of the price, as 2026-11-25; it belongs to a price."""
    mtbf_hours: float = limited(round(LLAMA_HOURS, -2), 1.0)
    """Hours between two failures of a GPU; the default is Llama 3's training: arXiv:2407.21783, section 3.3.4."""
    resume_sec: float = limited(300.0, 0.0)
    """Seconds from a failure until training continues. The default is of the 80 to 340 that MLPerf's submissions start in."""
    write_gib_per_sec: float = limited(1.0, 0.0, above=True)
    """Speed at which a checkpoint is written."""
    holds_up: bool = True
    """Training waits while a checkpoint is written."""
    eval_gpu_sec: float | None = limited(None, 0.0, above=True)
    """Seconds of a measured evaluation times its GPUs. null: by its FLOPs."""
    store_mb_per_sec: float | None = limited(None, 0.0, above=True)
    """What the store gives each node. null: no limit is assumed."""
    cores: int | None = limited(None, 1, 4096)
    """Processor cores of a node for its loaders. null: no limit is assumed."""
    results: str = "runs/scaling/scaling.json"
    """File of the record; the plots lie next to it."""


@dataclass(frozen=True)
class RunSpec:
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


def run_spec_of(config: Any, cost: Any, name: str, images: int | None) -> RunSpec:
    """Return the spec of a run.

    Args:
        config: its configuration; cost: of its step, traced.
        images: to train; None: those of max_duration.

    Raises:
        ValueError: max_duration is in epochs, and no images are given.
    """
    images = images or images_of(config.max_duration, config.global_batch_size)
    if images is None:
        problem = f"{config.max_duration}; how many images that is cannot be known before the data is read"
        raise ValueError(f"max_duration: {problem}. Possible: batches or samples. Give images=NUMBER, or 850000ba.")
    keys = {key: getattr(config, key) for key in (MICROBATCH, *SETTINGS)} | {"family": config.model.family}
    step = step_of(keys, cost.flops_per_image / 1e12, cost.trained_parameters)
    every = config.eval.every_images if config.eval.when == "in_training" else None
    return RunSpec(
        name,
        step,
        config.global_batch_size,
        images,
        num_evals=images // every if every else 0,
        checkpoint_gib=cost.checkpoint_gib(ema=config.ema.enabled) if config.save.is_on else 0.0,
        save_images=config.save.every_images or 0,
        **({} if config.data.synthetic else _sample_cost(config)),
    )


def _sample_cost(config: Any) -> dict[str, float]:
    """Return bytes and processor seconds of a sample of this run's size, by the committed records of 512 px.

    An image's file and its processor time grow with its area; moments and text states have their exact bytes, and are read
    at the processor time that was measured.
    """
    speed = json.loads((RESULTS / "data_speed.json").read_text())
    if config.data.stage == "images":
        area = math.prod(config.size) / MEASURED_PX
        cpu_sec = 1e-6 * speed["images_ours_cpu_us_a_sample"]
        return {"sample_bytes": area * speed["images_bytes_a_sample"], "sample_cpu_sec": area * cpu_sec}
    family = load_family(config.model.family, config.model.preset, config.model.variant)
    columns = family.columns("moments", config.size, stored_text=config.data.text == "stored").values()
    floats = sum(
        math.prod(column.shape) * column.dtype.itemsize for column in columns if column.dtype.is_floating_point
    )
    num_bytes = speed["moments_bytes_a_sample"] + floats - MEASURED_MOMENTS_BYTES
    return {"sample_bytes": num_bytes, "sample_cpu_sec": 1e-6 * speed["moments_ours_cpu_us_a_sample"]}


def differences(config: Any, run: MeasuredRun) -> list[str]:
    """Return `key (the record's value, here the run's)` of what a record and a run do not share, as far as it has them."""
    values = {key: getattr(config.model, key) for key in ("family", "preset", "variant")}
    values |= {"stage": config.data.stage, "synthetic": config.data.synthetic, "image_size": list(config.size)}
    values |= {"ema": config.ema.enabled, **{key: getattr(config, key) for key in (MICROBATCH, *SETTINGS)}}
    record = {
        **run.record.settings,
        **{key: value for key, value in run.record.what.items() if value is not NOT_RECORDED},
    }
    if isinstance(side := record.get("image_size"), int):
        record["image_size"] = [side, side]
    apart = [key for key in values if record.get(key) not in (None, values[key]) and values[key] != "auto"]
    return [f"{key} ({truncate(str(record[key]))}, here {values[key]})" for key in apart]


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


def estimate_all(
    predictor: Predictor, spec: RunSpec, nums: Sequence[int], config: ScalingConfig, eval_share: float
) -> list[dict[str, Any]]:
    """Return a row for each number of devices; times: the speed over that of the first one, a node."""
    rows = [estimate(predictor, spec, num, config, eval_share) for num in nums]
    return [{**row, **_speedup_over_node(predictor, row, rows[0])} for row in rows]


def estimate(
    predictor: Predictor, spec: RunSpec, num: int, config: ScalingConfig, share: float = 1.0
) -> dict[str, Any]:
    """Return a row: a run on N devices. Where there are more devices than images of a batch, the batch is raised to them.

    A time without an end is inf.
    """
    batch, nodes = max(spec.batch, num), max(1, num / GPUS_A_NODE)
    speed, limit = _limit_by_data(predictor.predict(num, batch), nodes, spec, config)
    tflops = math.exp(predictor.law.theta[predictor.law.series.index(predictor.rate)]) * spec.step.tflop
    each = config.eval_gpu_sec / num if config.eval_gpu_sec else eval_sec(num, tflops, share)
    evaluation, price = spec.num_evals * each, config.price_per_gpu_hour
    row = {"num": num, "global_batch_size": batch, "limit": limit, **speed.named("images_per_sec")}
    row |= {"train_hours": spec.images / speed.value / 3600, "eval_hours": evaluation / 3600}
    for end, value in zip(ENDS, (speed.value, speed.high, speed.low), strict=True):
        seconds = spec.images / value + evaluation
        failures = _failure_cost(spec, num, config, seconds)
        wall = seconds * (1 + (failures["overhead_frac"] or 0.0))
        row |= {f"days{end}": wall / 86400, f"gpu_hours{end}": num * wall / 3600}
        row |= {f"cost{end}": None if price is None else price * num * wall / 3600}
        row |= {} if end else failures
    for key, per_sample, unit in (("mb_per_sec", spec.sample_bytes, 1e-6), ("cores", spec.sample_cpu_sec, 1.0)):
        row[f"node_{key}"] = None if per_sample is None else speed.value / nodes * per_sample * unit
    return row


def _limit_by_data(speed: Interval, nodes: float, spec: RunSpec, config: ScalingConfig) -> tuple[Interval, str | None]:
    """Return images/s, and what limits them where data do: the store or the cores of a node."""
    limits = []
    if spec.sample_bytes and config.store_mb_per_sec:
        limits.append((nodes * (1e6 * config.store_mb_per_sec / spec.sample_bytes), "the store"))
    if spec.sample_cpu_sec and config.cores:
        limits.append((nodes * (config.cores / spec.sample_cpu_sec), "cores"))
    most, limit = min(limits, default=(math.inf, None))
    if most >= speed.value:
        return speed, None
    return Interval(most, min(most, speed.low), min(most, speed.high)), limit


def _speedup_over_node(predictor: Predictor, row: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
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
    factor = float(np.exp(law.log_radius(deviation)))
    return Interval(times, times / factor, times * factor).named("times")


def _failure_cost(spec: RunSpec, num: int, config: ScalingConfig, seconds: float) -> dict[str, float | None]:
    """Return the best cadence and what it costs; and what the run's own costs. `seconds`: of training and evaluations.

    A checkpoint written beside training holds up nothing, but takes its time. Without checkpoints the run is one segment, and
    has no cadence.
    """
    mtbf_sec, resume = 3600 * config.mtbf_hours / num, config.resume_sec
    writes = spec.checkpoint_gib / config.write_gib_per_sec
    held = writes if config.holds_up else 0.0
    every, own_every = (max(daly_sec(held, mtbf_sec) if held else 0.0, writes, 1.0) if writes else None), None
    if writes and spec.save_images:
        own_every = max(min(spec.save_images / spec.images, 1.0) * seconds, 0.0 if config.holds_up else writes)
    return {
        "mtbf_hours": config.mtbf_hours / num,
        "save_every_sec": every,
        "overhead_frac": overhead_frac(seconds if every is None else every, held, resume, mtbf_sec),
        "own_every_sec": own_every,
        "own_frac": None if own_every is None else overhead_frac(own_every, held, resume, mtbf_sec),
    }


# --- images to the target over the global batch ---
#
#     images = E (1 + B / C)
#
# E is what tiny batches need, C the critical batch, at which twice as many are needed: McCandlish et al. 2018, "An
# Empirical Model of Large-Batch Training", arXiv:1812.06162, with batches times steps for the examples. It is fitted to
# the logarithms of the images of a benchmark's reference points. Their learning rates and warm-ups differ: the
# reference chose them for each.

OUTSIDE = 2.0  # batches are tried from the smallest point's over this to the largest's times this
BATCHES_OCTAVE = 8
MOST_A_DEVICE = 64


@dataclass(frozen=True)
class Convergence:
    """A fitted law of images to the target. theta: log E, log C. covariance: (2, 2). batches: of the points."""

    theta: Array
    covariance: Array
    batches: tuple[int, ...]

    def _log_radius(self, variance: Any) -> Any:
        """Return how far an interval goes: runs of one point share its learning rate, so points count, not runs."""
        return stats.t.ppf((1 + COVERED) / 2, max(1, len(self.batches) - 2)) * np.sqrt(variance)

    def images(self, batch: float) -> Interval:
        """Return the mean images to the target at a global batch."""
        e, c = np.exp(self.theta)
        slope = np.array([1.0, -(batch / c) / (1 + batch / c)])
        return Interval.of_log(np.log(e * (1 + batch / c)), self._log_radius(slope @ self.covariance @ slope))

    def parameters(self) -> tuple[Interval, Interval]:
        """Return E and C."""
        e, c = map(Interval.of_log, self.theta, self._log_radius(np.diag(self.covariance)))
        return e, c


def convergence(benchmark: Benchmark, ruleset: str | None = None) -> Convergence:
    """Fit a ruleset's reference points, the newest's with None.

    The covariance is that of points: their means scatter more than their runs say.
    """
    points = benchmark.list_points(ruleset)
    batches = np.array([point.global_batch_size for point in points], float)
    logs = [np.log(point.images) for point in points]
    y = np.array([np.mean(values) for values in logs])
    start = np.array([y.min() - 0.1, np.log(batches.max())])
    solution = least_squares(lambda theta: theta[0] + np.log1p(batches / np.exp(theta[1])) - y, start)
    within = np.concatenate([values - np.mean(values) for values in logs])
    of_runs = np.sum(within**2) / (len(within) - len(points)) / np.mean([len(values) for values in logs])
    between_variance = np.sum(solution.fun**2) / max(1, len(points) - 2)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac) * max(between_variance, of_runs)
    return Convergence(solution.x, covariance, tuple(map(int, batches)))


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
    log_width = np.hypot(np.log(speed.high / speed.value), np.log(images.high / images.value))
    value = images.value / speed.value
    return Interval(value + extra_sec, *(float(value * np.exp(sign * log_width)) + extra_sec for sign in (-1, 1)))


def time_to_target(
    title: str,
    benchmark: Benchmark,
    ruleset: str | None,
    predictors: Mapping[int, Predictor],
    published: Sequence[PublishedPoint],
    price: float | None,
) -> dict[str, Any]:
    """Return time, device-hours and money to the target over the batch, for each number of devices.

    Args:
        published: results that are shown beside these. price: of an hour of a device.
    """
    images, curves = convergence(benchmark, ruleset), []
    for num, predictor in predictors.items():
        tried = [_try_batch(benchmark, images, predictor, num, batch, price) for batch in batches_of(images, num)]
        if tried:
            curves.append({"num": num, "best": min(tried, key=lambda of: of["minutes"]), "tried": tried})
    e, c = images.parameters()
    return {
        "title": title,
        "target": benchmark.target_text,
        "ruleset": ruleset or benchmark.newest_ruleset,
        "price": price,
        "images": {**e.named("e"), **c.named("c")},
        "points": [point.global_batch_size for point in benchmark.list_points(ruleset)],
        "curves": curves,
        "published": [_published_result(row) for row in published if row.minutes],
    }


def _try_batch(
    benchmark: Benchmark, convergence: Convergence, predictor: Predictor, num: int, batch: int, price: float | None
) -> dict[str, Any]:
    images, speed, extra_sec = convergence.images(batch), predictor.predict(num, batch), 0.0
    if benchmark is FLUX:  # its evaluations count, those of SD may be made afterwards; a forward pass a sample
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


def _published_result(row: PublishedPoint) -> dict[str, Any]:
    result = {"title": TITLES[row.series], "system": row.system, "num": row.num, "global_batch_size": row.batch}
    return {**result, "minutes": row.minutes, "device_hours": row.num * (row.minutes or 0.0) / 60}
