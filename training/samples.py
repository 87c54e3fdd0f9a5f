"""Sample grids at an interval of their own: the same prompts with the same noise each time, without any metric.

The images are those that an evaluation would generate for these prompts: `eval.steps`, `sampler`, `guidance`, `image_size`
and `weights` hold for both, and a prompt's noise comes from the run's seed and its id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from cli.limits import file_problem, limited
from cli.log import log
from cli.ranks import Signalled
from evaluation.drawing import as_bytes, drawn, gathered
from evaluation.prompts import Prompt, caption_problem, read_file, read_prompts
from evaluation.scoring import EvalConfig, rounded_up
from model import LatentDiffusion
from reports.samples import captioned

LEAST_TILE_PX = 128  # a caption is written under each image


@dataclass(frozen=True)
class SamplesConfig:
    """Sample grids during training, the first before it. How they are drawn, and how many, is said under `eval`."""

    every_images: int | None = limited(None, 1)
    """Images between two grids, rounded up to whole batches. null: none, except those of evaluations."""
    prompts: str | None = None
    """File with a caption in each line, or one as eval.prompts, whose name ends in .tsv. null: eval.prompts."""

    @property
    def is_given(self) -> bool:
        return self.every_images is not None

    def resolved(self, global_batch_size: int) -> SamplesConfig:
        """Return a copy where every_images is whole batches."""
        if self.every_images is None:
            return self
        return replace(self, every_images=rounded_up(self.every_images, global_batch_size))

    def problems(self, config: EvalConfig) -> list[tuple[str, str]]:
        """(key, message) for every invalid value. `config`: how the images are drawn."""
        if not self.is_given:
            text = "not given, but samples.prompts is. Give the interval, or leave both out."
            return [("samples.every_images", text)] if self.prompts is not None else []
        found = []
        if config.samples == 0:
            text = "given, but eval.samples=0: no image would be drawn. Leave out one of the two."
            found.append(("samples.every_images", text))
        if isinstance(config.guidance, list | tuple) and config.when == "off":  # else named by the evaluation
            found.append(("eval.guidance", f"{list(config.guidance)}: a grid is drawn at one. Give one number."))
        path = self.prompts or config.prompts
        if path is None:
            found.append(("samples.prompts", "not given. Give a file with a caption in each line."))
            return found
        try:
            if problem := file_problem(path):
                raise ValueError(problem)
            read_captions(path)
        except ValueError as error:
            found.append(("samples.prompts", str(error)))
        return found


def read_captions(path: str) -> Sequence[Prompt]:
    """Read prompts from a .tsv file as evaluation/prompts.py has it, or from lines, whose numbers are their ids.

    Raises:
        ValueError: it cannot be read, or a line is no caption; says which.
    """
    if path.endswith(".tsv"):
        return read_prompts(path).prompts
    lines = read_file(path, "Give a file with a caption in each line").decode("utf-8-sig").splitlines()
    found = [Prompt(number, number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    for prompt in found:
        if text := caption_problem(prompt.caption):
            raise ValueError(f"{path}: line {prompt.number:,} has a caption {text}. Fix it, or remove that line.")
    if not found:
        raise ValueError(f"{path} has no caption. Give one in each line.")
    return found


def shown(samples: Sequence[tuple[str, Tensor]]) -> np.ndarray:
    """Return one picture of captions and images, uint8 (H, W, 3), for loggers; the order is that of the grid."""
    tiles = [Image.fromarray(image.permute(1, 2, 0).numpy()) for _, image in samples]
    columns, tile_px = math.ceil(math.sqrt(len(tiles))), max(LEAST_TILE_PX, tiles[0].width)
    return np.asarray(captioned(tiles, [caption for caption, _ in samples], tile_px, columns))


def draw_samples(
    model: LatentDiffusion, prompts: Sequence[Prompt], *, signal: Callable[[], int], **how: Any
) -> list[tuple[str, Tensor]]:
    """Draw the images of a grid on all ranks.

    Args:
        prompts: one image each.
        signal, how: as of `evaluation.drawing.drawn`.

    Returns:
        Captions and images, (3, H, W) uint8, in the order of the prompts.

    Raises:
        Signalled: a rank has received a signal.
    """
    mine: list[tuple[str, Tensor]] = []
    try:
        for chunk, images in drawn(model, prompts, signal=signal, **how):
            mine += zip([prompt.caption for prompt in chunk], as_bytes(images), strict=False)
    except Signalled:
        log.info("samples: stopped by a signal; the next start draws them anew.")
        raise
    return gathered(mine)
