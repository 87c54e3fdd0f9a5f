"""stages/videos.py: frames by time against films that show their numbers, rotation, and what cannot be used."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from conftest import picture
from films import film, music, number_of, numbered

from stages import videos
from stages.images import SampleError, decode_image
from stages.videos import FilmFacts, clip_times, inspect_film, read_frames

KINDS = {
    "h264": {},
    "h264 with B frames": {"options": {"preset": "fast", "bf": "3"}},
    "mpeg4": {"codec": "mpeg4"},
    "vp9 in WebM": {"codec": "libvpx-vp9", "kind": "webm"},
    "av1 in WebM": {"codec": "libsvtav1", "kind": "webm"},
    "hevc in MKV": {"codec": "libx265", "kind": "matroska"},
    "open GOPs": {"codec": "libx265", "options": {"preset": "fast", "x265-params": "log-level=none:open-gop=1"}},
    "prores in MOV": {"codec": "prores_ks", "kind": "mov", "pixels": "yuv422p10le"},
    "one key frame": {"gop": 1000},
    "with sound": {"audio": "aac"},
    "in fragments": {"of_file": {"movflags": "frag_keyframe+empty_moov"}},
    "WebM without an index": {"codec": "libvpx-vp9", "kind": "webm", "of_file": {"live": "1"}},
    "with an edit list": {"options": {"preset": "fast", "bf": "2"}, "of_file": {"use_editlist": "1"}},
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
    facts = inspect_film(data)
    assert facts.num_frames == 8 and facts.fps == pytest.approx(7 / 9)


@pytest.mark.parametrize("rate", [24, 30, 60])
def test_times_that_a_files_clock_has_rounded_lose_no_frame(rate):
    """WebM has milliseconds: the third frame at 30 a second is at 0.067 s, after its time."""
    data = film(100, codec="libvpx-vp9", kind="webm", rate=rate)
    facts = inspect_film(data)
    assert facts.fps == pytest.approx(rate, rel=1e-3)
    for wanted in (None, float(rate)):
        times = clip_times(facts.num_frames, facts.fps, frames=100, rate=wanted, place=0.0)
        assert numbers_at(data, times) == list(range(100))


def test_times_begin_with_the_first_frame_wherever_the_files_clock_begins():
    data = film(20, times_ms=range(5000, 7000, 100), codec="libvpx-vp9", kind="webm")
    assert inspect_film(data) == FilmFacts(64, 48, 20, 10.0) and numbers_at(data, [0.0, 1.05]) == [0, 10]


def test_what_lies_before_the_last_key_frame_is_not_decoded(monkeypatch):
    data, decoded, frames = film(200, gop=20), [], videos._Film.frames

    def counted(self):
        for frame in frames(self):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(videos._Film, "frames", counted)
    assert numbers_at(data, [18.5, 18.7]) == [185, 187] and len(decoded) <= 1 + 10
    decoded.clear()
    assert numbers_at(data, [0.5, 0.7]) == [5, 7] and len(decoded) <= 10


def test_a_frame_that_several_times_show_is_made_once():
    made = []
    found = read_frames(film(4), [0.0, 0.01, 0.02, 0.1, 0.3], lambda frame: made.append(number_of(frame)) or made[-1])
    assert found == [0, 0, 0, 1, 3] and made == [0, 1, 3]


def test_the_times_of_a_clip_are_evenly_apart_and_end_with_the_film():
    assert clip_times(11, 10.0, frames=5, rate=10.0, place=0.0) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert clip_times(11, 10.0, frames=5, rate=None, place=1.0) == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])
    assert clip_times(11, 10.0, frames=3, rate=4.0, place=0.5) == pytest.approx([0.25, 0.5, 0.75])
    assert clip_times(11, 10.0, frames=1, rate=4.0, place=0.5) == pytest.approx([0.5])
    assert clip_times(1, 0.0, frames=1, rate=None, place=0.7) == [0.0]
    assert (
        clip_times(11, 10.0, frames=11, rate=9.9999, place=0.3)[0] == 0.0
    )  # late by less than files' clocks are exact
    for given, text in [
        (dict(num_frames=11, fps=10.0, frames=12, rate=None), "fewer than 12 frames"),
        (dict(num_frames=11, fps=10.0, frames=5, rate=3.9), "shorter than 5 frames at 3.9 a second"),
        (dict(num_frames=1, fps=0.0, frames=2, rate=8.0), "fewer than 2 frames"),
    ]:
        with pytest.raises(SampleError) as error:
            clip_times(**given, place=0.0)
        assert str(error.value) == text


def test_a_film_that_is_shorter_than_was_said_is_refused():
    with pytest.raises(SampleError) as error:
        numbers_at(film(20), [1.0, 2.5])
    assert str(error.value) == "video ends before its stage says"


# --- pixels ---


@pytest.mark.parametrize("matrix", videos.ORIENTATIONS)
def test_frames_are_turned_as_the_tracks_matrix_says(matrix):
    """Against the matrix applied to each pixel's place; lossless."""
    data, shown = (
        film(2, size=(6, 4), codec="png", kind="mov", pixels="rgb24", matrix=matrix, draw=coloured),
        coloured(1),
    )
    a, b, c, d = matrix
    y, x = np.mgrid[:4, :6]
    right, down = a * x + c * y, b * x + d * y
    expected = np.zeros((np.ptp(down) + 1, np.ptp(right) + 1, 3), np.uint8)
    expected[down - down.min(), right - right.min()] = shown
    [pixels] = read_frames(data, [0.1], lambda frame: frame)
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), expected)
    facts = inspect_film(data)
    assert (facts.height, facts.width) == expected.shape[:2]


