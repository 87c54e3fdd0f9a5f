"""Runs of each family and variant, and their images: by our code, and by an export's card in a process without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpointing.files import WEIGHTS, list_checkpoints, read_checkpoint
from export import caption_of, read_run_config
from families import pipeline_files
from families.sampling import prompt_noise
from model import LatentDiffusion
from training.config import build

CASES = {
    "shapes": ("model.family=shapes", "image_size=[64, 32]", "eval.sampler=dpm++"),
    "sd2_stock": ("model.variant=stock", "eval.sampler=plms"),
    "sd2_mlperf": ("model.variant=mlperf", "eval.sampler=ddim", "optimizer.lr=1e-2"),
    "sdxl": ("model.family=sdxl", "image_size=[96, 64]", "eval.sampler=euler"),
    "flux_dev": ("model.family=flux", "image_size=[96, 64]"),
    "wan_t2v": ("model.family=wan", "model.variant=t2v", "image_size=[64, 32]", "num_frames=5"),
    "sd2_zero_snr": ("objective.prediction=v", "objective.zero_terminal_snr=true", "eval.sampler=ddim"),
}
"""Name -> further keys of its run: every sampler, and a family of videos."""
OF_RUNS = ("model.preset=tiny", "image_size=64", "global_batch_size=8", "max_duration=4ba", "ema.decay=0.5")
OF_RUNS += ("data.synthetic=true", "data.stage=moments", "ema.enabled=true", "eval.guidance=2")
OF_RUNS += ("save.every_images=16", "save.snapshot_every_images=16", "measure.window_batches=2")
OF_RUNS += ("measure.warmup_batches=2", "loggers.progress_bar=false")

ELSEWHERE = """
import json, sys, torch
torch.set_num_threads(1)
for out, code in json.load(open(sys.argv[1])).items():
    names = {"images": []}
    exec(code, names)
    torch.save(torch.stack(names["images"]), out)
"""
OURS = """
ours = [name for name in ("model", "families", "weights", "config") if name in sys.modules]
assert not ours, f"this process has {ours} of the project"
"""


def python_blocks(readme: str) -> list[str]:
    """Return a card's blocks of Python, in their order."""
    return re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)


def run_without_project(words: list[str], folder: Path) -> None:
    """Run a program, the first word, in a process that has nothing of the project."""
    own = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own
    command = [sys.executable, "-I", "-c", words[0] + OURS, *words[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def drawn_elsewhere(outs: Mapping[str, Path], folder: Path, num_prompts: int = 1) -> dict[str, Tensor]:
    """Do as the exports' cards say in a process of its own, without rounding to 8 bits.

    Args:
        outs: name -> an export, which lies in `folder`.

    Returns:
        name -> images of prompts 0, 1, ..., (N, 3, H, W) in [0, 1]; of videos (N, 3, F, H, W).
    """
    codes = {}
    for name, out in outs.items():
        code = "\n".join(python_blocks((out / "README.md").read_text()))
        code = code.replace(").images[0]", ', output_type="pt").images[0]')
        code = code.replace(").frames[0]", ', output_type="pt").frames[0].transpose(0, 1)')
        code = code.replace("video = ", "image = ")
        code = re.sub(r"^export_to_video.*$", "", code, flags=re.M)
        [call] = [line for line in code.splitlines() if "generator=generator(" in line]
        calls = [call.replace(", 0), output_type", f", {number}), output_type") for number in range(num_prompts)]
        codes[str(folder / f"{name}.pt")] = code + "".join(f"{each}\nimages.append(image)\n" for each in calls)
    (folder / "codes.json").write_text(json.dumps(codes))
    run_without_project([ELSEWHERE, str(folder / "codes.json")], folder)
    return {name: torch.load(folder / f"{name}.pt") for name in outs}


def drawn_here(run: Path, num_prompts: int = 1, weights: str = "ema") -> Tensor:
    """Draw the same images with a snapshot's weights put in by hand, (N, 3, H, W)."""
    config = read_run_config(run, None)
    model = build(config)
    content = read_checkpoint(list_checkpoints(run / "checkpoints", WEIGHTS)[0])
    model.load_state_dict(content["model"] | (content["ema"]["weights"] if weights == "ema" else {}))
    ways = dict(sampler=config.eval.sampler, steps=config.eval.steps, guidance=config.eval.guidances()[0])
    text = model.family.tokenize([caption_of(run)])
    noise = [prompt_noise(config.seed, [number], model.latent_shape) for number in range(num_prompts)]
    return torch.cat([model.generate(text, each, **ways) for each in noise])


def save_pipeline(model: LatentDiffusion, folder: Path, sampler: str, size: tuple[int, ...]) -> Path:
    """Write a model as a diffusers folder."""
    family = model.family
    folder.mkdir(parents=True)
    networks = pipeline_files.collect_networks(family, model.denoiser, model.frozen)
    sampled = dict(zero_terminal_snr=False, size=size)
    scheduler = family.pipeline_scheduler(sampler, model.objective.prediction, **sampled)
    assert pipeline_files.save_pipeline(folder, family, networks, scheduler, size=size, dtype="fp32") is None
    return folder
