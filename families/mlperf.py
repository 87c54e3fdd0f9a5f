"""MLPerf Training's text-to-image benchmarks: their rules, reference points, and how a run differs from the reference.

`Benchmark` holds the rules; SD and FLUX are the two benchmarks, with their constants. Sources of both:

    rules        mlcommons/training_policies at d73e20f1, training_rules.adoc
    points       mlcommons/logging, rcp_checker/training_RULESET/rcps_BENCHMARK.json

A reference point (RCP in the rules) is a set of runs of the reference at one global batch size and learning rate. It lists
the samples that each run took to the target. A submission that converges in clearly fewer is not accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RELATIVE_TOLERANCE = 1e-6  # a learning rate typed with seven digits counts as equal


@dataclass(frozen=True)
class ReferencePoint:
    """Runs of the reference at one global batch.

    rulesets: those that list it; lr_per_image: learning rate after the warm-up / global batch size;
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
        inner_runs = self.images[1:-1]
        return sum(inner_runs) / len(inner_runs)

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


def expand_runs(runs: Mapping[int, int]) -> tuple[int, ...]:
    """Return the samples of each run. `runs`: samples to the target -> number of runs that took that many."""
    return tuple(sorted(count for count, num in runs.items() for _ in range(num)))


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's constants, from its rules, its reference and its reference points."""

    name: str
    """Its name in submissions."""
    family: str
    """The family of its network; the variant is mlperf."""
    rulesets: tuple[str, ...]
    """Rulesets that a run can be compared with, the newest last."""
    points: tuple[ReferencePoint, ...]
    train_samples: int
    """All samples of its training set."""
    eval_samples: int
    """Samples of one evaluation."""
    target: Mapping[str, float]
    """Key of the section `target` -> the value that an evaluation has to reach."""
    target_text: str
    """The target in words."""
    every_images: int
    """Images between two evaluations, before `interval` rounds them up to whole batches."""
    warmup_start: Callable[[int], float]
    """Batches of warm-up -> the learning rate's factor at the first of them."""
    evaluation_key: tuple[str, Any]
    """The key that decides whether a run is evaluated, and its value for a run that is not."""
    reference_values: Mapping[str, Any]
    """The reference's values. A submission to the closed division must use the same."""
    evaluation_values: Mapping[str, Any]
    """Further values of the reference, for runs with evaluation."""
    interval_keys: tuple[str, ...]
    """Keys that have to equal the interval, if they are given and data are real."""
    closed_values: Mapping[str, Any]
    """Further values that the closed division requires."""
    weights_keys: tuple[str, ...]
    """Keys of weights that have to be the published ones in the closed division."""

    @property
    def newest_ruleset(self) -> str:
        """The newest ruleset."""
        return self.rulesets[-1]

    def interval(self, global_batch_size: int) -> int:
        """Return the images between two evaluations that the rules require, e.g. 512,256 for SD at a batch of 384."""
        return -(-self.every_images // global_batch_size) * global_batch_size

    def list_points(self, ruleset: str | None = None) -> tuple[ReferencePoint, ...]:
        """Return a ruleset's reference points, sorted by global batch size; None: the newest's.

        Raises:
            ValueError: an unknown ruleset.
        """
        ruleset = ruleset or self.newest_ruleset
        if ruleset not in self.rulesets:
            raise ValueError(
                f"ruleset: '{ruleset}' has no reference points of {self.name} here. Known: {', '.join(self.rulesets)}."
            )
        points = [point for point in self.points if ruleset in point.rulesets]
        return tuple(sorted(points, key=lambda point: point.global_batch_size))

    def find_point(self, global_batch_size: int, ruleset: str | None = None) -> ReferencePoint | None:
        """Return a ruleset's point at exactly this global batch size, or None. Raises ValueError: an unknown ruleset."""
        points = self.list_points(ruleset)
        return next((point for point in points if point.global_batch_size == global_batch_size), None)

    def nearest_points(self, global_batch_size: int, ruleset: str | None = None) -> tuple[ReferencePoint, ...]:
        """Return the points at the next smaller and the next larger global batch size; only one at an end of the table.

        Raises ValueError: an unknown ruleset.
        """
        points = self.list_points(ruleset)
        below = [point for point in points if point.global_batch_size < global_batch_size]
        above = [point for point in points if point.global_batch_size > global_batch_size]
        return (*below[-1:], *above[:1])

    def format_missing_point(self, global_batch_size: int, ruleset: str | None = None) -> str:
        """Return the message that there is no point at this global batch size; it lists the nearest."""
        nearest = ", ".join(
            f"{p.global_batch_size} ({p.lr_per_image:g} an image)"
            for p in self.nearest_points(global_batch_size, ruleset)
        )
        batch = f"{global_batch_size} (ruleset {ruleset or self.newest_ruleset})"
        return f"no reference point at a global batch of {batch}. Nearest: {nearest}."

    def lr_per_image(self, global_batch_size: int, ruleset: str | None = None) -> float:
        """Return the reference's learning rate per image of the global batch.

        Values are not interpolated: the reference's rate per image follows no rule (SD: 2.8e-7 at 256, 1.25e-7 at 1024).

        Raises:
            ValueError: no point at this global batch size (lists the nearest), or an unknown ruleset.
        """
        point = self.find_point(global_batch_size, ruleset)
        if point is None:
            raise ValueError(f"{self.format_missing_point(global_batch_size, ruleset)} Give optimizer.lr_per_image.")
        return point.lr_per_image

    def warmup_batches(self, global_batch_size: int, ruleset: str | None = None) -> int | None:
        """Return the reference's batches of warm-up; None if there is no point at this batch size and the others differ."""
        points = self.list_points(ruleset)
        point = self.find_point(global_batch_size, ruleset)
        warmups = {point.warmup_batches for point in ([point] if point else points)}
        return warmups.pop() if len(warmups) == 1 else None

    # --- how a run differs from the reference ---

    def deviations(self, values: Mapping[str, Any], ruleset: str | None = None) -> list[str]:
        """Return one line per key in which a run differs from the benchmark's reference: "KEY: GIVEN; the reference: X".

        Args:
            values: key -> value of a resolved run, see `config.flatten`. Missing keys are not compared.
            ruleset: the free keys are compared with its reference points; None: with those of the newest.
        """
        return self.fixed_deviations(values) + self.free_deviations(values, ruleset)

    def fixed_deviations(self, values: Mapping[str, Any]) -> list[str]:
        """Return the `deviations` that the closed division forbids."""
        deviations = []
        key, off = self.evaluation_key
        evaluation_values = {} if values.get(key, off) == off else self.evaluation_values
        for key, reference in {**self.reference_values, **evaluation_values}.items():
            value = values.get(key, reference)
            size = [value, value] if key == "image_size" and isinstance(value, int) else value
            if not _is_equal(size, [reference, reference] if key == "image_size" else reference):
                deviations.append(f"{key}: {_format_yaml(value)}; the reference: {_format_yaml(reference)}")
        interval = self.interval(values["global_batch_size"])
        for key in () if values.get("data.synthetic") else self.interval_keys:
            if values.get(key) not in (None, interval):
                deviations.append(f"{key}: {_format_yaml(values[key])}; the rules: {interval}")
        return deviations

    def closed_deviations(self, values: Mapping[str, Any]) -> list[str]:
        """Return everything that keeps a run out of the closed division, in the format of `deviations`.

        Args:
            values: as in `deviations`, with all keys of a run.
        """
        deviations = []
        run = {"model.family": self.family, "model.variant": "mlperf", "model.denoiser": None, "data.synthetic": False}
        for key, reference in {**run, **self.closed_values}.items():
            if values.get(key) != reference:
                deviations.append(f"{key}: {_format_yaml(values[key])}; the reference: {_format_yaml(reference)}")
        for key in self.weights_keys:
            if values.get(key) == "random":
                deviations.append(f"{key}: random; the reference: its published weights")
        size, interval = self.reference_values["image_size"], self.interval(values["global_batch_size"])
        for key, rule in {"eval.every_images": interval, "eval.image_size": size}.items():
            is_evaluated = values.get("eval.when", "off") != "off"
            if is_evaluated and values.get(key) not in (None, rule, [rule, rule], (rule, rule)):
                deviations.append(f"{key}: {_format_yaml(values[key])}; the rules: {rule}")
        return deviations + self.fixed_deviations(values)

    def free_deviations(self, values: Mapping[str, Any], ruleset: str | None = None) -> list[str]:
        """Return the `deviations` in what the closed division leaves free: global batch size, learning rate, warm-up."""
        free, batch = "free in the closed division", values["global_batch_size"]
        point, deviations = self.find_point(batch, ruleset), []
        key = "optimizer.lr" if values.get("optimizer.lr_per_image") is None else "optimizer.lr_per_image"
        if point is None:
            deviations.append(f"global_batch_size: {batch}; {free}; {self.format_missing_point(batch, ruleset)}")
        elif not _is_equal(
            lr := values.get(key), reference := point.lr if key == "optimizer.lr" else point.lr_per_image
        ):
            deviations.append(f"{key}: {_format_yaml(lr)}; {free}; the reference point has {reference:g}")
        batches, images = values.get("schedule.warmup_batches"), values.get("schedule.warmup_images")
        warmup_batches = batches if images is None else math.ceil(images / batch)
        reference_batches = self.warmup_batches(batch, ruleset)
        if (
            reference_batches is not None
            and warmup_batches != reference_batches
            and (reference_batches, warmup_batches) != (0, None)
        ):
            key, value = ("schedule.warmup_batches", batches) if images is None else ("schedule.warmup_images", images)
            points = "the reference point has" if point else "every reference point has"
            deviations.append(f"{key}: {_format_yaml(value)}; {free}; {points} {reference_batches} batches")
        return deviations


def _is_equal(value: Any, reference: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(reference, list | tuple):
        return len(value) == len(reference) and all(map(_is_equal, value, reference))
    are_numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (value, reference))
    return math.isclose(value, reference, rel_tol=RELATIVE_TOLERANCE) if are_numbers else value == reference


def _format_yaml(value: Any) -> str:
    """Format a value as in YAML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- SD: Stable Diffusion, the benchmark of rounds v3.1 to v5.0 ---
#
# Sources: mlcommons/training at aa344c7f, retired_benchmarks/stable_diffusion/ (the reference); mlcommons/logging at
# 7bbf7926, rcp_checker/training_RULESET/rcps_stable_diffusion.json (the points).

TARGET_FID = 90.0  # at most, and
TARGET_CLIP = 0.15  # at least, on the same checkpoint (rules)
SD_EVERY_IMAGES = 512_000  # a checkpoint every CEIL(512000 / global batch) batches (rules)
SD_WARMUP_BATCHES = 1000  # at every global batch size (configs/ of the reference, and every reference point)
SD_RULESETS = ("4.0.0", "4.1.0", "5.0.0")  # not 3.1.0, which counted steps instead of samples


def _sd_point(
    rulesets: Sequence[str], global_batch_size: int, lr_per_image: float, platform: str, runs: Mapping[int, int]
) -> ReferencePoint:
    """Build a point: the published files have the learning rate per image of the global batch."""
    return ReferencePoint(
        tuple(rulesets), global_batch_size, lr_per_image, SD_WARMUP_BATCHES, platform, expand_runs(runs)
    )


SD = Benchmark(
    name="stable_diffusion",
    family="sd2",
    rulesets=SD_RULESETS,
    points=(
        _sd_point(["5.0.0"], 256, 2.8e-7, "4xDGX-H100", {1_536_000: 13, 2_048_000: 7}),
        _sd_point(["5.0.0"], 384, 2.3e-7, "2xDGX-H100", {1_536_768: 2, 2_049_024: 16, 2_561_280: 2}),
        _sd_point(["5.0.0"], 512, 2.3e-7, "4xDGX-H100", {1_536_000: 2, 2_048_000: 14, 2_560_000: 4}),
        _sd_point(["4.1.0"], 256, 1.8e-7, "4xDGX-H100", {1_536_000: 2, 2_048_000: 16, 2_560_000: 2}),
        _sd_point(["4.0.0", "4.1.0"], 384, 1.25e-7, "16xDGX-H100", {2_049_024: 3, 2_561_280: 9, 3_073_536: 3}),
        _sd_point(["4.0.0", "4.1.0"], 512, 1.25e-7, "32xDGX-A100", {2_560_000: 13, 3_072_000: 1}),
        _sd_point(SD_RULESETS, 1024, 1.25e-7, "32xDGX-A100", {2_560_000: 6, 3_072_000: 7}),
        _sd_point(SD_RULESETS, 2048, 1.25e-7, "32xDGX-A100", {3_584_000: 4, 4_096_000: 7, 4_608_000: 2}),
    ),
    train_samples=6_513_144,  # in 832 shards, all of them (main.py of the reference)
    eval_samples=30_000,  # of val2014_30k.tsv, one image per prompt (reference)
    target={"fid": TARGET_FID, "clip": TARGET_CLIP},
    target_text=f"FID {TARGET_FID:g} or less and CLIP {TARGET_CLIP:g} or more on one checkpoint",
    every_images=SD_EVERY_IMAGES,
    warmup_start=lambda num_batches: 1e-6,  # `f_start` of its schedule: the first step is not exactly zero
    evaluation_key=("eval.when", "off"),
    # Its configs/train_*.yaml, ldm/ and the rules' table of hyper-parameters.
    reference_values={
        "image_size": 512,
        "model.preset": "full",
        "objective.prediction": "v",
        "objective.weighting": "none",
        "objective.timesteps": "uniform",
        "objective.caption_dropout": 0.0,
        "objective.zero_terminal_snr": False,
        "objective.offset_noise": 0.0,
        "data.normalize": "unit",  # mlcommons/training issue 721: not normalized; not to be fixed
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
    },
    evaluation_values={
        "eval.num_prompts": None,
        "eval.guidance": 8.0,
        "eval.steps": 50,
        "eval.sampler": "ddim",
        "eval.resize": "bilinear299",
        "target.fid": TARGET_FID,
        "target.clip": TARGET_CLIP,
    },
    interval_keys=("save.snapshot_every_images",),
    closed_values={"validation.remote": None, "samples.every_images": None},  # both also run before run_start
    weights_keys=("model.weights", "eval.inception", "eval.clip"),
)


# --- FLUX: FLUX.1, the benchmark from round v5.1 on ---
#
# Sources: mlcommons/training at 1c759d08, text_to_image/README.md (rules of the benchmark); pytorch/torchtitan at
# 0e138118, torchtitan/experiments/flux (the reference); mlperf-logging 4.1.68,
# compliance_checker/training_RULESET/closed_flux1.yaml and rcp_checker/training_RULESET/rcps_flux1.json.

TARGET_VAL_LOSS = 0.586  # at most
FLUX_EVERY_IMAGES = 262_144  # an evaluation every CEIL(262144 / global batch) batches (rules)
FLUX_UNROUNDED_RULESETS = ("5.1.0", "6.0.0")
"""Rulesets whose checker compares evaluation_frequency with FLUX_EVERY_IMAGES at any batch; later ones round up."""
FLUX_PLATFORM = "8xDGX-B200"  # of all points, in bf16
FLUX_RULESETS_6 = ("6.0.0", "6.1.0")  # rulesets of the same points


def _flux_point(
    rulesets: Sequence[str], global_batch_size: int, lr: float, warmup_batches: int, runs: Mapping[int, int]
) -> ReferencePoint:
    """Build a point: the published files have the whole learning rate; batches are powers of two, so division is exact.

    `runs`: evaluations, of 262,144 samples each, to the target -> number of runs that took that many.
    """
    images = expand_runs({num_evaluations * FLUX_EVERY_IMAGES: num_runs for num_evaluations, num_runs in runs.items()})
    return ReferencePoint(
        tuple(rulesets), global_batch_size, lr / global_batch_size, warmup_batches, FLUX_PLATFORM, images
    )


FLUX = Benchmark(
    name="flux1",
    family="flux",
    rulesets=("5.1.0", *FLUX_RULESETS_6),
    points=(
        _flux_point(["5.1.0"], 512, 2e-4, 1600, {29: 1, 30: 3, 31: 10, 32: 4, 33: 2}),
        _flux_point(["5.1.0"], 1024, 2e-4, 0, {30: 1, 31: 4, 32: 3, 33: 3, 34: 2, 35: 3, 36: 2, 37: 1, 38: 1}),
        _flux_point(["5.1.0"], 2048, 2.5e-4, 0, {37: 2, 38: 1, 39: 2, 40: 5, 41: 2, 42: 1, 43: 4, 44: 2, 45: 1}),
        _flux_point(["5.1.0"], 4096, 4e-4, 100, {56: 1, 57: 3, 58: 1, 59: 3, 60: 6, 61: 3, 62: 2, 63: 1}),
        _flux_point(FLUX_RULESETS_6, 512, 2e-4, 1600, {27: 9, 28: 10, 29: 1}),
        _flux_point(FLUX_RULESETS_6, 1024, 2.5e-4, 800, {31: 4, 32: 6, 33: 8, 34: 2}),
        _flux_point(FLUX_RULESETS_6, 2048, 2.5e-4, 0, {36: 2, 37: 3, 38: 4, 39: 1, 40: 4, 41: 3, 42: 1, 44: 1, 47: 1}),
        _flux_point(FLUX_RULESETS_6, 4096, 4e-4, 100, {53: 1, 56: 1, 57: 2, 58: 5, 59: 6, 60: 2, 61: 2, 62: 1}),
    ),
    train_samples=1_099_776,  # the cleaned tenth of CC12M (README)
    eval_samples=29_696,  # of COCO 2014's validation set (README)
    target={"val_loss": TARGET_VAL_LOSS},
    target_text=f"validation loss {TARGET_VAL_LOSS:g} or less",
    every_images=FLUX_EVERY_IMAGES,
    warmup_start=lambda num_batches: 1 / (num_batches + 1),  # its schedule counts from 1: (n + 1) / (W + 1)
    evaluation_key=("validation.remote", None),
    reference_values={
        "image_size": 256,
        "model.preset": "full",
        "objective.prediction": "flow",
        "objective.weighting": "none",
        "objective.timesteps": "uniform",
        "objective.shift": 1.0,
        "objective.caption_dropout": 0.1,
        "objective.offset_noise": 0.0,
        "data.normalize": "symmetric",
        "data.posterior": "sample",
        "data.flip": False,
        "optimizer.name": "adamw",
        "optimizer.betas": [0.9, 0.95],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "optimizer.decay": "all",
        "optimizer.clip_norm": 1.0,
        "schedule.name": "constant",
        "ema.enabled": False,
    },
    evaluation_values={"validation.times": "eighths", "target.val_loss": TARGET_VAL_LOSS},
    interval_keys=("validation.every_images",),
    closed_values={"samples.every_images": None},  # grids are also drawn before run_start
    weights_keys=("model.weights",),
)


# --- which benchmark a run is of ---

BENCHMARKS = (SD, FLUX)


def find_benchmark(family: str, variant: str) -> Benchmark | None:
    """Return the benchmark of a network, or None."""
    return next((benchmark for benchmark in BENCHMARKS if (family, variant) == (benchmark.family, "mlperf")), None)


def find_logged_benchmark(family: str, variant: str) -> Benchmark:
    """Return the benchmark whose log a run writes: flux1 for FLUX.1 and the miniature as a flow, else stable_diffusion."""
    return FLUX if family == FLUX.family or variant == "flow" else SD


def evaluation_frequency(every_images: int, global_batch_size: int, ruleset: str) -> int:
    """Return the evaluation_frequency of FLUX's log. `every_images`: the run's interval, in whole batches."""
    is_interval_of_rules = every_images == FLUX.interval(global_batch_size)
    return FLUX_EVERY_IMAGES if is_interval_of_rules and ruleset in FLUX_UNROUNDED_RULESETS else every_images
