"""The miniature: captions describe exactly what is drawn, its parts share no scene, its command, tokens and family."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from evaluation.clip_score import load_clip
from evaluation.fid import load_inception
from evaluation.prompts import read_prompts
from families import load_family
from families.encoders import build_encoders, default_weights
from families.shapes.networks import END, NUM_TOKENS, PAD, START, UNKNOWN, VOCABULARY, WEIGHTS, Reader, tokenize
from families.shapes.scenes import ATTRIBUTES, COLOURS, PARTS, WORDS, Scene, draw_scene, list_scenes
from prepare import shapes
from prepare.shapes import draw_jitter, render

ONE = Scene("large", "red", "square", "top left", "white")
TWO = Scene("small", "green", "cross", "left of", "orange", "large", "black", "circle")


# --- the scenes ---


def test_every_scene_has_its_own_caption_and_always_belongs_to_the_same_part():
    """Counts as they are: another hash would move scenes from one part to another, and with them every result."""
    assert len({scene.caption for scene in list_scenes()}) == 47040
    counts = Counter((scene.part, scene.shape_2 is None) for scene in list_scenes())
    one = {("training", True): 3025, ("prompts", True): 491, ("reference", True): 516}
    assert counts == one | {("training", False): 32186, ("prompts", False): 5395, ("reference", False): 5427}


@pytest.mark.parametrize("part", PARTS)
def test_a_drawn_scene_is_of_its_part_and_kind(part):
    for objects, num_two in (("one", 0), ("two", 40), ("both", 20)):
        scenes = [draw_scene(number, 3, part, objects) for number in range(40)]
        assert {scene.part for scene in scenes} == {part}
        assert sum(scene.shape_2 is not None for scene in scenes) == num_two
        assert scenes == [draw_scene(number, 3, part, objects) for number in range(40)]
        assert scenes != [draw_scene(number, 4, part, objects) for number in range(40)]


def test_a_scene_is_what_its_caption_answers_and_image_say():
    assert ONE.caption == "a large red square at the top left on a white background"
    assert TWO.caption == "a small green cross left of a large black circle on an orange background"
    assert ONE.answers["size_2"] == ONE.answers["colour_2"] == ONE.answers["shape_2"] == -100
    for scene in (ONE, TWO):
        for name, answer in scene.answers.items():
            assert answer == -100 or ATTRIBUTES[name][answer] == getattr(scene, name)
    places = {(round(0.27 * 32), 16): "green", (round(0.73 * 32), 16): "black", (16, 2): "orange"}
    assert {at: render(TWO, 32).getpixel(at) for at in places} == {at: COLOURS[name] for at, name in places.items()}


# --- images ---


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the files of the first tar."""
    with tarfile.open(folder / "00000.tar") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


@pytest.mark.parametrize("world", ["still", "moving"])
def test_training_reference_and_prompts_share_no_caption_and_shuffling_keeps_captions(tmp_path, world):
    def captions(name: str, *words: str) -> list[str]:
        assert shapes.main([str(tmp_path / name), f"world={world}", *words]) == 0
        if name.endswith(".tsv"):
            return [prompt.caption for prompt in read_prompts(str(tmp_path / name)).prompts]
        return [content.decode() for path, content in files_in(tmp_path / name).items() if path.endswith(".txt")]

    training, reference = (captions(part, "num_images=60", f"part={part}") for part in ("training", "reference"))
    sets = [set(training), set(reference), set(captions("p.tsv", "num_images=256", "part=prompts"))]
    assert len(sets[2]) == 256 and min(map(len, sets)) > 50
    assert len(set.union(*sets)) == sum(map(len, sets))
    shuffled = captions("shuffled", "num_images=60", "captions=shuffled")
    assert sorted(shuffled) == sorted(training) and shuffled != training
    own, other = (files_in(tmp_path / name) for name in ("training", "shuffled"))
    assert own.keys() == other.keys() and {name[-4:] for name in own if own[name] != other[name]} == {".txt"}


# --- the command ---


def test_a_tar_has_image_caption_and_scene(tmp_path):
    assert shapes.main([str(tmp_path / "tars"), "num_images=2", "seed=3"]) == 0
    files = files_in(tmp_path / "tars")
    assert list(files) == [f"00000000{n}.{kind}" for n in (0, 1) for kind in ("png", "txt", "json")]
    for number in (0, 1):
        scene = draw_scene(number, 3)
        assert Scene(**json.loads(files[f"00000000{number}.json"])) == scene
        assert files[f"00000000{number}.txt"].decode() == scene.caption
        assert Image.open(io.BytesIO(files[f"00000000{number}.png"])).size == (32, 32)
    assert shapes.main([str(tmp_path / "files"), "num_images=2", "seed=3", "layout=files"]) == 0
    images = {name: content for name, content in files.items() if name.endswith(".png")}
    assert {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()} == images


