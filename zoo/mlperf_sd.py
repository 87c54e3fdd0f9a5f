"""MLPerf Training's text-to-image benchmark of rounds v3.1 to v5.0: Stable Diffusion v2. FLUX.1 replaced it in v5.1.

Sources: mlcommons/training at aa344c7f, retired_benchmarks/stable_diffusion/ (the reference); mlcommons/logging at
7bbf7926, rcp_checker/training_RULESET/rcps_stable_diffusion.json (the points).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zoo.mlperf_rules import Benchmark, ReferencePoint, sorted_runs

TARGET_FID = 90.0  # at most, and
TARGET_CLIP = 0.15  # at least, on the same checkpoint (rules)
EVERY_IMAGES = 512_000  # a checkpoint every CEIL(512000 / global batch) batches (rules)
WARMUP_BATCHES = 1000  # at every global batch size (configs/ of the reference, and every reference point)
RULESETS = ("4.0.0", "4.1.0", "5.0.0")  # not 3.1.0, which counted steps instead of samples


def _point(
    rulesets: Sequence[str], global_batch_size: int, lr_per_image: float, platform: str, runs: Mapping[int, int]
) -> ReferencePoint:
    """The files give the learning rate for each image of the global batch."""
    return ReferencePoint(tuple(rulesets), global_batch_size, lr_per_image, WARMUP_BATCHES, platform, sorted_runs(runs))


SD = Benchmark(
    name="stable_diffusion",
    family="sd2",
    rulesets=RULESETS,
    points=(
        _point(["5.0.0"], 256, 2.8e-7, "4xDGX-H100", {1_536_000: 13, 2_048_000: 7}),
        _point(["5.0.0"], 384, 2.3e-7, "2xDGX-H100", {1_536_768: 2, 2_049_024: 16, 2_561_280: 2}),
        _point(["5.0.0"], 512, 2.3e-7, "4xDGX-H100", {1_536_000: 2, 2_048_000: 14, 2_560_000: 4}),
        _point(["4.1.0"], 256, 1.8e-7, "4xDGX-H100", {1_536_000: 2, 2_048_000: 16, 2_560_000: 2}),
        _point(["4.0.0", "4.1.0"], 384, 1.25e-7, "16xDGX-H100", {2_049_024: 3, 2_561_280: 9, 3_073_536: 3}),
        _point(["4.0.0", "4.1.0"], 512, 1.25e-7, "32xDGX-A100", {2_560_000: 13, 3_072_000: 1}),
        _point(RULESETS, 1024, 1.25e-7, "32xDGX-A100", {2_560_000: 6, 3_072_000: 7}),
        _point(RULESETS, 2048, 1.25e-7, "32xDGX-A100", {3_584_000: 4, 4_096_000: 7, 4_608_000: 2}),
    ),
    train_samples=6_513_144,  # in 832 shards, all of them (main.py of the reference)
    eval_samples=30_000,  # of val2014_30k.tsv, one image per prompt (reference)
    target={"fid": TARGET_FID, "clip": TARGET_CLIP},
    target_said=f"FID {TARGET_FID:g} or less and CLIP {TARGET_CLIP:g} or more on one checkpoint",
    every_images=EVERY_IMAGES,
    warmup_start=lambda num_batches: 1e-6,  # `f_start` of its schedule: the first step is not exactly zero
    evaluated_by=("eval.when", "off"),
    # Its configs/train_*.yaml, ldm/ and the rules' table of hyper-parameters.
    fixed={
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
    },
    evaluation={
        "eval.num_prompts": None,
        "eval.guidance": 8.0,
        "eval.steps": 50,
        "eval.sampler": "ddim",
        "eval.resize": "bilinear299",
        "target.fid": TARGET_FID,
        "target.clip": TARGET_CLIP,
    },
    intervals=("save.snapshot_every_images",),
    closed={"validation.remote": None, "samples.every_images": None},  # they come before run_start, too
    not_random=("model.weights", "eval.inception", "eval.clip"),
)
