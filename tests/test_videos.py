"""mds/videos.py: frames by time against videos that show their numbers, rotation, and what cannot be used."""

from __future__ import annotations

import random

import numpy as np
import pytest
from conftest import picture
from numbered_videos import film, music, number_of

from mds import videos
from mds.images import SampleError
from mds.videos import VideoInfo, clip_times, inspect_video, read_frames

KINDS = {
    "h264 with B frames": {"options": {"preset": "fast", "bf": "3"}},
    "vp9 in WebM": {"codec": "libvpx-vp9", "kind": "webm"},
    "av1 in WebM": {"codec": "libsvtav1", "kind": "webm"},
    "open GOPs": {"codec": "libx265", "options": {"preset": "fast", "x265-params": "log-level=none:open-gop=1"}},
    "one key frame": {"gop": 1000},
    "in fragments": {"of_file": {"movflags": "frag_keyframe+empty_moov"}},
    "WebM without an index": {"codec": "libvpx-vp9", "kind": "webm", "of_file": {"live": "1"}},
}


def numbers_at(data: bytes, times: list[float]) -> list[int]:
    return read_frames(data, times, number_of)


# --- frames by time ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_is_the_last_that_began_by_its_time(kind):
    data = film(60, **{"gop": 10, **KINDS[kind]})
    draw = random.Random(kind)
    for times in ([0.0], [5.9], [0.1 * n for n in range(60)], sorted(draw.uniform(0, 5.9) for _ in range(7))):
        assert numbers_at(data, times) == [int(10 * time + 1e-6) for time in times], times
    for begin in (0.35, 2.95, 4.0, 5.15):
        assert numbers_at(data, [begin, begin + 0.3]) == [int(10 * begin + 1e-6), int(10 * begin + 3 + 1e-6)]


def test_where_the_rate_varies_the_times_of_the_frames_count():
    times_ms = [0, 40, 80, 1000, 1033, 2500, 2600, 9000]
    data = film(len(times_ms), times_ms=times_ms, rate=25)
    for step_ms in (20, 250, 700, 1500):
        at_ms = range(0, 9001, step_ms)
        expected = [max(n for n, begin in enumerate(times_ms) if begin <= at) for at in at_ms]
        assert numbers_at(data, [at / 1000 for at in at_ms]) == expected
    info = inspect_video(data)
    assert info.num_frames == 8 and info.fps == pytest.approx(7 / 9)
    late = film(20, times_ms=range(5000, 7000, 100), codec="libvpx-vp9", kind="webm")  # a clock that starts at 5 s
    assert inspect_video(late) == VideoInfo(64, 48, 20, 10.0) and numbers_at(late, [0.0, 1.05]) == [0, 10]
    with pytest.raises(SampleError, match="^video ends before its stage says$"):
        numbers_at(film(20), [1.0, 2.5])


@pytest.mark.parametrize("rate", [24, 30])
def test_times_that_a_files_clock_has_rounded_lose_no_frame(rate):
    """WebM has milliseconds: the third frame at 30 a second is at 0.067 s, after its time."""
    data = film(100, codec="libvpx-vp9", kind="webm", rate=rate)
    info = inspect_video(data)
    assert info.fps == pytest.approx(rate, rel=1e-3)
    for wanted in (None, float(rate)):
        times = clip_times(info.num_frames, info.fps, frames=100, rate=wanted, position=0.0)
        assert numbers_at(data, times) == list(range(100))


def test_the_times_of_a_clip_are_evenly_apart_and_end_with_the_video():
    def times(frames: int, rate: float | None, position: float) -> list[float]:
        return clip_times(11, 10.0, frames=frames, rate=rate, position=position)

    assert times(5, 10.0, 0.0) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert times(5, None, 1.0) == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])
    assert times(3, 4.0, 0.5) == pytest.approx([0.25, 0.5, 0.75])
    assert times(1, 4.0, 0.5) == [0.5] and clip_times(1, 0.0, frames=1, rate=None, position=0.7) == [0.0]
    assert times(11, 9.9999, 0.3)[0] == 0.0  # late by less than a clock's precision
    for frames, rate, text in ((12, None, "fewer than 12 frames"), (5, 3.9, "shorter than 5 frames at 3.9 a second")):
        with pytest.raises(SampleError, match=f"^{text}$"):
            times(frames, rate, 0.0)


# --- pixels ---