def coloured(number: int, size: tuple[int, int] = (6, 4)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)


def test_a_film_that_is_turned_by_no_right_angle_is_refused():
    with pytest.raises(SampleError, match=r"^video turned by no right angle$"):
        inspect_film(film(2, matrix=(1, 1, -1, 1)))


def test_ten_bits_become_eight_and_a_lossless_frame_is_its_own():
    [eight], [ten] = (
        read_frames(film(2, codec="ffv1", kind="matroska", pixels=pixels), [0.1], lambda frame: frame.float())
        for pixels in ("yuv444p", "yuv444p10le")
    )
    assert ten.max() <= 255 and (eight - ten).abs().max() <= 3 and (eight - ten).abs().mean() < 0.7
    [exact] = read_frames(film(2, codec="png", kind="mov", pixels="rgb24"), [0.1], lambda frame: frame)
    assert torch.equal(exact, torch.from_numpy(numbered(1)).permute(2, 0, 1))


def test_alpha_is_dropped_and_colours_stay_as_they_are_stored():
    def half_clear(number, size):
        alpha = np.full((size[1], size[0], 1), 255, np.uint8)
        alpha[:, : size[0] // 2] = 0
        return np.concatenate([numbered(number, size), alpha], axis=2)

    data = film(3, codec="png", kind="mov", pixels="rgba", draw=half_clear)
    [frame] = read_frames(data, [0.2], lambda frame: frame)
    assert torch.equal(frame, torch.from_numpy(numbered(2)).permute(2, 0, 1))


USABLE = {
    "vp9 with alpha": ({"codec": "libvpx-vp9", "kind": "webm", "pixels": "yuva420p"}, FilmFacts(64, 48, 20, 10.0)),
    "prores with alpha": ({"codec": "prores_ks", "kind": "mov", "pixels": "yuva444p10le"}, FilmFacts(64, 48, 20, 10.0)),
    "10 bits": ({"pixels": "yuv420p10le"}, FilmFacts(64, 48, 20, 10.0)),
    "motion JPEG": ({"codec": "mjpeg", "kind": "mov", "pixels": "yuvj420p"}, FilmFacts(64, 48, 20, 10.0)),
    "sound": ({"audio": "aac"}, FilmFacts(64, 48, 20, 10.0)),
    "one frame": ({"num": 1}, FilmFacts(64, 48, 1, 0.0)),
    "1 x 1": ({"size": (1, 1), "codec": "ffv1", "kind": "matroska", "pixels": "bgr0"}, FilmFacts(1, 1, 20, 10.0)),
    "odd sides": ({"size": (33, 17), "codec": "libvpx-vp9", "kind": "webm"}, FilmFacts(33, 17, 20, 10.0)),
}


@pytest.mark.parametrize("name", USABLE)
def test_films_of_many_kinds_are_usable(name):
    given, facts = USABLE[name]
    assert inspect_film(film(**{"num": 20, **given})) == facts


def test_8k_is_usable_and_a_frame_of_more_pixels_than_an_image_may_have_is_not(monkeypatch):
    grey = np.full((4320, 7680, 3), 90, np.uint8)
    data = film(2, size=(7680, 4320), codec="mjpeg", kind="mov", pixels="yuvj420p", draw=lambda number, size: grey)
    assert inspect_film(data) == FilmFacts(7680, 4320, 2, 10.0)
    assert read_frames(data, [0.1], lambda frame: frame.shape) == [(3, 4320, 7680)]
    monkeypatch.setattr(videos, "MAX_PIXELS", 7680 * 4320 - 1)
    with pytest.raises(SampleError, match=r"^too many pixels$"):
        inspect_film(data)


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
        "html": (b"<html>not found</html>", videos.NOT_A_FILM),
        "gif": (gif, videos.NOT_A_FILM),
        "picture": (picture(1), videos.NOT_A_FILM),
        "playlist": (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", videos.NOT_A_FILM),
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


@pytest.fixture(scope="module")
def bad():
    return bad_files()


@pytest.mark.parametrize(
    "name",
    ["empty", "html", "gif", "picture", "playlist", "cut", "cut_head_first", "cut_webm", "hole", "music", "no_frames"],
)
def test_a_bad_file_is_refused_with_its_reason(bad, name, capfd):
    data, reason = bad[name]
    with pytest.raises(SampleError) as error:
        inspect_film(data)
    assert str(error.value) == reason and capfd.readouterr() == ("", "")


def test_a_cut_anywhere_is_noticed():
    for data in (film(40, of_file={"movflags": "faststart"}), film(40, codec="libvpx-vp9", kind="webm")):
        for percent in range(2, 90, 8):
            with pytest.raises(SampleError):
                inspect_film(data[: len(data) * percent // 100])


def test_whatever_bytes_are_changed_nothing_but_a_samples_error_is_raised():
    draw, found = random.Random(5), 0
    for data in (film(20), film(20, codec="libvpx-vp9", kind="webm"), film(20, codec="mpeg4", kind="mov")):
        for _ in range(40):
            changed = bytearray(data)
            for _ in range(draw.choice([1, 3, 30])):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            try:
                inspect_film(bytes(changed))
                read_frames(bytes(changed), [0.0, 0.55], lambda frame: frame)
            except SampleError:
                found += 1
    assert found > 20


def test_an_image_is_read_by_the_other_reader_alone():
    with pytest.raises(SampleError, match=r"^not an image$"):
        decode_image(film(2))
