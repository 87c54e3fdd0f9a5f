"""One video: its file checked by decoding it whole, and the frames of a clip picked by time; clips of a dataset in batches.

    video      MP4, MOV, WebM or MKV, any codec that FFmpeg decodes; its first video track, everything else is ignored
    frame     uint8 (3, h, w), RGB, upright: as its track says it has to be turned; 8 bits, without its alpha channel
    clip      F frames, 1 / rate apart: each is the one that is shown at its time, the last that began by then
    shard     MDS: mp4 bytes, caption str, key str, num_frames int, fps float64
    batch     videos uint8 (B, 3, F, H, W), text columns int64 (B, L), "bad": [...]

Times are seconds from the video's first frame. A timestamp is only as exact as its file's clock: one that lies a tick of it
later than a frame's time, and no more than a millisecond, counts as that time. Pixels are taken as square; colors are
FFmpeg's, without a tone curve for HDR.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.value_types import ImageSize
from mds.images import (
    MAX_PIXELS,
    TRANSPOSED_ORIENTATIONS,
    SampleError,
    draw_clip_position,
    max_crop_offset,
    read_captions,
    resize_and_crop,
    rotate_upright,
    size_of,
)
from mds.loader import BatchMemory
from mds.reader import BatchDataset

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

Result = TypeVar("Result")

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm"
"""By FFmpeg's names. Playlists are none of them: they would open other files, and addresses."""
NOT_A_VIDEO = "not an MP4, MOV, WebM or MKV file"
DAMAGED = "truncated or damaged video"
BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")  # of which one begins an MP4 or MOV file
EBML = b"\x1a\x45\xdf\xa3"  # begins a WebM or MKV file
MIDDLE = 0.5
"""Where a clip lies in its video if nothing is drawn: videos begin with titles and fade in, as images have margins."""
EXACT_SEC = 1e-3
BEFORE_SEC = 0.1  # that a WebM's frames may end before its header says
# A track's matrix (a, b, c, d): x' = a x + c y, y' = b x + d y; ISO/IEC 14496-12, 8.3.2. -> EXIF's orientation
ORIENTATIONS = {
    (1, 0, 0, 1): 1,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}


@dataclass(frozen=True)
class VideoInfo:
    """What is known of a video that was decoded whole."""

    width: int
    height: int
    """px, of a frame upright."""
    num_frames: int
    fps: float
    """Frames a second from the first to the last; 0: there is one frame, or all have one time."""


def inspect_video(data: bytes) -> VideoInfo:
    """Decode a video to its end.

    Raises:
        SampleError: empty, not a video, damaged anywhere, without a frame, too many pixels, frames of several sizes.
    """
    with _open(data) as video:
        num_frames, first, last, size = 0, 0, 0, (0, 0)
        for frame in video.frames():
            if not num_frames:
                first, size = video.pts_of(frame), video.size_of(frame)
            elif video.pts_of(frame) < last:
                raise SampleError("frames whose times go back")
            last, num_frames = video.pts_of(frame), num_frames + 1
        if not num_frames:
            raise SampleError("video without a frame")
        seconds = (last - first) * video.tick_sec
        if num_frames > 1 and video.ends_before(BEFORE_SEC + 2 * seconds / (num_frames - 1)):
            raise SampleError(DAMAGED)
        return VideoInfo(*size, num_frames, (num_frames - 1) / seconds if seconds else 0.0)


def clip_times(num_frames: int, fps: float, *, frames: int, rate: float | None, position: float) -> list[float]:
    """Return the times of a clip's frames, s, ascending.

    Args:
        num_frames, fps: of the video, as `inspect_video` found them.
        frames: of the clip.
        rate: frames a second of the clip; None: the video's own.
        position: of the clip, from 0, where it begins with the video, to 1, where it ends with it.

    Raises:
        SampleError: the video is too short.
    """
    if frames == 1:
        length_sec = 0.0
    elif fps <= 0.0 or (rate is None and frames > num_frames):
        raise SampleError(f"fewer than {frames} frames")
    else:
        length_sec = (frames - 1) / (rate or fps)
    room_sec = ((num_frames - 1) / fps if fps > 0.0 else 0.0) - length_sec
    if room_sec < -EXACT_SEC:
        raise SampleError(f"shorter than {frames} frames at {rate:g} a second")
    begin_sec = position * max(0.0, room_sec)
    return [begin_sec + length_sec * number / max(1, frames - 1) for number in range(frames)]


def read_frames(data: bytes, times_sec: Sequence[float], make: Callable[[Tensor], Result]) -> list[Result]:
    """Return what `make` makes of the frame that is shown at each time, decoding from the key frame before the first on.

    Args:
        times_sec: ascending, from the video's first frame.
        make: takes a frame, uint8 (3, h, w). Of times that show one frame, it is called once.

    Raises:
        SampleError: as `inspect_video`, as far as it is decoded; or it ends before the last time.
    """
    with _open(data) as video:
        picked = _pick_frames(video, times_sec, video.iterate_frames_from(times_sec[0]))
        made: list[Result] = []
        before = None
        for frame in picked:
            made.append(made[-1] if frame is before else make(video.pixels_of(frame)))
            before = frame
        return made