@pytest.mark.parametrize("matrix", videos.ORIENTATIONS)
def test_frames_are_turned_as_the_tracks_matrix_says(matrix):
    """Against the matrix applied to each pixel's position; lossless."""
    lossless = dict(size=(6, 4), codec="png", kind="mov", pixels="rgb24")
    data, shown = film(2, **lossless, matrix=matrix, draw=coloured), coloured(1)
    a, b, c, d = matrix
    y, x = np.mgrid[:4, :6]
    right, down = a * x + c * y, b * x + d * y
    expected = np.zeros((np.ptp(down) + 1, np.ptp(right) + 1, 3), np.uint8)
    expected[down - down.min(), right - right.min()] = shown
    [pixels] = read_frames(data, [0.1], lambda frame: frame)
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), expected)
    info = inspect_video(data)
    assert (info.height, info.width) == expected.shape[:2]


def coloured(number: int, size: tuple[int, int] = (6, 4)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)


@pytest.mark.parametrize(
    ("num", "size", "options"),
    [
        (20, (64, 48), {"codec": "libvpx-vp9", "kind": "webm", "pixels": "yuva420p"}),
        (20, (64, 48), {"codec": "prores_ks", "kind": "mov", "pixels": "yuva444p10le"}),
        (20, (64, 48), {"audio": "aac"}),
        (1, (64, 48), {}),
        (20, (1, 1), {"codec": "ffv1", "kind": "matroska", "pixels": "bgr0"}),
        (20, (33, 17), {"codec": "libvpx-vp9", "kind": "webm"}),
        (2, (7680, 4320), {"codec": "mjpeg", "kind": "mov", "pixels": "yuvj420p"}),
    ],
)
def test_videos_of_many_kinds_are_usable_and_their_pixels_have_the_limit_of_images(monkeypatch, num, size, options):
    gray = np.full((size[1], size[0], 3), 90, np.uint8)
    data = film(num, size=size, draw=lambda number, size: gray, **options)
    assert inspect_video(data) == VideoInfo(*size, num, 10.0 if num > 1 else 0.0)
    assert read_frames(data, [0.0], lambda frame: frame.shape) == [(3, *size[::-1])]
    monkeypatch.setattr(videos, "MAX_PIXELS", size[0] * size[1] - 1)
    with pytest.raises(SampleError, match=r"^too many pixels$"):
        inspect_video(data)


# --- what cannot be used ---


def bad_files() -> dict[str, tuple[bytes, str]]:
    """Name -> the file, and why it cannot be used; also for other tests."""
    whole, webm = film(40), film(40, codec="libvpx-vp9", kind="webm")
    first = film(40, of_file={"movflags": "faststart"})
    hole = bytearray(first)
    hole[len(hole) // 2 : len(hole) // 2 + 400] = bytes(400)
    gif = film(4, codec="gif", kind="gif", pixels="rgb8")
    return {
        "empty": (b"", "video of zero bytes"),
        "html": (b"<html>not found</html>", videos.NOT_A_VIDEO),
        "gif": (gif, videos.NOT_A_VIDEO),
        "picture": (picture(1), videos.NOT_A_VIDEO),
        "playlist": (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", videos.NOT_A_VIDEO),
        "cut": (whole[: len(whole) // 2], videos.DAMAGED),
        "cut_head_first": (first[: -len(first) // 4], videos.DAMAGED),
        "cut_webm": (webm[: -len(webm) // 4], videos.DAMAGED),
        "hole": (bytes(hole), videos.DAMAGED),
        "music": (music(), "no video track"),
        "no_frames": (without_frames(whole), "video without a frame"),
    }


def without_frames(data: bytes) -> bytes:
    """A file whose video track has no sample: its tables of samples are renamed, so that readers pass over them."""
    for box in (b"stsz", b"stts", b"stsc", b"stco", b"stss", b"ctts"):
        data = data.replace(box, b"skip")
    return data


def test_a_bad_file_is_refused_with_its_reason(capfd):
    for name, (data, reason) in bad_files().items():
        with pytest.raises(SampleError, match=f"^{reason}$"):
            inspect_video(data)
        assert capfd.readouterr() == ("", ""), name
    with pytest.raises(SampleError, match=r"^video turned by no right angle$"):
        inspect_video(film(2, matrix=(1, 1, -1, 1)))


def test_whatever_bytes_are_changed_nothing_but_a_samples_error_is_raised():
    draw, num_refused = random.Random(5), 0
    for data in (film(20), film(20, codec="libvpx-vp9", kind="webm"), film(20, codec="mpeg4", kind="mov")):
        for _ in range(40):
            changed = bytearray(data)
            for _ in range(draw.choice([1, 3, 30])):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            try:
                inspect_video(bytes(changed))
                read_frames(bytes(changed), [0.0, 0.55], lambda frame: frame)
            except SampleError:
                num_refused += 1
    assert num_refused > 20
