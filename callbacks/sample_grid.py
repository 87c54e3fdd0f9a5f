"""Sample grids for fixed prompts: one image per point, with the same prompt and noise at the same place in each.

RUN/samples/im000000512000.png     loggers: `samples/grid`, with the captions
RUN/samples/captions.txt           one line per image, row by row from the left

Of videos the grid has strips of frames. The videos are next to it (run_folder/sample_videos.py).    loggers: `samples/videos`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from composer import Logger
from PIL import Image
from torch import Tensor

from common.files import atomic_path, write_atomic
from common.masking import to_printable
from run_folder import sample_videos
from run_folder.metric_names import SAMPLES, VIDEOS

GAP_PX = 2


def make_grid(images: Sequence[Tensor]) -> Tensor:
    """# n x (3, H, W) uint8 -> (3, rows (H + gap) - gap, columns (W + gap) - gap) uint8, about square, gaps white."""
    from torchvision.utils import make_grid

    if len(images) == 1:
        return images[0]
    columns = math.ceil(math.sqrt(len(images)))
    grid = make_grid(list(images), nrow=columns, padding=GAP_PX, pad_value=255)  # with a border, which is cut off
    return grid[:, GAP_PX:-GAP_PX, GAP_PX:-GAP_PX]


def grid_path(folder: Path, num_images: int) -> Path:
    """Return where a run's grid lies. `num_images`: seen so far."""
    return folder / "samples" / f"im{num_images:012d}.png"


def write_grid(
    folder: Path,
    num_images: int,
    batch: int,
    samples: Sequence[tuple[str, Tensor]],
    logger: Logger,
    draw_grid: Callable[[Sequence[tuple[str, Tensor]]], np.ndarray],
    fps: float = 1.0,
) -> None:
    """Write one point's samples.

    Args:
        folder: of the run.
        num_images: images seen so far.
        batch: batches trained so far.
        samples: captions and images, (3, H, W) uint8, or videos, (3, F, H, W).
        draw_grid: makes the loggers' image of them, uint8 (H, W, 3).
        fps: of videos, frames a second.
    """
    if not samples:
        return
    path = grid_path(folder, num_images)
    if samples[0][1].ndim == 4:
        for number, (_, video) in enumerate(samples):
            sample_videos.write_mp4(path.with_suffix("") / f"{number:02d}.mp4", video, fps)
        times = zip(*[video.unbind(dim=1) for _, video in samples], strict=True)
        grid_video = torch.stack([make_grid(frames) for frames in times], dim=1)
        write_atomic(path.with_suffix(".gif"), sample_videos.gif_of(grid_video, fps))
        for destination in logger.destinations:
            if hasattr(destination, "log_video"):  # W&B's and TensorBoard's in training/loggers.py
                destination.log_video(path.with_suffix(".gif"), VIDEOS, batch)
        samples = [(caption, sample_videos.strip_of(video)) for caption, video in samples]
    samples = [(to_printable(caption), image) for caption, image in samples]
    grid = make_grid([image for _, image in samples])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        Image.fromarray(grid.permute(1, 2, 0).numpy()).save(temporary, format="png")
    write_atomic(path.with_name("captions.txt"), "".join(f"{caption}\n" for caption, _ in samples))
    # Not as a table: for tables, W&B queries its server forever, even offline (seen with wandb 0.18.7).
    logger.log_images(draw_grid(samples), name=SAMPLES, channels_last=True, use_table=False)
