"""How fast a model is scored from end to end: captions -> images -> features -> FID and CLIP score.

    composer -n 1 -m bench.evaluation yamls/sd2_512_synthetic.yaml                                 # a rung of a ladder
    composer -n 1 -m bench.evaluation yamls/sd2_512_synthetic.yaml compile=whole channels_last=true eval.num_prompts=256

Takes a run's keys and its `eval` section, without its files. All weights are random: the denoiser of the preset, Inception
at full size, CLIP as ViT-H-14 (preset=tiny: a small pair). The captions are made up, and FID compares with a unit
covariance. Its figures mean nothing, its time does. 128 prompts where no number is given.

The prompts are scored once to warm up, which compiles and finds the batch size, and then ROUNDS times; CLIP features of
captions are kept from the first time, as from a run's first evaluation. RUN_FOLDER/RUN_NAME/summary.json has images/s
(median, least and greatest round) under the names of a training run. FID's distance, which an evaluation of 30,000 images
computes once, would be a large part of one of 128: it is timed by itself (`figures_seconds`), and is not in images/s. What
else an evaluation does once is in each round: moving the scoring networks to the GPU and back, and scoring the last batch,
while nothing is generated. So images/s is a little too low.

Exit code: 0, or 2 when the configuration cannot run.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch

from callbacks.throughput import read_peak_mem_gib
from common import dist
from common.command import command
from common.command_line import Problem, parse_command_line
from common.files import write_json
from common.value_types import ImageSize
from config import load
from evaluation.clip_score import load_clip
from evaluation.scorer import EvalConfig, Scorer
from families.encoders import model_problems
from model import LatentDiffusion
from preflight.config_checks import speed_problems
from run_folder.environment import environment
from run_folder.history import result_line, rounded
from training import speed
from training.config import ALIASES, RunConfig, build, resolve
from training.trainer import build_device, torch_device
from weights.published import RANDOM

ROUNDS = 3
NUM_PROMPTS = 128
NUM_FEATURES = 2048  # Inception's
CLIP = "ViT-H-14"
MADE_UP_FILES = ("prompts", "statistics", "inception", "clip")
"""Of the section `eval`: what this program makes up."""


def evaluation_problems(evaluation: EvalConfig) -> list[Problem]:
    """Return why an evaluation cannot be measured with this section."""
    made_up = [key for key in MADE_UP_FILES if getattr(evaluation, key) is not None]
    problems = [(f"eval.{key}", "is made up here. Leave it out.") for key in made_up]
    problems += evaluation.problems(now=False)
    if len(evaluation.guidances()) > 1:
        problems.append(("eval.guidance", f"{evaluation.guidance} is a list. One scale is measured here."))
    if evaluation.num_prompts == 1:
        problems.append(("eval.num_prompts", "1, but FID compares covariances. Give 2 at least."))
    return [Problem(f"{key}: {text}", (key,)) for key, text in problems]


def build_scorer(evaluation: EvalConfig, preset: str, size: ImageSize, seed: int) -> Scorer:
    """Build what scores, with networks of the sizes that an evaluation of this preset would have."""
    num = evaluation.num_prompts or NUM_PROMPTS
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        prompts, reference = Path(folder, "prompts.tsv"), Path(folder, "statistics.npz")
        lines = [f"{n}\t{n}\ta photograph of {n} oranges on a blue table" for n in range(num)]
        prompts.write_text("\n".join(["image_id\tid\tcaption", *lines, ""]))
        np.savez(reference, mu=np.zeros(NUM_FEATURES), sigma=np.eye(NUM_FEATURES))
        files = dict(prompts=str(prompts), statistics=str(reference), inception=RANDOM, clip=RANDOM)
        scorer = Scorer(dataclasses.replace(evaluation, num_prompts=num, **files), size=size, seed=seed)
    if preset == "full":
        scorer.meter.pair = load_clip(RANDOM, open_clip.get_model_config(CLIP))
        scorer.meter.pair.precision = evaluation.precision
        scorer.meter.facts |= {"clip_model": f"random-{CLIP}", "clip_fingerprint": scorer.meter.pair.fingerprint}
    return scorer


def measure(model: LatentDiffusion, scorer: Scorer, guidance: float) -> dict[str, Any]:
    """Score a model again and again, and return the figures of its summary."""
    is_gpu, seconds = model.device.type == "cuda", []
    for _ in range(1 + ROUNDS):
        if is_gpu and len(seconds) == 1:
            torch.cuda.reset_peak_memory_stats()  # finding the batch size tried too much
        began = time.perf_counter()
        scorer.score(model, guidance)
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    scorer.meter.figures()
    figures_sec = time.perf_counter() - began
    num = len(scorer.prompt_set.prompts)
    speeds = [num / (round_sec - figures_sec) for round_sec in seconds[1:]]
    return {
        "images_per_sec": statistics.median(speeds),
        "images_per_sec_min": min(speeds),
        "images_per_sec_max": max(speeds),
        "images_per_sec_per_device": statistics.median(speeds) / dist.get_world_size(),
        "peak_mem_gib": read_peak_mem_gib(is_gpu),
        "windows": ROUNDS,
        "first_step_seconds": seconds[0],
        "seconds": sum(seconds[1:]),
        "figures_seconds": figures_sec,
    }


@command(keys=RunConfig, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Read the configuration, measure, write the summary, print its line."""
    config = resolve(
        load(
            RunConfig,
            parse_command_line(argv, ALIASES),
            check=lambda config: [
                *evaluation_problems(config.eval),
                *model_problems(config.model, config.size, needs_encoders=False),
                *speed_problems(config, config.precision),
            ],
        )
    )
    assert config.precision is not None
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_local_rank())
    device = build_device(config.precision)
    dist.initialize_dist(device)
    model = build(config)
    model.to_device(torch_device(device), config.precision)
    speed.apply(model, config)
    scorer = build_scorer(config.eval, config.model.preset, config.size, config.seed)
    [guidance] = config.eval.guidances()
    figures = {
        **measure(model, scorer, guidance),
        "precision": config.precision,
        **speed.values_of(config),
        "compiled_graphs": speed.num_graphs() if config.compile != "off" else None,
    }
    settings = {"program": "bench.evaluation", "preset": config.model.preset, **scorer.settings(guidance)}
    summary = {**{key: rounded(value) for key, value in figures.items()}, **settings, **environment()}
    if dist.get_global_rank() == 0:
        folder = Path(config.run_folder, config.run_name or "")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "summary.json", summary)
        keys = ("images_per_sec", "images_per_sec_min", "images_per_sec_max", "eval_batch_size", "peak_mem_gib")
        print(result_line({key: summary[key] for key in keys}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
