"""prepare/latents.py of films: moments against the VAE itself, what is told of pictures, tiles, resume, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import sample_files, tree, write_tar
from films import film
from test_data import CPU
from test_latents import rows
from test_prepare import skipped

from data import DataConfig, build_data
from model import build_model
from prepare import latents, places, shards
from stages.videos import read_clip
from zoo import load_family
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig

FAMILIES = [("wan", "t2v"), ("wan", "i2v"), ("mochi", "stock"), ("hunyuan_video", "stock")]
FRAMES = {"mochi": 7}
NUM = 6

pytestmark = pytest.mark.usefixtures("same_number_of_threads", "quick_estimate")


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Six films, of which the last is too short for a clip."""
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
def test_moments_and_what_is_told_of_pictures_are_those_of_the_encoders(stage, tmp_path, name, variant, capsys):
    out, size = tmp_path / "out", (48, 32, FRAMES.get(name, 5))
    assert latents.main([str(stage), str(out), *words_of(name, variant, "fps=4")]) == 0
    config = ModelConfig(family=name, variant=variant, preset="tiny", weights="random")
    model = build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=0)
    made, given = rows(out), rows(stage)
    assert [row["key"] for row in made] == [row["key"] for row in given[:-1]]
    reason = f"shorter than {size[2]} frames at 4 a second"
    assert [named[1:] for named in skipped(out / "skipped.jsonl")] == [("005", reason)]
    columns = model.family.columns("moments", size)
    for row, sample in zip(made, given, strict=False):
        clip = read_clip(sample, size, rate=4.0).permute(3, 0, 1, 2)[None]
        expected = model.encode_pictures(clip) | model.family.tokenize([sample["caption"]])
        assert {*row} == {*columns, "caption", "key", "metadata"} and {*expected} == {*columns}
        for column, wanted in expected.items():
            assert row[column].shape == columns[column].shape and str(row[column].dtype) == columns[column].stored
            if wanted.dtype == torch.int64:
                assert row[column].astype(np.int64).tolist() == wanted[0].tolist()
            else:
                np.testing.assert_allclose(
                    row[column].astype(np.float32), wanted[0].float().numpy(), rtol=2**-10, atol=1e-3
                )
    facts = json.loads((out / "dataset.json").read_text())
    assert facts["image_size"] == list(size) and facts["fps"] == 4.0 and facts["batch_size"] == 1
    config = DataConfig(stage="moments", local=str(out), workers=0, fps=4.0)
    made_for = {"model.family": name, "image_size": list(size), "data.normalize": "symmetric"}
    assert config.problems(1, made_for) == []
    loader = build_data(config, model.family, size=size, device_batch_size=2, device=CPU, seed=1).dataloader
    batch = next(iter(loader))
    loader.close()
    assert {n: (tuple(t.shape[1:]), t.dtype) for n, t in batch.items()} == {
        n: (column.shape, column.dtype) for n, column in columns.items()
    }


@pytest.mark.parametrize("name, variant", [FAMILIES[0], FAMILIES[3]])
def test_text_states_and_masks_are_stored_where_asked_for(stage, tmp_path, name, variant):
    out, size = tmp_path / "out", (48, 32, 5)
    assert latents.main([str(stage), str(out), *words_of(name, variant, "store_text=true")]) == 0
    family = load_family(name, "tiny", variant)
    stored = family.columns("moments", size, stored_text=True)
    for row in rows(out):
        assert {*stored} <= {*row} and all(row[n].shape == column.shape for n, column in stored.items())
    config = DataConfig(stage="moments", local=str(out), workers=0, text="stored")
    loader = build_data(config, family, size=size, device_batch_size=2, device=CPU, seed=1).dataloader
    batch = next(iter(loader))
    loader.close()
    assert {*batch} == {*stored}


def test_stopped_at_any_file_it_goes_on_to_the_same_bytes(stage, tmp_path, monkeypatch):
    words = [str(stage), *words_of("wan", "i2v")]
    words.insert(1, str(tmp_path / "whole"))
    assert latents.main(words) == 0
    put, stops = places.Folder.put, [0]

    def stopping(self, name, file):
        stops[0] += 1
        if stops[0] in (1, 3):
            raise KeyboardInterrupt
        put(self, name, file)

    monkeypatch.setattr(places.Folder, "put", stopping)
    words[1] = str(tmp_path / "out")
    for _ in range(3):
        try:
            assert latents.main(words) == 0
        except KeyboardInterrupt:
            continue
    assert stops[0] > 4 and tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_tiles_take_the_place_of_the_whole_picture_and_the_stage_says_so(stage, tmp_path):
    made = {}
    for tiling in ("false", "true"):
        out = tmp_path / tiling
        words = [*words_of("wan", "t2v"), "image_size=[320,272]", "num_frames=1", f"tiling={tiling}"]
        words = [word for word in words if word not in ("image_size=[48,32]", "num_frames=5")]
        assert latents.main([str(stage), str(out), *words]) == 0
        made[tiling] = rows(out)[0]["moments"].astype(np.float32)
        assert json.loads((out / "dataset.json").read_text()).get("tiling", False) is (tiling == "true")
    whole, tiled = made["false"], made["true"]
    assert not np.array_equal(whole, tiled) and np.abs(whole - tiled).mean() < 0.1 * np.abs(whole).mean()


def test_what_does_not_fit_is_refused(stage, tmp_path, capsys):
    images = tmp_path / "images"
    assert shards.main([str(write_tar(tmp_path / "a.tar", {"a": sample_files(1)})), str(images)]) == 0
    tiny = ["model.preset=tiny", "model.weights=random"]
    wan = words_of("wan", "t2v")
    cases = [
        ([str(images), *wan], f"IN: {images} is a stage of images. Possible: a stage of videos (prepare.shards)."),
        (
            [str(stage), *tiny, "image_size=64"],
            f"IN: {stage} is a stage of videos. Possible: a stage of images (prepare.shards).",
        ),
        (
            [str(images), *tiny, "image_size=64", "num_frames=5", "fps=8", "tiling=true"],
            "num_frames: 5, but sd2 makes images. Leave it out.\nfps: 8.0, but sd2 makes images. Leave it out.\n"
            "tiling: true, but sd2 makes images. Leave it out.",
        ),
        (
            [str(stage), *words_of("wan", "t2v")[:5], "num_frames=6"],
            "num_frames: 6 frames do not fit wan: its first latent stands for one frame, each further one for 4. Nearest: "
            "5, 9.\n",
        ),
        (
            [str(stage), *words_of("wan", "i2v"), "flip=true"],
            "flip: true, but wan needs first_frame, image_states, which are not stored of mirrored images. Leave it out.",
        ),
    ]
    for words, text in cases:
        capsys.readouterr()
        assert latents.main([words[0], str(tmp_path / "out"), *words[1:]]) == 2
        assert capsys.readouterr().err == text.removesuffix("\n") + "\n"


def test_a_run_at_another_rate_or_of_other_frames_than_the_moments_is_refused(stage, tmp_path):
    out = tmp_path / "out"
    assert latents.main([str(stage), str(out), *words_of("wan", "t2v")]) == 0
    made_for = {"model.family": "wan", "image_size": [48, 32, 9]}
    found = DataConfig(stage="moments", local=str(out), fps=8.0).problems(1, made_for)
    assert found == [
        (
            "data.fps",
            f"8, but the clips of the stage at {out} were made at the rates of their films. Make it with python -m "
            "prepare.latents IN OUT fps=8, or leave it out.",
        ),
        ("image_size", f"[48, 32, 9], but the moments at {out} were made for [48, 32, 5]. Use that value."),
    ]
