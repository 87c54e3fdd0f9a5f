"""The stage `videos` in batches: of each film a clip, its frames picked by time, scaled and cut as pictures are.

B samples, F frames of a clip, H W its size in px, L text tokens:

    shard (MDS)   mp4 bytes, caption str, key str, num_frames int, fps float64
    batch         videos uint8 (B, 3, F, H, W), text columns int64 (B, L), "bad": [...]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cli.limits import ImageSize
from stages.batch_memory import BatchMemory
from stages.draws import place_of
from stages.images import SampleError, captions_of, crop_room, resize_and_crop, size_of
from stages.stream import BatchStream
from stages.videos import clip_times, read_frames

MIDDLE = 0.5
"""Where a clip lies in its film where nothing is drawn: films begin with titles and fade in, as pictures have margins."""


def read_clip(
    sample: Mapping[str, Any],
    size: ImageSize,
    *,
    rate: float | None,
    place: float = MIDDLE,
    at: Callable[[ImageSize], ImageSize] | None = None,
) -> Tensor:  # -> uint8 (F, H, W, 3)
    """Return a clip of a sample of the stage.

    Args:
        size: (width, height, frames).
        rate: frames a second; None: the film's own.
        place: of the clip in the film, from 0 to 1; see `stages.videos.clip_times`.
        at: room (x, y), px -> the crop's left and top; None: its centre. All frames have one crop.

    Raises:
        SampleError: the film is too short or damaged.
    """
    width, height, num_frames = size
    known, fps = int(sample["num_frames"]), float(sample["fps"])
    if known < 1 or not math.isfinite(fps):
        raise SampleError("number or rate of frames is none")
    times = clip_times(known, fps, frames=num_frames, rate=rate, place=place)

    def make(pixels: Tensor) -> Tensor:  # (3, h, w) -> (H, W, 3)
        room = crop_room(size_of(pixels), (width, height))
        return resize_and_crop(pixels, (width, height), at=at and at(room)).permute(1, 2, 0)

    return torch.stack(read_frames(sample["mp4"], times, make))


class VideosStream(BatchStream):
    """Batches of clips: {"videos": uint8 (B, 3, F, H, W), each text column: int64 (B, L), "bad": [...]}.

    Where samples are shuffled, a clip lies at another place of its film in each epoch, else in its middle.

    Args:
        sizes: (width, height, frames) of each stream's clips.
        rate: frames a second; None: each film's own.
        tokenize: captions -> text columns.
        captions: of each stream, the column of its captions; None: the stage's own.
        flip, crop: see data.DataConfig; all frames of a clip alike.
        arguments: keyword arguments of StreamingDataset.
    """

    def __init__(
        self,
        *,
        sizes: Sequence[ImageSize],
        rate: float | None,
        tokenize: Callable[[Sequence[str]], Mapping[str, Tensor]],
        captions: Sequence[str | None] | None = None,
        flip: bool = False,
        crop: str = "center",
        **arguments: Any,
    ):
        super().__init__(**arguments)
        self.sizes, self.rate, self.tokenize, self.flip, self.crop = list(sizes), rate, tokenize, flip, crop
        self.captions = captions or [None] * len(self.sizes)
        self.memory = BatchMemory()

    def read_batch(self, sample_ids: np.ndarray) -> dict[str, Any]:
        """Decode, scale and cut the clips, and tokenise their captions in one call."""
        ids = sample_ids.tolist()
        width, height, num_frames = self.sizes[self.stream_of(ids[0])]
        # A pixel's three levels lie together, as in the frames: a worker would take long to part them, a device does not.
        memory, receipt = self.memory.take((len(ids), num_frames, height, width, 3), torch.uint8)
        captions, bad = [], []
        for clip, sample_id in zip(memory, ids, strict=True):
            (frames, caption), passed_over = self.first_good(sample_id, self.use)
            clip.copy_(frames)
            captions.append(caption)
            bad += passed_over
        return {"videos": memory.permute(0, 4, 1, 2, 3), **self.tokenize(captions), "bad": bad, **receipt}

    def use(self, sample_id: int) -> tuple[Tensor, str]:
        """Return a sample's clip, uint8 (F, H, W, 3), and its caption. Raises SampleError."""
        sample, draw, stream = self[sample_id], self.draw(sample_id), self.stream_of(sample_id)
        column = self.captions[stream]
        caption = draw.one_of(captions_of(sample if column is None else {"caption": sample[column]}))
        place = place_of(self.shuffle_seed, self.epoch, sample_id) if self.shuffle else MIDDLE
        at = draw.offset if self.crop == "random" else None
        frames = read_clip(sample, self.sizes[stream], rate=self.rate, place=place, at=at)
        return frames.flip(2) if self.flip and draw.is_flipped else frames, caption
