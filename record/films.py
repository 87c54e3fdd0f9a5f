"""Sample videos: a strip of frames of each for grids and loggers, and an MP4 file.

RUN/samples/im000000512000/00.mp4     the grid's first video; its caption is the first line of RUN/samples/captions.txt
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cli.files import whole

MOST_SHOWN = 8
GAP_PX = 1
CODECS = ("libx264", "mpeg4")  # browsers show the first; a build of FFmpeg without it has the second
QUALITY = {"libx264": {"crf": "16"}, "mpeg4": {"qscale": "2"}}


def strip_of(video: Tensor) -> Tensor:
    """# (3, F, H, W) uint8 -> (3, H, n W + gaps): MOST_SHOWN frames at most, evenly spaced from the first to the last."""
    channels, num_frames, height, _ = video.shape
    places = torch.linspace(0, num_frames - 1, min(num_frames, MOST_SHOWN)).round().long().tolist()
    gap = torch.full((channels, height, GAP_PX), 255, dtype=video.dtype)
    parts = [part for place in places for part in (gap, video[:, place])]
    return torch.cat(parts[1:], dim=2)


def write_mp4(path: Path, video: Tensor, fps: float) -> None:
    """Write a video, (3, F, H, W) uint8 with even sides, as an MP4 file, whole or not at all."""
    import av

    name = next(name for name in CODECS if name in av.codecs_available)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        stream: Any = container.add_stream(name, rate=Fraction(fps).limit_denominator(1001), options=QUALITY[name])
        stream.height, stream.width = video.shape[2:]
        stream.pix_fmt = "yuv420p"
        for frame in video.permute(1, 2, 3, 0).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
