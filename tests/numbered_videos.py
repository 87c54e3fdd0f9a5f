"""Videos for tests, made with PyAV: each frame shows its number, as eight black or white blocks along its upper edge."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch

BITS = 8
QUICK = {
    "libvpx-vp9": {"cpu-used": "8", "deadline": "realtime"},
    "libx264": {"preset": "ultrafast"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=none"},
}


def numbered(number: int, size: tuple[int, int] = (64, 48)) -> np.ndarray:
    """A frame, uint8 (h, w, 3): blocks, a gradient below them, and a corner of one colour."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([x, y, np.full_like(x, 128)], axis=-1).astype(np.uint8)
    for bit in range(BITS):
        left, right = (round(width * at / BITS) for at in (bit, bit + 1))
        pixels[: height // 4, left:right] = 255 if number >> bit & 1 else 0
    pixels[-height // 4 :, : width // 8] = (200, 30, 30)
    return pixels


def number_of(pixels: torch.Tensor) -> int:  # (3, h, w)
    """Read a frame's number."""
    _, height, width = pixels.shape
    row = pixels[:, height // 8].float().mean(dim=0)
    return sum(1 << bit for bit in range(BITS) if row[int(width * (bit + 0.5) / BITS)] > 127)


def film(
    num: int = 20,
    *,
    size: tuple[int, int] = (64, 48),
    codec: str = "libx264",
    kind: str = "mp4",
    pixels: str = "yuv420p",
    rate: int = 10,
    times_ms: Sequence[int] | None = None,
    gop: int = 5,
    matrix: Sequence[int] | None = None,
    draw: Callable[[int, tuple[int, int]], np.ndarray] = numbered,
    audio: str | None = None,
    options: Mapping[str, str] | None = None,
    of_file: Mapping[str, str] | None = None,
) -> bytes:
    """A video of so many frames.

    Args:
        size: (width, height), px. rate: frames a second.
        times_ms: of the frames; None: by the rate.
        gop: frames from one key frame to the next.
        matrix: (a, b, c, d) of the track, see mds.videos.ORIENTATIONS.
        draw: number, size -> a frame, uint8 (h, w, 3), or (h, w, 4) with alpha.
        audio: codec of a silent second track.
        options, of_file: of the encoder, and of the file's writer.
    """
    tick = Fraction(1, 1000) if times_ms else Fraction(1, rate)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "film")
        with av.open(str(path), "w", format=kind, options=dict(of_file or {})) as file:
            track = file.add_stream(codec, rate=rate, options={**QUICK.get(codec, {}), **(options or {})})
            track.width, track.height, track.pix_fmt, track.gop_size = *size, pixels, gop
            track.codec_context.time_base = tick
            if matrix is not None:
                a, b, c, d = (number << 16 for number in matrix)
                track.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])
            sound = file.add_stream(audio, rate=48000, layout="mono") if audio else None
            for number in range(num):
                image = draw(number, size)
                frame = av.VideoFrame.from_ndarray(image, format="rgba" if image.shape[2] == 4 else "rgb24")
                frame = frame.reformat(format=pixels, threads=1)
                frame.pts, frame.time_base = times_ms[number] if times_ms else number, tick
                file.mux(track.encode(frame))
            file.mux(track.encode(None))
            if sound is not None:
                file.mux(_silence(sound, num / rate))
        return path.read_bytes()


def music(kind: str = "mp4") -> bytes:
    """A file with a sound track alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "music")
        with av.open(str(path), "w", format=kind) as file:
            file.mux(_silence(file.add_stream("aac", rate=48000, layout="mono"), 1.0))
        return path.read_bytes()


def _silence(track: av.AudioStream, seconds: float) -> Iterable[av.Packet]:
    packets = []
    for number in range(int(seconds * 48000) // 960):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 48000, 960 * number, Fraction(1, 48000)
        packets += track.encode(frame)
    return [*packets, *track.encode(None)]
