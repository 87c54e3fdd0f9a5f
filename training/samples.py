"""Sample grids at an interval of their own: the same prompts with the same noise each time, without any metric.

The images are those that an evaluation would generate for these prompts: `eval.steps`, `sampler`, `guidance`, `image_size`
and `weights` hold for both, and a prompt's noise comes from the run's seed and its id.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from composer.utils import dist
from PIL import Image
from torch import Tensor

from cli.files import read_regular
from cli.limits import MAX_CAPTION, ImageSize, file_problem, limited
from cli.log import log
from cli.ranks import Hearing, Signalled
from evaluation.drawing import Generator, Heard, as_bytes, chunks_of, gathered, generate
from evaluation.prompts import Prompt, read_prompts
from evaluation.scoring import EvalConfig, rounded_up
from reports.samples import captioned, numbered
from zoo.sampling import shard

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
    try:
        lines = read_regular(Path(path).expanduser()).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}. Give a file with a caption in each line."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start:,}). Give a caption in each line.") from error
    found = [Prompt(number, number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if wrong := next((prompt for prompt in found if "\0" in prompt.caption or len(prompt.caption) > MAX_CAPTION), None):
        given = f"{path}: line {wrong.number:,} has a NUL character, or more than {MAX_CAPTION:,} characters"
        raise ValueError(f"{given}. Take it out.")
    if not found:
        raise ValueError(f"{path} has no caption. Give one in each line.")
    return found


def shown(samples: Sequence[tuple[str, Tensor]]) -> np.ndarray:
    """Return one picture of captions and images, uint8 (H, W, 3), for loggers; the order is that of the grid."""
    tiles = [Image.fromarray(image.permute(1, 2, 0).numpy()) for _, image in samples]
    columns = math.ceil(math.sqrt(len(tiles)))
    return np.asarray(
        captioned(tiles, numbered([caption for caption, _ in samples]), max(LEAST_TILE_PX, tiles[0].width), columns)
    )


class Sampler:
    """Draws the images of a grid on all ranks.

    Args:
        prompts: one image each.
        ways: sampler, steps and guidance.
        size: of the images, px.
        seed: of the prompts' noise.
        batch_size: images of a pass.
        signal: returns the signal that this rank has received, 0: none.
    """

    def __init__(
        self,
        model: Generator,
        prompts: Sequence[Prompt],
        ways: dict[str, Any],
        *,
        size: ImageSize,
        seed: int,
        batch_size: int,
        signal: Callable[[], int],
    ):
        self.model, self.prompts, self.ways, self.signal = model, prompts, ways, signal
        self.size, self.seed, self.batch_size = size, seed, batch_size

    def draw(self) -> list[tuple[str, Tensor]]:
        """Return captions and images, (3, H, W) uint8, in the order of the prompts. Raises Signalled: a rank has had one."""
        places = shard(len(self.prompts), dist.get_global_rank(), dist.get_world_size())
        chunks = list(chunks_of([self.prompts[place] for place in places], self.batch_size))
        hearing = Hearing(self.signal, len(chunks), in_step=self.model.in_step)
        mine: list[tuple[str, Tensor]] = []
        with contextlib.suppress(Heard):
            for piece in hearing.pieces(chunks):
                chunk = piece or self.prompts[:1]  # None: others in step are not through
                images = generate(self.model, chunk, self.batch_size, self.size, self.seed, self.ways, hearing)
                if piece is None:
                    continue
                mine += zip([prompt.caption for prompt in chunk], as_bytes(images), strict=False)
                hearing.done()
        if number := hearing.agreed():
            log.info("samples: stopped by a signal; the next start draws them anew.")
            raise Signalled(number)
        return gathered(mine)
