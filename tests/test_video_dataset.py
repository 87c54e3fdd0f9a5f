"""The dataset `videos`: prepare/shards.py makes it of videos, data.py reads clips of it, prepare/latents.py encodes them."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from conftest import write_tar
from numbered_videos import film
from test_data import CPU
from test_latents import rows
from test_shards import skipped
from test_videos import bad_files

from data import DataConfig, build_data
from families import load_family
from mds.dataset import read_dataset
from mds.images import draw_clip_position, draw_sample, max_crop_offset, resize_and_crop
from mds.videos import clip_times, read_frames
from prepare import shards

FAMILY = load_family("wan", "tiny", "t2v")
SIZE, SEED = (48, 32, 5), 3
NUM = 18
LENGTHS, RATES, SIZES = (12, 20, 40), (5, 8, 10), ((64, 48), (48, 64), (96, 40))


@functools.cache
def film_of(number: int) -> bytes:
    kind = {"codec": "libvpx-vp9", "kind": "webm"} if number % 4 == 1 else {}
    return film(LENGTHS[number % 3], rate=RATES[number // 3 % 3], size=SIZES[number % 3], **kind)


def files_of(number: int) -> dict[str, bytes]:
    metadata = {"url": f"https://example.invalid/{number}.mp4", "clip": number}
    suffix = "webm" if number % 4 == 1 else "mp4"
    return {suffix: film_of(number), "txt": f"film {number}".encode(), "json": json.dumps(metadata).encode()}


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films") / "tars"
    for tar in range(2):
        numbers = range(NUM // 2 * tar, NUM // 2 * (tar + 1))
        write_tar(folder / f"{tar:05d}.tar", {f"{n:09d}": files_of(n) for n in numbers})
    return folder


@pytest.fixture(scope="module")
def stage(tars, tmp_path_factory):
    out = tmp_path_factory.mktemp("videos") / "videos"
    assert shards.main([str(tars), str(out), "shard_size=16kb"]) == 0
    return out


# --- the dataset is made ---


def test_bytes_captions_counts_and_metadata_arrive_unchanged(stage):
    written = rows(stage)
    assert [row["key"] for row in written] == [f"{n:09d}" for n in range(NUM)]
    for number, row in enumerate(written):
        assert row["mp4"] == film_of(number) and row["caption"] == f"film {number}"
        assert (row["width"], row["height"]) == SIZES[number % 3] and row["num_frames"] == LENGTHS[number % 3]
        assert row["fps"] == pytest.approx(RATES[number // 3 % 3], rel=2e-3) and row["metadata"]["clip"] == number
    facts, made = json.loads((stage / "dataset.json").read_text()), read_dataset(str(stage))
    assert {"stage": "videos", "made_by": "prepare.shards", "samples": NUM}.items() <= facts.items()
    columns = {"mp4", "caption", "key", "width", "height", "num_frames", "fps", "metadata"}
    assert made.kind == "videos" and len(made.shards) > 3 and {*made.columns} == columns


def test_a_folder_a_tar_and_a_table_give_the_same_samples(tars, tmp_path, capsys):
    (tmp_path / "files").mkdir()
    lines = ["video,text,id"]
    for number in range(NUM // 2):
        for suffix, content in files_of(number).items():
            (tmp_path / "files" / f"{number:09d}.{suffix}").write_bytes(content)
        lines.append(f"files/{number:09d}.{next(iter(files_of(number)))},film {number},{number:09d}")
    (tmp_path / "films.csv").write_text("\n".join([*lines, ""]))
    for out, *words in (
        ("a", tmp_path / "files"),
        ("b", tars / "00000.tar"),
        ("c", tmp_path / "films.csv", "video=video"),
    ):
        assert shards.main([*map(str, words[:1]), str(tmp_path / out), *words[1:]]) == 0
    assert "taken: video from video, caption from text, key from id" in capsys.readouterr().out
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert [row | {"metadata": {}} for row in rows(tmp_path / "a")] == rows(tmp_path / "c")


def test_bad_videos_are_counted_and_named_and_the_rest_is_written(tmp_path):
    good, bad = {"mp4": film_of(0), "txt": b"a film"}, bad_files()
    reasons = {name: bad[name][1] for name in ("html", "cut", "music")}
    samples = {"good": good} | {name: {**good, "mp4": bad[name][0]} for name in reasons}
    samples |= {"no_caption": {"mp4": film_of(0)}, "no_film": {"txt": b"a film"}}
    reasons |= {"no_caption": "missing caption", "no_film": "missing video"}
    assert shards.main([str(write_tar(tmp_path / "in.tar", samples)), str(tmp_path / "out")]) == 0
    assert [row["key"] for row in rows(tmp_path / "out")] == ["good"]
    assert {key: reason for _, key, reason in skipped(tmp_path / "out" / "skipped.jsonl")} == reasons


# --- clips are read ---


def batches_of(place, *epochs: int, size=SIZE, device_batch_size: int = 6, workers: int = 0, begin=(0, 0), **config):
    """Return the batches of some epochs, and the samples that cannot be used."""
    section = DataConfig(stage="videos", local=str(place), workers=workers, **config)
    loader = build_data(
        section, FAMILY, size=size, device_batch_size=device_batch_size, device=CPU, seed=SEED
    ).dataloader
    if begin != (0, 0):
        loader.resume(*begin, 6)
    read = [list(loader) for _ in range(1 + max(epochs) - begin[0])]
    bad = dict(loader.bad_samples)
    loader.close()
    return [read[epoch - begin[0]] for epoch in epochs], bad


def expected_clip(row, place: float, rate: float | None, *, at=None, flip: bool = False) -> torch.Tensor:
    """Each frame by itself, picked by its time from all of them, then scaled and cut as an image."""
    every = read_frames(row["mp4"], [n / row["fps"] for n in range(row["num_frames"])], lambda frame: frame)
    times = clip_times(row["num_frames"], row["fps"], frames=SIZE[2], rate=rate, position=place)
    frames = [every[int(time * row["fps"] + 1e-3 * row["fps"])] for time in times]
    offset = at(max_crop_offset(frames[0].shape[:0:-1], SIZE[:2])) if at else None
    clip = torch.stack([resize_and_crop(frame, SIZE[:2], at=offset) for frame in frames], dim=1)
    return clip.flip(-1) if flip else clip


@pytest.mark.parametrize("rate", [None, 4.0, 12.0])
def test_without_shuffling_a_clip_lies_in_the_middle_of_its_film(stage, rate):
    samples = rows(stage)
    [epoch], bad = batches_of(stage, 0, shuffle=False, fps=rate, max_bad_samples=100)
    videos, tokens = (torch.cat([batch[name] for batch in epoch]) for name in ("videos", "umt5_tokens"))
    assert videos.shape == (NUM, 3, 5, 32, 48) and videos.dtype == torch.uint8 and not bad
    for row, clip, ids in zip(samples, videos, tokens, strict=True):
        assert torch.equal(clip, expected_clip(row, 0.5, rate))
        assert torch.equal(ids, FAMILY.tokenize([row["caption"]])["umt5_tokens"][0])


def test_where_samples_are_shuffled_clips_crops_and_flips_are_drawn_by_seed_epoch_and_sample(stage):
    samples, places = rows(stage), set()
    tokens = [tuple(FAMILY.tokenize([row["caption"]])["umt5_tokens"][0].tolist()) for row in samples]
    epochs, _ = batches_of(stage, 0, 2, flip=True, crop="random", fps=8.0)
    for epoch, batches in zip((0, 2), epochs, strict=True):
        seen = [tokens.index(tuple(ids.tolist())) for batch in batches for ids in batch["umt5_tokens"]]
        assert sorted(seen) == list(range(NUM))
        for sample, clip in zip(seen, torch.cat([batch["videos"] for batch in batches]), strict=True):
            draw, place = draw_sample(SEED, epoch, sample), draw_clip_position(SEED, epoch, sample)
            expected = expected_clip(samples[sample], place, 8.0, at=draw.crop_offset, flip=draw.is_flipped)
            assert torch.equal(clip, expected)
            places.add(place)
    assert len(places) == 2 * NUM


def test_positions_of_clips_are_uniform_and_independent_of_the_other_draws():
    positions = np.array([draw_clip_position(1, 0, sample) for sample in range(4096)])
    flips = np.array([draw_sample(1, 0, sample).flip for sample in range(4096)])
    assert positions.min() >= 0.0 and positions.max() < 1.0
    assert abs(int((positions < 0.5).sum()) - 2048) < 4 * 32
    assert abs(int(((positions < 0.5) == (flips < 0.5)).sum()) - 2048) < 4 * 32


def test_a_video_that_is_too_short_is_counted_named_and_replaced(tars, tmp_path):
    stage, size = tmp_path / "out", (48, 32, 17)
    assert shards.main([str(tars), str(stage)]) == 0  # a shard for each tar: a shard without a good video stops a run
    [epoch], bad = batches_of(stage, 0, size=size, shuffle=False)
    assert bad == {n: (f"{n:09d}", "fewer than 17 frames") for n in range(0, NUM, 3)}
    videos = torch.cat([batch["videos"] for batch in epoch])
    assert torch.equal(videos[0], videos[1])  # the next good one of its shard
    with pytest.raises(ValueError, match="data.max_bad_samples: 2 samples cannot be used, 1 are allowed"):
        batches_of(stage, 0, size=size, shuffle=False, max_bad_samples=1)
    _, bad = batches_of(stage, 0, fps=0.75, shuffle=False)
    assert {why for _, why in bad.values()} == {"shorter than 5 frames at 0.75 a second"}
