"""The constants of the MLPerf benchmark: target, evaluation interval, the reference's hyper-parameters, its runs' samples.

MLPerf Training, text-to-image (Stable Diffusion v2), rounds v3.1 to v5.0; FLUX.1 replaced it in v5.1. Sources:

    rules        mlcommons/training_policies at d73e20f1, training_rules.adoc
    reference    mlcommons/training at aa344c7f, retired_benchmarks/stable_diffusion/
    points       mlcommons/logging at 7bbf7926, rcp_checker/training_RULESET/rcps_stable_diffusion.json

A reference point (RCP in the rules) is a set of runs of the reference at one global batch size and learning rate. It lists
the samples that each run took to the target. A submission that converges in clearly fewer is not accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TARGET_FID = 90.0  # at most, and
TARGET_CLIP = 0.15  # at least, on the same checkpoint (rules)
TRAIN_SAMPLES = 6_513_144  # in 832 shards, all of them (main.py of the reference)
NUM_PROMPTS = 30_000  # of val2014_30k.tsv, one image per prompt (reference)
CHECKPOINT_EVERY_IMAGES = 512_000  # rules; see `checkpoint_batches`
WARMUP_BATCHES = 1000  # at every global batch size (configs/ of the reference, and every reference point)

RULESETS = ("4.0.0", "4.1.0", "5.0.0")
"""Rulesets that a run can be compared with; not 3.1.0, which counted steps instead of samples."""
NEWEST = RULESETS[-1]


@dataclass(frozen=True)
class ReferencePoint:
    """Runs of the reference at one global batch.

    rulesets: the ones that list it; lr_per_image: learning rate after the warm-up / global batch size (as in the files);
    platform: the hardware; images: samples to the target, one number per run, sorted.
    """

    rulesets: tuple[str, ...]
    global_batch_size: int
    lr_per_image: float
    warmup_batches: int
    platform: str
    images: tuple[int, ...]

    @property
    def lr(self) -> float:
        """Learning rate after the warm-up."""
        return self.lr_per_image * self.global_batch_size

    @property
    def mean_images(self) -> float:
        """Mean samples to the target without the best and the worst run (the rules' olympic mean)."""
        kept = self.images[1:-1]
        return sum(kept) / len(kept)

    @property
    def fastest_images(self) -> int:
        """Samples of the run that took the fewest."""
        return self.images[0]

    @property
    def slowest_images(self) -> int:
        """Samples of the run that took the most."""
        return self.images[-1]

    def batches(self, images: float) -> int:
        """Return the number of batches after which this many images have been seen, rounded up."""
        return math.ceil(images / self.global_batch_size)


def _point(
    rulesets: Sequence[str], global_batch_size: int, lr_per_image: float, platform: str, runs: Mapping[int, int]
) -> ReferencePoint:
    """`runs`: samples to the target -> number of runs that took that many."""
    images = tuple(sorted(count for count, num in runs.items() for _ in range(num)))
    return ReferencePoint(tuple(rulesets), global_batch_size, lr_per_image, WARMUP_BATCHES, platform, images)


REFERENCE_POINTS = (
    _point(["5.0.0"], 256, 2.8e-7, "4xDGX-H100", {1_536_000: 13, 2_048_000: 7}),
    _point(["5.0.0"], 384, 2.3e-7, "2xDGX-H100", {1_536_768: 2, 2_049_024: 16, 2_561_280: 2}),
    _point(["5.0.0"], 512, 2.3e-7, "4xDGX-H100", {1_536_000: 2, 2_048_000: 14, 2_560_000: 4}),
    _point(["4.1.0"], 256, 1.8e-7, "4xDGX-H100", {1_536_000: 2, 2_048_000: 16, 2_560_000: 2}),
    _point(["4.0.0", "4.1.0"], 384, 1.25e-7, "16xDGX-H100", {2_049_024: 3, 2_561_280: 9, 3_073_536: 3}),
    _point(["4.0.0", "4.1.0"], 512, 1.25e-7, "32xDGX-A100", {2_560_000: 13, 3_072_000: 1}),
    _point(RULESETS, 1024, 1.25e-7, "32xDGX-A100", {2_560_000: 6, 3_072_000: 7}),
    _point(RULESETS, 2048, 1.25e-7, "32xDGX-A100", {3_584_000: 4, 4_096_000: 7, 4_608_000: 2}),
)


def checkpoint_batches(global_batch_size: int) -> int:
    """Return the batches between two checkpoints of the benchmark: CEIL(512000 / global batch), e.g. 1334 at 384 (rules)."""
    return -(-CHECKPOINT_EVERY_IMAGES // global_batch_size)


def points_of(ruleset: str = NEWEST) -> tuple[ReferencePoint, ...]:
    """Return a ruleset's reference points, sorted by global batch size. Raises ValueError: an unknown ruleset."""
    if ruleset not in RULESETS:
        raise ValueError(f"ruleset: '{ruleset}' has no reference points here. Known: {', '.join(RULESETS)}.")
    found = [point for point in REFERENCE_POINTS if ruleset in point.rulesets]
    return tuple(sorted(found, key=lambda point: point.global_batch_size))


def reference_point(global_batch_size: int, ruleset: str = NEWEST) -> ReferencePoint | None:
    """Return a ruleset's point at exactly this global batch size, or None. Raises ValueError: an unknown ruleset."""
    return next((point for point in points_of(ruleset) if point.global_batch_size == global_batch_size), None)


def nearest(global_batch_size: int, ruleset: str = NEWEST) -> tuple[ReferencePoint, ...]:
    """Return the points at the next smaller and the next larger global batch size; at an end of the table only one.

    Raises ValueError: an unknown ruleset.
    """
    points = points_of(ruleset)
    below = [point for point in points if point.global_batch_size < global_batch_size]
    above = [point for point in points if point.global_batch_size > global_batch_size]
    return (*below[-1:], *above[:1])


def no_point(global_batch_size: int, ruleset: str = NEWEST) -> str:
    """Return the message that there is no point at this global batch size; it names the nearest."""
    near = ", ".join(
        f"{p.global_batch_size} ({p.lr_per_image:g} an image)" for p in nearest(global_batch_size, ruleset)
    )
    return f"no reference point at a global batch of {global_batch_size} (ruleset {ruleset}). Nearest: {near}."


def lr_per_image(global_batch_size: int, ruleset: str = NEWEST) -> float:
    """Return the reference's learning rate per image of the global batch.

    Values are not interpolated: the reference's rate per image follows no rule (2.8e-7 at 256, 1.25e-7 at 1024).

    Raises:
        ValueError: no point at this global batch size (names the nearest), or an unknown ruleset.
    """
    point = reference_point(global_batch_size, ruleset)
    if point is None:
        raise ValueError(f"{no_point(global_batch_size, ruleset)} Give optimizer.lr_per_image.")
    return point.lr_per_image


# --- how a run differs from the reference ---

# The reference's values (its configs/train_*.yaml, ldm/ and the rules' table of hyper-parameters). A submission to the closed
# division must use the same.
FIXED = {
    "image_size": 512,
    "model.preset": "full",
    "objective.prediction": "v",
    "objective.weighting": "none",
    "objective.timesteps": "uniform",
    "objective.caption_dropout": 0.0,
    "objective.zero_terminal_snr": False,
    "objective.offset_noise": 0.0,
    "data.normalize": "unit",  # mlcommons/training issue 721: not normalised; not to be fixed
    "data.posterior": "sample",
    "data.flip": False,
    "data.crop": "center",  # text may be encoded beforehand: NVIDIA's submissions do
    "optimizer.name": "adamw",
    "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.01,
    "optimizer.decay": "all",
    "optimizer.clip_norm": None,
    "schedule.name": "constant",
    "ema.enabled": False,
}
EVALUATION = {
    "eval.num_prompts": None,
    "eval.guidance": 8.0,
    "eval.steps": 50,
    "eval.sampler": "ddim",
    "eval.resize": "bilinear299",
    "target.fid": TARGET_FID,
    "target.clip": TARGET_CLIP,
}
"""The same for runs with evaluation."""

RELATIVE_TOLERANCE = 1e-6  # a learning rate typed with seven digits counts as equal


def deviations(values: Mapping[str, Any], ruleset: str = NEWEST) -> list[str]:
    """Return one line per key in which a run differs from the benchmark's reference: "KEY: GIVEN; the reference: X".

    Args:
        values: key -> value of a resolved run, as `config.flat` gives them. Missing keys are not compared.
        ruleset: the free keys are compared with its reference points.
    """
    return fixed_deviations(values) + free_deviations(values, ruleset)


def fixed_deviations(values: Mapping[str, Any]) -> list[str]:
    """Return the `deviations` that the closed division forbids."""
    found = []
    evaluated = {} if values.get("eval.when", "off") == "off" else EVALUATION
    for key, wanted in {**FIXED, **evaluated}.items():
        given = values.get(key, wanted)
        square = [given, given] if key == "image_size" and isinstance(given, int) else given
        if not _same(square, [wanted, wanted] if key == "image_size" else wanted):
            found.append(f"{key}: {_shown(given)}; the reference: {_shown(wanted)}")
    every = checkpoint_batches(values["global_batch_size"]) * values["global_batch_size"]
    key, given = "save.snapshot_every_images", values.get("save.snapshot_every_images", every)
    if given not in (None, every) and not values.get("data.synthetic"):
        found.append(f"{key}: {_shown(given)}; the rules: {every}")
    return found


def not_closed(values: Mapping[str, Any]) -> list[str]:
    """Return everything that keeps a run out of the closed division, in the format of `deviations`.

    Args:
        values: as in `deviations`, with all keys of a run.
    """
    found = []
    wanted_keys = {"model.family": "sd2", "model.variant": "mlperf", "model.denoiser": None, "data.synthetic": False}
    wanted_keys |= {"validation.remote": None, "samples.every_images": None}  # they come before run_start, too
    for key, wanted in wanted_keys.items():
        if values.get(key) != wanted:
            found.append(f"{key}: {_shown(values[key])}; the reference: {_shown(wanted)}")
    for key in ("model.weights", "eval.inception", "eval.clip"):
        if values.get(key) == "random":
            found.append(f"{key}: random; the reference: its published weights")
    every = checkpoint_batches(values["global_batch_size"]) * values["global_batch_size"]
    for key, wanted in {"eval.every_images": every, "eval.image_size": FIXED["image_size"]}.items():
        if values.get(key) not in (None, wanted, [wanted, wanted], (wanted, wanted)):
            found.append(f"{key}: {_shown(values[key])}; the rules: {wanted}")
    return found + fixed_deviations(values)


def free_deviations(values: Mapping[str, Any], ruleset: str = NEWEST) -> list[str]:
    """Return the `deviations` in what the closed division leaves free: global batch size, learning rate, warm-up."""
    free, global_batch_size = "free in the closed division", values["global_batch_size"]
    point, found = reference_point(global_batch_size, ruleset), []
    key = "optimizer.lr" if values.get("optimizer.lr_per_image") is None else "optimizer.lr_per_image"
    if point is None:
        found.append(f"global_batch_size: {global_batch_size}; {free}; {no_point(global_batch_size, ruleset)}")
    elif not _same(given := values.get(key), wanted := point.lr if key == "optimizer.lr" else point.lr_per_image):
        found.append(f"{key}: {_shown(given)}; {free}; the reference point has {wanted:g}")
    batches, images = values.get("schedule.warmup_batches"), values.get("schedule.warmup_images")
    if (batches if images is None else math.ceil(images / global_batch_size)) != WARMUP_BATCHES:
        key, given = ("schedule.warmup_batches", batches) if images is None else ("schedule.warmup_images", images)
        points = "the reference point has" if point else "every reference point has"
        found.append(f"{key}: {_shown(given)}; {free}; {points} {WARMUP_BATCHES} batches")
    return found


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, list | tuple) and isinstance(wanted, list | tuple):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (given, wanted))
    return math.isclose(given, wanted, rel_tol=RELATIVE_TOLERANCE) if are_numbers else given == wanted


def _shown(value: Any) -> str:
    """A value as YAML writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
