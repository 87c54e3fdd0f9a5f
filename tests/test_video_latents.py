"""prepare/latents.py of videos: moments against the VAE itself, states of first frames, tiles, refusals."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from conftest import write_tar
from numbered_videos import film
from test_data import CPU
from test_latents import rows
from test_shards import skipped

from data import DataConfig, build_data
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from mds.videos import read_clip
from model import build_model
from prepare import latents, shards

FAMILIES = [("wan", "i2v"), ("mochi", "stock"), ("hunyuan_video", "stock")]
FRAMES = {"mochi": 7}
NUM = 6

pytestmark = pytest.mark.usefixtures("same_number_of_threads")


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Six videos, of which the last is too short for a clip."""
    folder = tmp_path_factory.mktemp("films")
    samples = {
        f"{n:03d}": {"mp4": film(3 if n == NUM - 1 else 14 + n, rate=8, size=(64, 48)), "txt": f"film {n}".encode()}
        for n in range(NUM)
    }
    write_tar(folder / "in.tar", samples)
    assert shards.main([str(folder / "in.tar"), str(folder / "videos"), "shard_size=8kb"]) == 0
    return folder / "videos"


def words_of(name: str, variant: str, *more: str) -> list[str]:
    family = [f"model.family={name}", f"model.variant={variant}", "model.preset=tiny", "model.weights=random"]
    return [*family, "image_size=[48,32]", f"num_frames={FRAMES.get(name, 5)}", "workers=2", *more]


@pytest.mark.parametrize("name, variant", FAMILIES)
def test_moments_and_states_of_the_first_frame_are_those_of_the_encoders(stage, tmp_path, name, variant):
    out, size = tmp_path / "out", (48, 32, FRAMES.get(name, 5))
    assert latents.main([str(stage), str(out), *words_of(name, variant, "fps=4")]) == 0
    config = ModelConfig(family=name, variant=variant, preset="tiny", weights="random")
    model = build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=0)
    made, videos = rows(out), rows(stage)
    assert [row["key"] for row in made] == [row["key"] for row in videos[:-1]]
    reason = f"shorter than {size[2]} frames at 4 a second"
    assert [named[1:] for named in skipped(out / "skipped.jsonl")] == [("005", reason)]
    columns = model.family.columns("moments", size)
    for row, sample in zip(made, videos, strict=False):
        clip = read_clip(sample, size, rate=4.0).permute(3, 0, 1, 2)[None]
        expected = model.encode_images(clip) | model.family.tokenize([sample["caption"]])
        assert {*row} == {*columns, "caption", "key", "metadata"} and {*expected} == {*columns}
        for column, values in expected.items():
            assert row[column].shape == columns[column].shape and str(row[column].dtype) == columns[column].stored_dtype
            stored, values = row[column].astype(np.float64), values[0].double().numpy()
            np.testing.assert_allclose(stored, values, rtol=2**-10, atol=1e-3 * (row[column].dtype == np.float16))
    metadata = json.loads((out / "dataset.json").read_text())
    assert metadata["image_size"] == list(size) and metadata["fps"] == 4.0 and metadata["batch_size"] == 1
    config = DataConfig(stage="moments", local=str(out), workers=0, fps=4.0)
    assert config.problems(1, {"model.family": name, "image_size": list(size), "data.normalize": "symmetric"}) == []
    given = dict(size=size, device_batch_size=2, device=CPU, seed=1)
    with contextlib.closing(build_data(config, model.family, **given).dataloader) as loader:
        for column, values in next(iter(loader)).items():
            assert (tuple(values.shape[1:]), values.dtype) == (columns[column].shape, columns[column].dtype)


def test_tiles_are_encoded_instead_of_the_whole_image_and_recorded(stage, tmp_path):
    made = {}
    for tiling in (False, True):
        words = [*words_of("wan", "t2v")[:4], "image_size=[272,32]", "num_frames=1", f"tiling={str(tiling).lower()}"]
        assert latents.main([str(stage), str(tmp_path / f"{tiling}"), *words]) == 0
        made[tiling] = rows(tmp_path / f"{tiling}")[0]["moments"].astype(np.float32)
        assert json.loads((tmp_path / f"{tiling}/dataset.json").read_text()).get("tiling", False) is tiling
    whole, error = made[False], np.abs(made[False] - made[True]).mean()
    assert 0 < error < 0.1 * np.abs(whole).mean()


def test_a_run_at_another_rate_or_of_other_frames_than_the_moments_is_refused(stage, tmp_path):
    out = tmp_path / "out"
    assert latents.main([str(stage), str(out), *words_of("wan", "t2v")]) == 0
    config = DataConfig(stage="moments", local=str(out), fps=8.0)
    [rate, size] = config.problems(1, {"model.family": "wan", "image_size": [48, 32, 9]})
    text = f"8, but the clips of the dataset at {out} were made at the rates of their videos. Make it with python -m "
    assert rate[0] == "data.fps" and rate[1].startswith(text)
    text = f"[48, 32, 9], but the moments at {out} were made for [48, 32, 5]. Use that value."
    assert size == ("image_size", text)
