"""Sample videos: a strip of frames of each for the grid, an MP4 file of each, and the grid in motion.

RUN/samples/im000000512000/00.mp4     the grid's first video; its caption is the first line of RUN/samples/captions.txt
RUN/samples/im000000512000.gif        all of them side by side, which pages and loggers show
"""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from common.files import read_regular, write_atomic
from mds.videos import CONTAINERS, inspect_video, read_frames

MAX_FRAMES = 8
GAP_PX = 1
MOST_SIDE_PX, MOST_FRAMES = 640, 24  # of a grid in motion: GIF compresses little
CODECS = ("libx264", "mpeg4")  # browsers show the first; a build of FFmpeg without it has the second
# With macroblock trees x264 gives videos of 32 px other bytes every few times (seen with the build of PyAV 18.1).
QUALITY = {"libx264": {"crf": "16", "x264-params": "mbtree=0"}, "mpeg4": {"qscale": "2"}}


def strip_of(video: Tensor) -> Tensor:
    """Return up to MAX_FRAMES frames in a row, evenly spaced from first to last: (3, F, H, W) uint8 -> (3, H, n W + gaps)."""
    channels, num_frames, height, _ = video.shape
    frame_numbers = torch.linspace(0, num_frames - 1, min(num_frames, MAX_FRAMES)).round().long().tolist()
    gap = torch.full((channels, height, GAP_PX), 255, dtype=video.dtype)
    parts = [part for number in frame_numbers for part in (gap, video[:, number])]
    return torch.cat(parts[1:], dim=2)


def gif_of(video: Tensor, fps: float) -> bytes:
    """Return a video, (3, F, H, W) uint8, as a GIF that repeats: smaller if it is large, with fewer frames if long."""
    _, num_frames, height, width = video.shape
    frame_numbers = torch.linspace(0, num_frames - 1, min(num_frames, MOST_FRAMES)).round().long()
    scale = min(1.0, MOST_SIDE_PX / max(height, width))
    size = (max(1, round(scale * width)), max(1, round(scale * height)))
    frames = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in video[:, frame_numbers].unbind(dim=1)]
    first, *others = [frame.resize(size, Image.Resampling.LANCZOS) for frame in frames]
    content, each_ms = io.BytesIO(), 1000 * num_frames / fps / len(frames)
    first.save(content, "GIF", save_all=True, append_images=others, duration=max(20, round(each_ms)), loop=0)
    return content.getvalue()


def write_mp4(path: Path, video: Tensor, fps: float, comment: str = "") -> None:
    """Write a video, see `mp4_of`, as an MP4 file, whole or not at all. `comment`: kept in the file, see `comment_in`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, mp4_of(video, fps, comment))


def mp4_of(video: Tensor, fps: float, comment: str = "") -> bytes:
    """Return a video, (3, F, H, W) uint8 with even sides, as an MP4 file: with one build of FFmpeg always the same bytes."""
    import av

    name, content = next(name for name in CODECS if name in av.codecs_available), io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        container.metadata["comment"] = comment
        stream: Any = container.add_stream(name, rate=Fraction(fps).limit_denominator(1001), options=QUALITY[name])
        stream.height, stream.width = video.shape[2:]
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", 1
        for frame in video.permute(1, 2, 3, 0).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return content.getvalue()


def comment_in(path: Path) -> str:
    """Return the comment of an MP4 file, "" where it has none. Raises OSError, or av.error.FFmpegError: it is no video."""
    import av

    with av.open(str(path), options={"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}) as container:
        return container.metadata.get("comment", "")


def read_mp4(path: Path) -> Tensor:
    """Return every frame of a file of `write_mp4`, uint8 (3, F, H, W). Raises OSError, SampleError: it is none."""
    content = read_regular(path)
    video = inspect_video(content)
    times_sec = [number / (video.fps or 1.0) for number in range(video.num_frames)]
    return torch.stack(read_frames(content, times_sec, lambda frame: frame), dim=1)
