"""MLPerf Training's text-to-image benchmark from round v5.1 on: FLUX.1, to a validation loss of 0.586.

Sources: mlcommons/training at 1c759d08, text_to_image/README.md (rules of the benchmark); pytorch/torchtitan at 0e138118,
torchtitan/experiments/flux (the reference); mlperf-logging 4.1.68, compliance_checker/training_RULESET/closed_flux1.yaml
and rcp_checker/training_RULESET/rcps_flux1.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zoo.mlperf_rules import Benchmark, ReferencePoint, sorted_runs

TARGET_VAL_LOSS = 0.586  # at most
EVERY_IMAGES = 262_144  # an evaluation every CEIL(262144 / global batch) batches (rules)
UNROUNDED = ("5.1.0", "6.0.0")
"""Rulesets whose checker compares evaluation_frequency with EVERY_IMAGES at any batch; later ones with what is rounded up."""
PLATFORM = "8xDGX-B200"  # of all points, in bf16
SAME = ("6.0.0", "6.1.0")  # rulesets of the same points


def _point(
    rulesets: Sequence[str], global_batch_size: int, lr: float, warmup_batches: int, runs: Mapping[int, int]
) -> ReferencePoint:
    """`lr`: the files have the whole rate; batches are powers of two, so the rate per image is exact.

    `runs`: evaluations, of 262,144 samples each, to the target -> number of runs that took that many.
    """
    images = sorted_runs({num * EVERY_IMAGES: of for num, of in runs.items()})
    return ReferencePoint(tuple(rulesets), global_batch_size, lr / global_batch_size, warmup_batches, PLATFORM, images)


FLUX = Benchmark(
    name="flux1",
    family="flux",
    rulesets=("5.1.0", *SAME),
    points=(
        _point(["5.1.0"], 512, 2e-4, 1600, {29: 1, 30: 3, 31: 10, 32: 4, 33: 2}),
        _point(["5.1.0"], 1024, 2e-4, 0, {30: 1, 31: 4, 32: 3, 33: 3, 34: 2, 35: 3, 36: 2, 37: 1, 38: 1}),
        _point(["5.1.0"], 2048, 2.5e-4, 0, {37: 2, 38: 1, 39: 2, 40: 5, 41: 2, 42: 1, 43: 4, 44: 2, 45: 1}),
        _point(["5.1.0"], 4096, 4e-4, 100, {56: 1, 57: 3, 58: 1, 59: 3, 60: 6, 61: 3, 62: 2, 63: 1}),
        _point(SAME, 512, 2e-4, 1600, {27: 9, 28: 10, 29: 1}),
        _point(SAME, 1024, 2.5e-4, 800, {31: 4, 32: 6, 33: 8, 34: 2}),
        _point(SAME, 2048, 2.5e-4, 0, {36: 2, 37: 3, 38: 4, 39: 1, 40: 4, 41: 3, 42: 1, 44: 1, 47: 1}),
        _point(SAME, 4096, 4e-4, 100, {53: 1, 56: 1, 57: 2, 58: 5, 59: 6, 60: 2, 61: 2, 62: 1}),
    ),
    train_samples=1_099_776,  # the cleaned tenth of CC12M (README)
    eval_samples=29_696,  # of COCO 2014's validation set (README)
    target={"val_loss": TARGET_VAL_LOSS},
    target_said=f"validation loss {TARGET_VAL_LOSS:g} or less",
    every_images=EVERY_IMAGES,
    warmup_start=lambda num_batches: 1 / (num_batches + 1),  # its schedule counts from 1: (n + 1) / (W + 1)
    evaluated_by=("validation.remote", None),
    fixed={
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
    evaluation={"validation.times": "eighths", "target.val_loss": TARGET_VAL_LOSS},
    intervals=("validation.every_images",),
    closed={"samples.every_images": None},  # they come before run_start, too
    not_random=("model.weights",),
)


def evaluation_frequency(every_images: int, global_batch_size: int, ruleset: str) -> int:
    """Return what the log calls the interval of a run that is evaluated every `every_images`, which are whole batches."""
    is_of_rules = every_images == FLUX.interval(global_batch_size)
    return EVERY_IMAGES if is_of_rules and ruleset in UNROUNDED else every_images