# --- tokens and family ---


def test_every_word_has_a_token_and_every_caption_fits_and_other_texts_are_padded_cut_and_marked_as_unknown():
    tokens = tokenize([scene.caption for scene in list_scenes()])
    assert UNKNOWN not in tokens and (tokens == END).sum() == len(tokens) == len(torch.unique(tokens, dim=0))
    assert len(set(WORDS)) + 4 == VOCABULARY
    assert (tokens[:, 0] == START).all() and (tokens[:, NUM_TOKENS - 1] == END).any()
    tokens = tokenize(["", "A RED cat!", "red " * 40])
    a, red = tokens[1, 1].item(), tokens[1, 2].item()
    assert tokens[0].tolist() == [START, END] + [PAD] * (NUM_TOKENS - 2)
    assert tokens[1, :5].tolist() == [START, a, red, UNKNOWN, END] and a != red
    assert tokens[2].tolist() == [START] + [red] * (NUM_TOKENS - 2) + [END]


def test_the_projects_own_weights_are_the_default():
    family, sd2 = load_family("shapes", "full", "stock"), load_family("sd2", "tiny", "stock")
    assert default_weights(family) == "shipped" and default_weights(sd2) == "random"
    shipped, none, random_ones = (build_encoders(family, name).fingerprints for name in ("shipped", None, "random"))
    assert shipped == none and not set(shipped.values()) & set(random_ones.values())
    assert build_encoders(family, str(family.shipped_weights)).fingerprints == shipped


# --- its scoring networks ---


def reader_of_attributes() -> Reader:
    reader = Reader()
    tensors = load_file(WEIGHTS / "reader/model.safetensors")
    reader.load_state_dict({key: tensor.float() for key, tensor in tensors.items()})
    return reader.eval().requires_grad_(False)


def test_shipped_encoders_read_and_rebuild_images_that_no_training_saw():
    scenes = [draw_scene(number, 5, "reference") for number in range(96)]
    pixels = torch.from_numpy(np.stack([np.asarray(render(s, 32, draw_jitter(i, 5))) for i, s in enumerate(scenes)]))
    images, reader = pixels.permute(0, 3, 1, 2) / 127.5 - 1, reader_of_attributes()
    vae = build_encoders(load_family("shapes", "full", "stock"), "shipped").modules["vae"]
    with torch.no_grad():
        latents = vae.encode(images).latent_dist.sample(torch.Generator().manual_seed(0))
        rebuilt, logits = reader(vae.decode(latents).sample.clamp(-1, 1)), reader(images)
    for name in ATTRIBUTES:
        answers = torch.tensor([scene.answers[name] for scene in scenes])
        there = answers >= 0
        of_images, of_rebuilt = ((each[name].argmax(1) == answers)[there].float().mean() for each in (logits, rebuilt))
        assert of_images > 0.98 and of_rebuilt > 0.95 * of_images, name
    assert (latents * vae.config.scaling_factor).std().item() == pytest.approx(1.0, abs=0.05)


def test_the_scoring_networks_are_found_by_their_files_and_compute_what_the_networks_do():
    reader = load_inception(WEIGHTS / "reader/model.safetensors")
    pair = load_clip(WEIGHTS / "clip/model.safetensors")
    assert (reader.name, reader.resize, reader.num_features) == ("shapes-reader", "none", 64)
    assert (pair.name, pair.num_features) == ("shapes-CLIP", 64)
    scenes = [draw_scene(number, 5, "reference") for number in range(32)]
    pixels = torch.from_numpy(np.stack([np.asarray(render(scene, 32)) for scene in scenes])).permute(0, 3, 1, 2)
    features = reader(pixels / 255)
    expected = reader_of_attributes().features(pixels / 127.5 - 1)  # 2 * (pixels / 255) - 1 rounds otherwise
    assert features.shape == (32, 64) and torch.allclose(features, expected, rtol=1e-4, atol=1e-4)
    images, texts = pair.encode_images(pixels / 255), pair.encode_texts([scene.caption for scene in scenes])
    assert torch.allclose(images.norm(dim=1), torch.ones(32)) and torch.allclose(texts.norm(dim=1), torch.ones(32))
    assert torch.equal((images @ texts.T).argmax(dim=1), torch.arange(32))  # each image's nearest caption is its own
    for network in (reader, pair.encode_images):
        with pytest.raises(ValueError, match="^images: 64 x 32 px, but the miniature's scoring networks take 32 x 32"):
            network(torch.zeros(1, 3, 32, 64))
