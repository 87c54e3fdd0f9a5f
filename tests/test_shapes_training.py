"""Training of the miniature's encoders: a stopped training resumes as if it had never been stopped; what is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prepare.shapes import command
from prepare.shapes.stages import (
    CaptionJudge,
    damaged,
    held_out,
    mean_of,
    neighbours,
    pictures_of,
    share_read_right,
    training_scenes,
)
from prepare.shapes.training import load_clip, load_reader, schedule
from zoo import load_family
from zoo.encoders import build_encoders
from zoo.shapes.networks import WEIGHTS
from zoo.shapes.scenes import ATTRIBUTES

MINIATURE = ["reader_steps=3", "clip_steps=3", "vae_steps=4", "video_vae_steps=2", "every_steps=2", "num_measured=64"]


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}


def lines(out: Path) -> list[dict]:
    found = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    assert command.main(["--train_encoders", str(out), *MINIATURE]) == 0
    return out


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_training_stopped_after_every_step_gives_the_same_bytes(unbroken, tmp_path, capsys):
    """max_minutes=0 stops each command after one step; twelve steps and four stages need thirteen commands at most."""
    words = ["--train_encoders", str(tmp_path), *MINIATURE, "max_minutes=0"]
    for _ in range(13):
        assert command.main(words) == 0
        if capsys.readouterr().out.splitlines()[-1].startswith("done"):
            break
    else:
        pytest.fail("not done after thirteen commands")
    for stage in ("reader", "clip", "vae", "video_vae"):
        one, other = (torch.load(out / f"{stage}.pt", weights_only=True) for out in (unbroken, tmp_path))
        assert one["step"] == other["step"]
        for part in ("network", "averaged"):
            for name, tensor in one[part].items():
                assert torch.equal(tensor, other[part][name]), (stage, part, name)


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_killed_training_goes_on_from_its_state_and_cuts_its_log_back(unbroken, tmp_path):
    """Killed after a line was written and before the state was: the line is made again, not twice."""
    for path in unbroken.rglob("*"):
        if path.is_file():
            (tmp_path / path.relative_to(unbroken)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path.relative_to(unbroken)).write_bytes(path.read_bytes())
    for name in ("vae", "video_vae"):
        (tmp_path / f"{name}.pt").unlink()
    with open(tmp_path / "training.jsonl", "a") as log:
        log.write('{"stage": "vae", "st')
    assert command.main(["--train_encoders", str(tmp_path), *MINIATURE]) == 0
    assert lines(tmp_path) == lines(unbroken) and files(tmp_path) == files(unbroken)


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_the_log_says_what_was_measured_and_what_is_the_best(unbroken):
    measured = [(line["stage"], line["step"]) for line in lines(unbroken) if "score" in line]
    assert measured == [
        ("reader", 2),
        ("reader", 3),
        ("clip", 2),
        ("clip", 3),
        ("vae", 2),
        ("vae", 4),
        ("video_vae", 2),
    ]
    best: dict[str, float] = {}
    for line in lines(unbroken):
        assert line["best"] == (line["score"] >= best.get(line["stage"], -9.0))
        best[line["stage"]] = max(line["score"], best.get(line["stage"], -9.0))


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_what_is_exported_is_half_precision_and_fits_the_family(unbroken):
    from safetensors.torch import load_file

    for name, content in files(unbroken).items():
        assert {tensor.dtype for tensor in load_file(unbroken / name).values()} == {torch.float16}, len(content)
    text = load_file(unbroken / "weights/text_encoder/model.safetensors")
    assert not set(text) & set(load_file(unbroken / "weights/clip/model.safetensors"))
    encoder = load_family("shapes", "tiny", "stock").build_encoders()["text"]
    encoder.load_state_dict({name: tensor.float() for name, tensor in text.items()})


def test_no_steps_leave_an_encoder_as_it_is_shipped(tmp_path):
    words = ["reader_steps=0", "clip_steps=0", "vae_steps=0", "video_vae_steps=1", "num_measured=64"]
    assert command.main(["--train_encoders", str(tmp_path), *words]) == 0
    assert set(files(tmp_path)) == {"weights/video_vae/diffusion_pytorch_model.safetensors"}


def test_the_learning_rate_rises_then_falls():
    factors = [schedule(step, 4000) for step in range(4000)]
    assert factors[0] == 1 / 201 and factors.index(max(factors)) == 200 and max(factors) == 1.0
    assert factors[200:] == sorted(factors[200:], reverse=True) and factors[-1] == pytest.approx(0.01, abs=1e-4)


def test_neighbours_are_pairs_one_attribute_apart_and_all_of_the_training_part():
    scenes = neighbours(64, seed=1)
    assert {scene.part for scene in scenes} == {"training"} and len({scene.caption for scene in scenes}) == 64
    for one, other in zip(scenes[::2], scenes[1::2], strict=True):
        assert sum(getattr(one, name) != getattr(other, name) for name in ATTRIBUTES) == 1


def test_pictures_without_damage_stay_as_they_are():
    images = pictures_of(training_scenes(32, seed=1), seed=1)
    assert images.shape == (32, 3, 32, 32) and -1 <= images.min() < images.max() <= 1
    changed, amounts = damaged(images, torch.Generator().manual_seed(0))
    whole = (amounts == 0).all(dim=1)
    assert 0 < whole.sum() < 16 and torch.equal(changed[whole], images[whole])
    assert (changed[~whole] != images[~whole]).flatten(1).any(dim=1).all() and amounts.max() <= 1


# --- what is shipped ---


def test_shipped_weights_are_six_megabytes_at_most_and_safetensors():
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()) <= 6_000_000
    assert {path.suffix for path in WEIGHTS.rglob("*") if path.is_file()} == {".safetensors", ".json"}


def test_shipped_encoders_are_as_good_as_their_log_says():
    """Measured anew on 256 of the held-out pictures; the log has 1,024."""
    reader, clip = load_reader(WEIGHTS), load_clip(WEIGHTS)
    vae = build_encoders(load_family("shapes", "full", "stock"), "shipped").modules["vae"]
    those = held_out(256)
    judge = CaptionJudge(clip, those)
    read, told = share_read_right(reader, those.images, those.scenes), judge.share_told_right(those.images)
    assert min(read.values()) > 0.98 and mean_of(told) > 0.97 and min(told.values()) > 0.9

    with torch.no_grad():
        latents = vae.encode(those.images).latent_dist.sample(torch.Generator().manual_seed(0))
        rebuilt = vae.decode(latents).sample.clamp(-1, 1)
    kept = share_read_right(reader, rebuilt, those.scenes)
    assert all(kept[name] >= 0.95 * share for name, share in read.items()), kept
    assert judge.score(rebuilt) >= 0.95 * judge.score(those.images)
    assert (latents * vae.config.scaling_factor).std().item() == pytest.approx(1.0, abs=0.03)
