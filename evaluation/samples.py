"""Sample grids at their own interval: the same prompts with the same noise each time, without any metric.

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

from common.log import log
from common.value_types import limited, prose
from evaluation.generate import as_bytes, gather_images, generate_chunks
from evaluation.prompts import Prompt, parse_captions
from evaluation.scorer import EvalConfig, rounded_up
from model import LatentDiffusion
from ranks.collectives import Signalled
from reports.samples import captioned

LEAST_TILE_PX = 128  # a caption is written under each image


@dataclass(frozen=True)
class SamplesConfig:
    """Sample grids during training, the first before it. How they are drawn, and how many: see `eval`."""

    every_images: int | None = limited(None, 1)
    """Images between grids. null: only at evaluations."""
    prompts: str | None = prose(None, "[CAPTION, ...], a file")
    """Captions in a list, a file with one per line, or .tsv as eval.prompts. null: eval.prompts."""

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
        problems = []
        if config.samples == 0:
            text = "given, but eval.samples=0: no image would be drawn. Leave out one of the two."
            problems.append(("samples.every_images", text))
        if isinstance(config.guidance, list | tuple) and config.when == "off":  # else named by the evaluation
            problems.append(("eval.guidance", f"{list(config.guidance)}: a grid is drawn at one. Give one number."))
        try:
            parse_captions(self.prompts or config.prompts)
        except ValueError as error:
            problems.append(("samples.prompts", str(error)))
        return problems


def tile_samples(samples: Sequence[tuple[str, Tensor]]) -> np.ndarray:
    """Return one image of captions and samples, uint8 (H, W, 3), for loggers; the order is that of the grid."""
    tiles = [Image.fromarray(image.permute(1, 2, 0).numpy()) for _, image in samples]
    columns, tile_px = math.ceil(math.sqrt(len(tiles))), max(LEAST_TILE_PX, tiles[0].width)
    return np.asarray(captioned(tiles, [caption for caption, _ in samples], tile_px, columns))


def draw_samples(
    model: LatentDiffusion, prompts: Sequence[Prompt], *, signal: Callable[[], int], **how: Any
) -> list[tuple[str, Tensor]]:
    """Draw the images of a grid on all ranks.

    Args:
        prompts: one image each.
        signal, how: as of `evaluation.generate.generate_chunks`.

    Returns:
        Captions and images, (3, H, W) uint8, in the order of the prompts.

    Raises:
        Signalled: a rank has received a signal.
    """
    mine: list[tuple[str, Tensor]] = []
    try:
        for chunk, images in generate_chunks(model, prompts, signal=signal, **how):
            mine += zip([prompt.caption for prompt in chunk], as_bytes(images), strict=False)
    except Signalled:
        log.info("samples: stopped by a signal; the next start draws them again.")
        raise
    return gather_images(mine)