def _pick_frames(video: _Video, times_sec: Sequence[float], frames: Iterator[VideoFrame]) -> Iterator[VideoFrame]:
    """Yield the frame of each time."""
    current, number = None, 0
    for frame in frames:
        while current is not None and video.seconds_of(frame) > times_sec[number]:
            yield current
            number += 1
            if number == len(times_sec):
                return
        current = frame
    if current is None or times_sec[-1] > video.seconds_of(current) + 2 * EXACT_SEC:
        raise SampleError("video ends before its stage says")
    for _ in times_sec[number:]:
        yield current


@contextlib.contextmanager
def _open(data: bytes) -> Iterator[_Video]:
    """Open a video, and say why it cannot be used, whatever it was that found it out. Raises SampleError."""
    import av

    av.logging.set_level(None)  # what FFmpeg would print names no file
    if not data:
        raise SampleError("video of zero bytes")
    try:
        with av.open(io.BytesIO(data), options={"format_whitelist": CONTAINERS, "protocol_whitelist": ""}) as container:
            yield _Video(container)
    except SampleError:
        raise
    except (av.error.FFmpegError, ValueError, OverflowError, MemoryError) as error:
        is_video = data.startswith(EBML) or data[4:8] in BOXES
        raise SampleError(DAMAGED if is_video else NOT_A_VIDEO) from error


