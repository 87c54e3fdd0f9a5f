"""What does not go together in a run of a family of videos, and what is not for such a run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from cli.command_line import Problem
from zoo import load_family

if TYPE_CHECKING:
    from training.run_config import RunConfig


def problems(config: RunConfig) -> list[Problem]:
    """Return the problems of a run's pictures: images or videos."""
    found: list[tuple[str, str]] = []
    with contextlib.suppress(ValueError):  # named by model_problems
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        if config.data.stage not in ("moments", family.pictures):
            given = f"{config.data.stage}, but {family.name} is trained on {family.pictures}"
            found.append(("data.stage", f"{given}. Say data.stage={family.pictures}, or moments."))
        if family.pictures == "videos":
            found += _of_videos(config, bool(family.beside(config.size)))
            if "mask" in family.columns("moments", config.size, stored_text=True):
                found += _of_masks(config, family.name)
    return [Problem(f"{key}: {text}", (key, "model.family")) for key, text in found]


def _of_masks(config: RunConfig, name: str) -> list[tuple[str, str]]:
    if config.attention not in ("flash", "cudnn") or not torch.cuda.is_available():
        return []
    text = f"{config.attention}: its kernels take no mask, with which {name} leaves out a caption's padding."
    return [("attention", f"{text} Use attention=efficient, or auto.")]


def _of_videos(config: RunConfig, follows_a_picture: bool) -> list[tuple[str, str]]:
    found = []
    if config.channels_last:
        found.append(("channels_last", "true, but a video's tensors have five dimensions. Leave it out."))
    if config.eval.when != "off":
        text = (
            f"{config.eval.when}, but FID and CLIP score are of images. Say eval.when=off, and give validation.remote."
        )
        found.append(("eval.when", text))
    if config.samples.is_given and follows_a_picture:
        text = "given, but image to video draws what follows a picture, and prompts are captions alone. Leave it out."
        found.append(("samples.every_images", text))
    return found
