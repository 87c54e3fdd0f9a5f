"""What a run takes on N devices: images/s by the law, then data, evaluation, checkpoints and failures, in hours and money.

A device is as fast as that of a record, or of a published series. FLOPs carry the rate from one network to another: the same
TFLOP/s of a device, so at the same utilisation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model import AUTOCAST_DTYPES, weights_dtype
from preflight.plan import images_of
from preflight.scaling_devices import RESULTS
from preflight.scaling_failures import daly_sec, overhead_frac
from preflight.scaling_fit import Interval, Law
from preflight.scaling_law import CLUSTER_LINKS, NODE_LINKS, REFERENCE_TFLOP, Setup, fixed_of

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


@dataclass(frozen=True)
class Facts:
    """What a run is, as far as its cost goes. TFLOP: an image and training step."""

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

    def setup(self, node_link: str, cluster_link: str, domain: int) -> Setup:
        """Return how the run exchanges gradients over these links."""
        gb = self.gradient_bytes * self.parameters / 1e9
        links = NODE_LINKS[node_link], CLUSTER_LINKS[cluster_link]
        return Setup(self.fixed, gb, *links, domain, self.microbatch, self.volume, self.tflop)


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
    wide, compute = (kind.itemsize for kind in (weights_dtype(config.precision), _compute(config.precision)))
    is_sharded = config.sharding != "off"
    microbatch = config.device_train_microbatch_size
    every = config.eval.every_images if config.eval.when == "in_training" else None
    return Facts(
        name,
        cost.flops_per_image / 1e12,
        cost.trained_parameters,
        config.global_batch_size,
        microbatch if isinstance(microbatch, int) else None,
        images,
        fixed_of(config.model.family, config.cuda_graphs),
        wide,
        # weights gathered twice in the step's precision and gradients scattered in float32, or an all-reduce
        volume=1 + 2 * compute / wide if is_sharded else 2.0,
        stage=None if config.data.synthetic else config.data.stage,
        num_evals=images // every if every else 0,
        checkpoint_gib=cost.checkpoint_gib(ema=config.ema.enabled) if config.save.every_images else 0.0,
    )


def _compute(precision: str) -> Any:
    return AUTOCAST_DTYPES.get(precision, torch.float32)


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


def limit_of(facts: Facts, figures: Mapping[str, Mapping[str, float]], rates: Rates) -> dict[str, float]:
    """Return what limits a node's images/s: `the store`, `cores`; only what is given."""
    of = figures.get(facts.stage or "")
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
    """Return a row: a run on N devices. Where there are more devices than images of a batch, the batch is raised to them."""
    batch = max(facts.batch, num)
    speed = law.predict(setup, rate, num, batch)
    nodes = max(1, num / GPUS_A_NODE)
    limits = {name: nodes * most for name, most in limit_of(facts, figures, rates).items()}
    limit = min(limits, key=limits.__getitem__, default=None)
    if limit is not None and limits[limit] < speed.value:
        most = limits[limit]
        speed = Interval(most, min(most, speed.low), min(most, speed.high))
    else:
        limit = None
    place = law.series.index(rate)
    tflops = float(np.exp(law.theta[place])) * facts.tflop
    training = facts.images / speed.value
    evaluation = facts.num_evals * eval_sec(num, tflops, eval_share, rates.eval_gpu_sec)
    failed = _failures(facts, num, rates)
    wall = {
        end: (facts.images / value + evaluation) * (1 + failed["overhead_frac"])
        for end, value in (("", speed.value), ("_low", speed.high), ("_high", speed.low))
    }
    hours = wall[""] / 3600
    of = figures.get(facts.stage or "", {})
    row: dict[str, Any] = {"num": num, "global_batch_size": batch, "limit": limit}
    row |= _ends("images_per_sec", speed)
    row |= {"train_hours": training / 3600, "eval_hours": evaluation / 3600}
    row |= {f"days{end}": seconds / 86400 for end, seconds in wall.items()} | {"gpu_hours": num * hours}
    row |= {"cost": None if rates.price is None else num * hours * rates.price} | failed
    row |= {"node_mb_per_sec": speed.value / nodes * of["bytes"] / 1e6 if of else None}
    return row | {"node_cores": speed.value / nodes * of["cpu_sec"] if of else None}


def _ends(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _failures(facts: Facts, num: int, rates: Rates) -> dict[str, float]:
    """The best cadence and what it costs. A checkpoint written beside training holds up nothing, but takes its time."""
    between = 3600 * rates.mtbf_hours / num
    writes = facts.checkpoint_gib / rates.write_gib_per_sec
    held = writes if rates.holds_up else 0.0
    every = max(daly_sec(held, between) if held else 0.0, writes, 1.0)
    return {
        "mtbf_hours": rates.mtbf_hours / num,
        "save_sec": held,
        "save_every_sec": every,
        "overhead_frac": overhead_frac(every, held, rates.resume_sec, between),
        "without_failures_frac": held / every,
    }