class _Video:
    """An open video: its frames in the order in which they are shown."""

    def __init__(self, container: InputContainer):
        tracks = [track for track in container.streams.video if not _is_cover_art(track)]
        if not tracks:
            raise SampleError("no video track")
        self.container, self.track = container, tracks[0]
        context: Any = self.track.codec_context
        if context is None:
            raise SampleError("video of a codec that is not known")
        if context.width * context.height > MAX_PIXELS:
            raise SampleError("too many pixels")
        context.options = {"max_pixels": str(MAX_PIXELS)}  # a frame may be larger than the header says
        context.thread_count, context.thread_type = 1, "NONE"  # loader processes are as many as there are cores
        self.tick_sec = float(self.track.time_base or 0)
        self.size: ImageSize | None = None
        self.first: int | None = None
        self._ends_sec = 0.0

    def frames(self) -> Iterator[VideoFrame]:
        """Yield the rest of the frames. Raises SampleError: one is damaged, or is of another size than the first."""
        for packet in self.container.demux():
            if packet.pts is not None:
                self._ends_sec = max(self._ends_sec, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream is not self.track:
                continue
            if packet.is_corrupt:
                raise SampleError(DAMAGED)
            for frame in self.track.decode(packet):
                if frame.is_corrupt:
                    raise SampleError(DAMAGED)
                self.size = self.size or self.size_of(frame)
                if self.size_of(frame) != self.size:
                    raise SampleError("frames of several sizes")
                self.first = self.pts_of(frame) if self.first is None else self.first
                yield frame

    def iterate_frames_from(self, time_sec: float) -> Iterator[VideoFrame]:
        """Yield the frames from the one on that is shown at a time, or from an earlier one."""
        frames = self.frames()
        if (first := next(frames, None)) is None:
            return
        start, after = None, frames
        if self._has_key_frame_before(time_sec):
            after = self._frames_after_seek(self.pts_of(first) + int(time_sec / self.tick_sec))
            with contextlib.suppress(ValueError, OSError):  # begun in the middle, a frame may lack what it is made from
                start = next(after, None)
            if start is None or self.seconds_of(start) > time_sec:
                after = self._frames_after_seek(self.pts_of(first))
                start = next(after, None)
        yield first if start is None else start
        yield from after

    def _frames_after_seek(self, pts: int) -> Iterator[VideoFrame]:
        self.container.seek(pts, stream=self.track)
        yield from self.frames()

    def _has_key_frame_before(self, time_sec: float) -> bool:
        """True where the file's index has a key frame, other than the first frame, from which to decode."""
        entries = self.track.index_entries
        number = entries.search_timestamp((self.first or 0) + int(time_sec / self.tick_sec)) if len(entries) else 0
        return number > 0 and entries[number].timestamp > (self.first or 0)

    def pts_of(self, frame: VideoFrame) -> int:
        """Return a frame's time, in ticks. Raises SampleError: it has none."""
        if frame.pts is None:
            raise SampleError("frames without times")
        return frame.pts

    def seconds_of(self, frame: VideoFrame) -> float:
        """Return a frame's time from the first, s, early by what its file's clock may round away."""
        return (self.pts_of(frame) - (self.first or 0)) * self.tick_sec - min(self.tick_sec, EXACT_SEC)

    def size_of(self, frame: VideoFrame) -> ImageSize:
        """Return (width, height) of a frame upright, px."""
        size = frame.width, frame.height
        return size[::-1] if _frame_orientation(frame) in TRANSPOSED_ORIENTATIONS else size

    def pixels_of(self, frame: VideoFrame) -> Tensor:  # -> uint8 (3, h, w), RGB
        """Return a frame upright; in memory a pixel's three levels lie together."""
        # With its own threads, a discarded frame waits for them, forever if the process has been forked since.
        pixels = torch.from_numpy(frame.reformat(format="rgb24", threads=1).to_ndarray()).permute(2, 0, 1)
        orientation = _frame_orientation(frame)
        return pixels if orientation == 1 else rotate_upright(pixels, orientation)

    def ends_before(self, margin_sec: float) -> bool:
        """True where a WebM or MKV file, read to its end, has less than it says: FFmpeg takes a cut for its end."""
        if "matroska" not in self.container.format.name or not self.container.duration:
            return False
        return self.container.duration / 1e6 > self._ends_sec + margin_sec


def _is_cover_art(track: VideoStream) -> bool:
    """True for embedded cover art."""
    from av.stream import Disposition

    return Disposition.attached_pic in track.disposition


def _frame_orientation(frame: VideoFrame) -> int:
    """Return how a frame has to be turned, as EXIF numbers it. Raises SampleError: not by right angles."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 1
    numbers = np.frombuffer(bytes(matrix), np.int32)[[0, 1, 3, 4]].astype(np.float64)
    turned = tuple(map(round, (numbers / (np.abs(numbers).max() or 1.0)).tolist()))
    if turned not in ORIENTATIONS:
        raise SampleError("video turned by no right angle")
    return ORIENTATIONS[turned]


# --- batches ---


def read_clip(
    sample: Mapping[str, Any],
    size: ImageSize,
    *,
    rate: float | None,
    position: float = MIDDLE,
    at: Callable[[ImageSize], ImageSize] | None = None,
    flip: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # -> uint8 (F, H, W, 3)
    """Return a clip of a sample of the dataset.

    Args:
        size: (width, height, frames).
        rate: frames a second; None: the video's own.
        position: of the clip in the video, from 0 to 1; see `clip_times`.
        at: room (x, y), px -> the crop's left and top; None: its centre. All frames have one crop.
        flip: mirrored.
        out: memory for it; None: new one.

    Raises:
        SampleError: the video is too short or damaged.
    """
    width, height, num_frames = size
    stored_frames, fps = int(sample["num_frames"]), float(sample["fps"])
    if stored_frames < 1 or not math.isfinite(fps):
        raise SampleError("invalid number or rate of frames")
    times = clip_times(stored_frames, fps, frames=num_frames, rate=rate, position=position)

    def make(pixels: Tensor) -> Tensor:  # (3, h, w) -> (H, W, 3)
        room = max_crop_offset(size_of(pixels), (width, height))
        scaled = resize_and_crop(pixels, (width, height), at=at and at(room)).permute(1, 2, 0)
        return scaled.flip(1) if flip else scaled

    clip = torch.empty(num_frames, height, width, 3, dtype=torch.uint8) if out is None else out
    for row, frame in zip(clip, read_frames(sample["mp4"], times, make), strict=True):
        row.copy_(frame)
    return clip


class VideosDataset(BatchDataset):
    """Batches of clips: {"videos": uint8 (B, 3, F, H, W), each text column: int64 (B, L), "bad": [...]}.

    Where samples are shuffled, a clip lies at another place of its video in each epoch, else in its middle.

    Args:
        sizes: (width, height, frames) of each stream's clips.
        rate: frames a second; None: each video's own.
        tokenize: captions -> text columns.
        captions: of each stream, the column of its captions; None: the dataset's own.
        flip, crop: see data.DataConfig; all frames of a clip alike.
        arguments: keyword arguments of BatchDataset.
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
        """Decode, scale and cut the clips, and tokenize their captions in one call."""
        ids = sample_ids.tolist()
        width, height, num_frames = self.sizes[self.stream_of(ids[0])]
        # A pixel's three levels lie together, as in the frames: a worker would take long to part them, a device does not.
        memory, receipt = self.memory.allocate((len(ids), num_frames, height, width, 3), torch.uint8)
        captions, bad = [], []
        for clip, sample_id in zip(memory, ids, strict=True):
            caption, bad_samples = self.read_first_good(sample_id, functools.partial(self.use_sample, clip))
            captions.append(caption)
            bad += bad_samples
        return {"videos": memory.permute(0, 4, 1, 2, 3), **self.tokenize(captions), "bad": bad, **receipt}

    def use_sample(self, clip: Tensor, sample_id: int) -> str:
        """Read a sample's clip into memory, uint8 (F, H, W, 3), and return its caption. Raises SampleError."""
        sample, draw, stream = self[sample_id], self.draw(sample_id), self.stream_of(sample_id)
        column = self.captions[stream]
        caption = draw.choose_caption(read_captions(sample if column is None else {"caption": sample[column]}))
        position = draw_clip_position(self.shuffle_seed, self.epoch, sample_id) if self.shuffle else MIDDLE
        at = draw.crop_offset if self.crop == "random" else None
        is_flipped = self.flip and draw.is_flipped
        read_clip(sample, self.sizes[stream], rate=self.rate, position=position, at=at, flip=is_flipped, out=clip)
        return caption
