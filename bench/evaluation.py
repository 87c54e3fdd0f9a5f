"""How fast a model is scored from end to end: captions -> images -> features -> FID and CLIP score.

    composer -n 1 -m bench.evaluation yamls/sd2_512_synthetic.yaml                                 # a rung of a ladder
    composer -n 1 -m bench.evaluation yamls/sd2_512_synthetic.yaml compile=whole channels_last=true eval.num_prompts=256

A run's keys, and its `eval` section, but for files: the weights are random, of the denoiser's preset; the image network is
Inception at its size, the pair ViT-H-14 at its (of `preset=tiny` the small random ones), the captions are made up, and
what FID compares with is a unit covariance. Its figures mean nothing, its time does. 128 prompts where no number is given.

The prompts are scored once to warm up, which compiles and finds the batch size, and then ROUNDS times; CLIP features of
captions are kept from the first time, as from a run's first evaluation. RUN_FOLDER/RUN_NAME/summary.json has images/s
(median, least and greatest round) under the names of a training run. The distance of FID, which is computed once in an
evaluation of 30,000 images, would be much of one of 128: it is timed by itself (`figures_seconds`), and is not in images/s.
The rest that an evaluation has once is in each round: the way of the measuring networks to the GPU and back, and the
measuring of the last batch, beside which nothing is generated. images/s errs to the low side.

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
from composer.utils import dist

from callbacks.throughput import peak_mem_gib
from cli.command import command
from cli.command_line import Problem, parse_command_line
from cli.files import write_json
from config import load
from evaluation.clip_score import load_clip
from evaluation.scoring import Scorer
from preflight.run import model_problems, speed_problems
from record.environment import environment
from record.summary import result_line, rounded
from training import speed
from training.device import build_device
from training.run_config import ALIASES, RunConfig, build, resolve
from weights.published import RANDOM

ROUNDS = 3
NUM_PROMPTS = 128
NUM_FEATURES = 2048  # Inception's
CLIP = "ViT-H-14"
FILES = ("prompts", "statistics", "inception", "clip")
"""Of the section `eval`: what this program makes up."""


def problems_of(config: RunConfig) -> list[Problem]:
    """Return what cannot be: of generating and of speed alone, since nothing is trained."""
    found = [
        (f"eval.{key}", "is made up here. Leave it out.") for key in FILES if getattr(config.eval, key) is not None
    ]
    found += config.eval.problems(now=False)
    if len(config.eval.guidances()) > 1:
        found.append(("eval.guidance", f"{config.eval.guidance} is a list. One scale is measured here."))
    if config.eval.num_prompts == 1:
        found.append(("eval.num_prompts", "1, but FID compares covariances. Give 2 at least."))
    problems = [Problem(f"{key}: {text}", (key,)) for key, text in found]
    problems += model_problems(config.model, config.size, encoders_wanted=False)
    return problems + speed_problems(config)


def scorer_of(config: RunConfig) -> Scorer:
    """Build what scores, with networks of the sizes that an evaluation of this preset would have."""
    num = config.eval.num_prompts or NUM_PROMPTS
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        prompts, reference = Path(folder, "prompts.tsv"), Path(folder, "statistics.npz")
        lines = [f"{n}\t{n}\ta photograph of {n} oranges on a blue table" for n in range(num)]
        prompts.write_text("\n".join(["image_id\tid\tcaption", *lines, ""]))
        np.savez(reference, mu=np.zeros(NUM_FEATURES), sigma=np.eye(NUM_FEATURES))
        files = dict(prompts=str(prompts), statistics=str(reference), inception=RANDOM, clip=RANDOM)
        made_up = dataclasses.replace(config.eval, num_prompts=num, **files)
        scorer = Scorer(made_up, size=config.size, seed=config.seed)
    if config.model.preset == "full":
        scorer.meter.pair = load_clip(RANDOM, open_clip.get_model_config(CLIP))
        scorer.meter.pair.precision = config.eval.precision
        scorer.meter.facts |= {"clip_model": f"random-{CLIP}", "clip_fingerprint": scorer.meter.pair.fingerprint}
    return scorer


def measure(config: RunConfig) -> dict[str, Any]:
    """Score one resolved configuration's model again and again, and return the figures of its summary."""
    assert config.precision is not None
    device = build_device(config.precision)
    dist.initialize_dist(device)
    model = build(config)
    model.place(device._device, config.precision)
    speed.apply(model, config, config.precision)
    scorer = scorer_of(config)
    seconds = []
    for _ in range(1 + ROUNDS):
        if device.name == "gpu" and len(seconds) == 1:
            torch.cuda.reset_peak_memory_stats()  # finding the batch size tried too much
        began = time.perf_counter()
        scorer.score(model, config.eval.guidances()[0])
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    scorer.meter.figures()
    figures_sec = time.perf_counter() - began
    num = len(scorer.prompt_set.prompts)
    speeds = [num / (each - figures_sec) for each in seconds[1:]]
    figures = {
        "images_per_sec": statistics.median(speeds),
        "images_per_sec_min": min(speeds),
        "images_per_sec_max": max(speeds),
        "images_per_sec_per_device": statistics.median(speeds) / dist.get_world_size(),
        "peak_mem_gib": peak_mem_gib(device.name == "gpu"),
        "windows": ROUNDS,
        "first_step_seconds": seconds[0],
        "seconds": sum(seconds[1:]),
        "figures_seconds": figures_sec,
        "precision": config.precision,
        **speed.values_of(config),
        "compiled_graphs": speed.num_graphs() if config.compile != "off" else None,
    }
    settings = {"program": "bench.evaluation", "preset": config.model.preset}
    settings |= scorer.settings(config.eval.guidances()[0])
    return {**{key: rounded(value) for key, value in figures.items()}, **settings, **environment()}


@command(__doc__, needs_words=False)
def main(argv: Sequence[str]) -> int:
    """Read the configuration, measure, write the summary, print its line."""
    config = resolve(load(RunConfig, parse_command_line(argv, ALIASES), check=problems_of))
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_local_rank())
    summary = measure(config)
    if dist.get_global_rank() == 0:
        folder = Path(config.run_folder, config.run_name or "")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "summary.json", summary)
        shown = ("images_per_sec", "images_per_sec_min", "images_per_sec_max", "eval_batch_size", "peak_mem_gib")
        print(result_line({key: summary[key] for key in shown}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
