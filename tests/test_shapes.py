"""The miniature: captions describe exactly what is drawn, its parts share no scene, its command, tokens and family."""

from __future__ import annotations

import io
import json
import random
import resource
import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from evaluation.clip_score import load_clip
from evaluation.inception import load_inception
from evaluation.prompts import read_prompts
from prepare.shapes import command
from prepare.shapes.pictures import draw_jitter, prompt_scenes, render
from zoo import load_family
from zoo.encoders import build_encoders, own_weights, weights_problems
from zoo.model_config import ModelConfig, model_problems
from zoo.shapes.networks import END, NUM_TOKENS, PAD, START, UNKNOWN, VOCABULARY, WEIGHTS, Reader, tokenize
from zoo.shapes.scenes import ATTRIBUTES, COLOURS, PARTS, WORDS, Scene, all_scenes, changed, draw_scene

ONE = Scene("large", "red", "square", "top left", "white")
TWO = Scene("small", "green", "cross", "left of", "orange", "large", "black", "circle")


# --- the scenes ---


def test_there_are_47040_scenes_and_no_two_have_the_same_caption():
    assert (len(all_scenes("one")), len(all_scenes("two"))) == (4032, 43008)
    assert len({scene.caption for scene in all_scenes()}) == 47040


def test_a_caption_names_everything():
    assert ONE.caption == "a large red square at the top left on a white background"
    assert TWO.caption == "a small green cross left of a large black circle on an orange background"


def test_every_scene_belongs_to_one_part_for_ever():
    """Counts as they are: another hash would move scenes from one part to another, and with them every result."""
    counts = Counter((scene.part, "one" if scene.shape_2 is None else "two") for scene in all_scenes())
    assert counts == {
        ("training", "one"): 3025,
        ("prompts", "one"): 491,
        ("reference", "one"): 516,
        ("training", "two"): 32186,
        ("prompts", "two"): 5395,
        ("reference", "two"): 5427,
    }


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("objects", ["one", "two", "both"])
def test_a_drawn_scene_is_of_its_part_and_kind(part, objects):
    scenes = [draw_scene(number, 3, part, objects) for number in range(40)]
    assert {scene.part for scene in scenes} == {part}
    num_two = sum(scene.shape_2 is not None for scene in scenes)
    assert num_two == {"one": 0, "two": 40, "both": 20}[objects]
    assert scenes == [draw_scene(number, 3, part, objects) for number in range(40)]
    assert scenes != [draw_scene(number, 4, part, objects) for number in range(40)]


def test_a_changed_scene_differs_in_that_attribute_alone_and_is_a_scene():
    known = {scene.caption for scene in all_scenes()}
    choose = random.Random(0)
    for scene in (ONE, TWO):
        for name in ATTRIBUTES:
            if getattr(scene, name) is not None:
                other = changed(scene, choose, name)
                assert [a for a in ATTRIBUTES if getattr(scene, a) != getattr(other, a)] == [name]
                assert other.caption in known


def test_answers_are_the_places_of_the_values_and_none_for_a_missing_object():
    assert ONE.answers["size_2"] == ONE.answers["colour_2"] == ONE.answers["shape_2"] == -100
    for scene in (ONE, TWO):
        for name, answer in scene.answers.items():
            assert answer == -100 or ATTRIBUTES[name][answer] == getattr(scene, name)


# --- pictures ---


def test_two_objects_are_drawn_where_and_as_the_caption_says():
    image = render(TWO, 32)
    assert image.getpixel((round(0.27 * 32), 16)) == COLOURS["green"]
    assert image.getpixel((round(0.73 * 32), 16)) == COLOURS["black"]
    assert image.getpixel((16, 2)) == COLOURS["orange"]


def test_every_change_of_an_attribute_is_seen_in_32_px():
    """At least ten of the 1,024 pixels differ by more than 50 levels of 255, whichever attribute of 200 scenes is changed."""
    choose = random.Random(1)
    for scene in choose.sample(all_scenes(), 200):
        other = changed(scene, choose)
        one, two = (np.asarray(render(what, 32)).astype(int) for what in (scene, other))
        assert (np.abs(one - two).max(axis=-1) > 50).sum() >= 10, f"{scene.caption}; {other.caption}"


def test_objects_never_leave_the_picture():
    """The outermost row of pixels is background, for every shape, size and place, jittered ten times."""
    for scene in random.Random(2).sample(all_scenes(), 300):
        for number in range(3):
            image = np.asarray(render(scene, 64, draw_jitter(number, 7)))
            edge = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
            assert (edge == COLOURS[scene.background]).all(), scene.caption


# --- the command ---


def captions_in(folder) -> list[str]:
    found = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            found += [tar.extractfile(m).read().decode() for m in tar.getmembers() if m.name.endswith(".txt")]
    return found


def test_training_reference_and_prompts_share_no_caption(tmp_path):
    for part in ("training", "reference"):
        assert command.main([str(tmp_path / part), "num_images=300", f"part={part}"]) == 0
    assert command.main([str(tmp_path / "prompts.tsv"), "num_images=300", "part=prompts"]) == 0
    sets = [set(captions_in(tmp_path / part)) for part in ("training", "reference")]
    sets.append({prompt.caption for prompt in read_prompts(str(tmp_path / "prompts.tsv")).prompts})
    assert len(sets[2]) == 300 and min(map(len, sets)) > 280
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]


def test_a_tar_has_picture_caption_and_scene(tmp_path):
    assert command.main([str(tmp_path / "tars"), "num_images=2", "seed=3"]) == 0
    with tarfile.open(tmp_path / "tars/00000.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
    assert list(files) == [f"00000000{n}.{kind}" for n in (0, 1) for kind in ("png", "txt", "json")]
    for number in (0, 1):
        scene = draw_scene(number, 3)
        assert Scene(**json.loads(files[f"00000000{number}.json"])) == scene
        assert files[f"00000000{number}.txt"].decode() == scene.caption
        assert Image.open(io.BytesIO(files[f"00000000{number}.png"])).size == (32, 32)


def test_prompts_are_all_different_and_end_where_the_scenes_do(tmp_path, capsys):
    out = tmp_path / "prompts.tsv"
    assert command.main([str(out), "num_images=1000", "part=prompts", "objects=one"]) == 0
    assert capsys.readouterr().out == f"wrote 491 prompts to {out}\n"
    prompts = read_prompts(str(out)).prompts
    assert len({prompt.caption for prompt in prompts}) == 491
    assert [prompt.number for prompt in prompts] == [prompt.image_id for prompt in prompts] == list(range(491))
    both = [scene.shape_2 is None for scene, _ in zip(prompt_scenes(1, "prompts", "both"), range(100), strict=False)]
    assert both == [True, False] * 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/a", "part=test"], "command line: part is 'test'. Possible: one of training, prompts, reference."),
        (["{tmp}/a", "objects=3"], "command line: objects is 3. Possible: one of one, two, both."),
        (["{tmp}/file.tsv"], "OUT: {tmp}/file.tsv exists. Give a new name, or remove it."),
    ],
)
def test_the_command_says_what_it_cannot_do(tmp_path, capsys, words, message):
    (tmp_path / "file").touch()
    (tmp_path / "file.tsv").touch()
    assert command.main([word.format(tmp=tmp_path) for word in words]) == 2
    assert capsys.readouterr().err == message.format(tmp=tmp_path) + "\n"


@pytest.mark.parametrize("name", ["world", "world.tsv"])
def test_a_disk_that_takes_no_more_is_a_message(tmp_path, capsys, name):
    """By a limit on the size of files, which fails as a full disk does: in the middle of a write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert command.main([str(tmp_path / name), "num_images=100", "part=prompts"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = f"OUT: {tmp_path / name} cannot be written: [Errno 27] File too large. Make room or give another place, "
    assert capsys.readouterr().err.splitlines()[-1] == said + "then again."
    assert list(tmp_path.iterdir()) == []
    assert command.main([str(tmp_path / name), "num_images=100", "part=prompts"]) == 0


# --- tokens and family ---


def test_every_word_has_a_token_of_its_own_and_every_caption_fits():
    tokens = tokenize([scene.caption for scene in all_scenes()])
    assert UNKNOWN not in tokens and (tokens == END).sum() == len(tokens) == len(torch.unique(tokens, dim=0))
    assert len(set(WORDS)) + 4 == VOCABULARY
    assert (tokens[:, 0] == START).all() and (tokens[:, NUM_TOKENS - 1] == END).any()


def test_tokens_of_other_texts_are_padded_cut_and_marked_as_unknown():
    tokens = tokenize(["", "A RED cat!", "red " * 40])
    assert tokens[0].tolist() == [START, END] + [PAD] * (NUM_TOKENS - 2)
    red = tokens[1, 2].item()
    assert tokens[1, :5].tolist() == [START, tokenize(["a"])[0, 1].item(), red, UNKNOWN, END]
    assert tokens[2].tolist() == [START] + [red] * (NUM_TOKENS - 2) + [END]


def test_the_projects_own_weights_are_used_where_none_are_given():
    family = load_family("shapes", "full", "stock")
    assert own_weights(family) == "shipped" and own_weights(load_family("sd2", "tiny", "stock")) == "random"
    given, none, random_ones = (build_encoders(family, weights).fingerprints for weights in ("shipped", None, "random"))
    assert given == none and not set(given.values()) & set(random_ones.values())
    assert build_encoders(family, str(family.shipped)).fingerprints == given
    assert model_problems(ModelConfig(family="shapes"), (32, 32), encoders_wanted=True) == []
    assert weights_problems(family, "shipped") == weights_problems(family, str(family.shipped)) == []


def test_a_family_without_weights_in_the_project_says_so():
    [problem] = model_problems(
        ModelConfig(family="sd2", preset="tiny", weights="shipped"), (64, 64), encoders_wanted=True
    )
    assert problem.text == (
        "model.weights: shipped, but the project has no weights of sd2. Give a diffusers folder or an LDM checkpoint, or "
        "model.weights=random for random ones."
    )


@pytest.mark.parametrize(("size", "said"), [((30, 32), "30 x 32 px"), ((32, 2), "32 x 2 px")])
def test_shapes_says_which_sizes_it_takes(size, said):
    text = load_family("shapes", "tiny", "stock").size_problem(size)
    assert text == f"{said} does not fit shapes. Both sides have to be multiples of 4."


# --- its scoring networks ---


def test_shipped_weights_are_six_megabytes_at_most_and_safetensors():
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()) <= 6_000_000
    assert {path.suffix for path in WEIGHTS.rglob("*") if path.is_file()} == {".safetensors", ".json"}


def reader_of_attributes() -> Reader:
    reader = Reader()
    tensors = load_file(WEIGHTS / "reader/model.safetensors")
    reader.load_state_dict({key: tensor.float() for key, tensor in tensors.items()})
    return reader.eval().requires_grad_(False)


def test_shipped_encoders_read_and_rebuild_pictures_that_no_training_saw():
    scenes = [draw_scene(number, 5, "reference") for number in range(128)]
    pixels = torch.from_numpy(np.stack([np.asarray(render(s, 32, draw_jitter(i, 5))) for i, s in enumerate(scenes)]))
    images, reader = pixels.permute(0, 3, 1, 2) / 127.5 - 1, reader_of_attributes()
    vae = build_encoders(load_family("shapes", "full", "stock"), "shipped").modules["vae"]
    with torch.no_grad():
        latents = vae.encode(images).latent_dist.sample(torch.Generator().manual_seed(0))
        rebuilt, logits = reader(vae.decode(latents).sample.clamp(-1, 1)), reader(images)
    for name in ATTRIBUTES:
        answers = torch.tensor([scene.answers[name] for scene in scenes])
        there = answers >= 0
        read, kept = ((found[name].argmax(dim=1) == answers)[there].float().mean() for found in (logits, rebuilt))
        assert read > 0.98 and kept > 0.95 * read, name
    assert (latents * vae.config.scaling_factor).std().item() == pytest.approx(1.0, abs=0.05)


def test_the_judges_are_known_by_their_files_and_say_what_the_networks_say():
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
    assert torch.equal((images @ texts.T).argmax(dim=1), torch.arange(32))  # each picture's nearest caption is its own


def test_the_judges_take_pictures_of_their_size_only():
    reader, pair = load_inception(WEIGHTS / "reader/model.safetensors"), load_clip(WEIGHTS / "clip/model.safetensors")
    said = (
        "images: 64 x 32 px, but the miniature's scoring networks take 32 x 32 px. Say image_size=32, or give "
        "other networks."
    )
    for ask in (reader, pair.encode_images):
        with pytest.raises(ValueError, match=f"^{said}$"):
            ask(torch.zeros(1, 3, 32, 64))


def test_a_pair_without_its_text_encoder_says_what_is_missing(tmp_path):
    (tmp_path / "clip").mkdir()
    file = tmp_path / "clip/model.safetensors"
    file.write_bytes((WEIGHTS / "clip/model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=f"^{tmp_path}/text_encoder/model.safetensors: there is no such file."):
        load_clip(file)


def test_shuffled_captions_are_the_same_captions_on_other_pictures(tmp_path):
    for captions in ("own", "shuffled"):
        assert command.main([str(tmp_path / captions), "num_images=40", f"captions={captions}"]) == 0
    content = {}
    for captions in ("own", "shuffled"):
        with tarfile.open(tmp_path / captions / "00000.tar") as tar:
            content[captions] = {member.name: tar.extractfile(member).read() for member in tar}
    texts = {name: sorted(k for k in of) for name, of in content.items()}
    assert texts["own"] == texts["shuffled"]
    changed = {name for name in content["own"] if content["own"][name] != content["shuffled"][name]}
    assert {name[-4:] for name in changed} == {".txt"} and len(changed) > 35
    own, other = (sorted(value for name, value in of.items() if name.endswith(".txt")) for of in content.values())
    assert own == other


def test_pictures_alone_are_those_of_the_tars(tmp_path):
    assert command.main([str(tmp_path / "tars"), "num_images=3", "part=reference"]) == 0
    assert command.main([str(tmp_path / "files"), "num_images=3", "part=reference", "layout=files"]) == 0
    with tarfile.open(tmp_path / "tars" / "00000.tar") as tar:
        pictures = {m.name: tar.extractfile(m).read() for m in tar if m.name.endswith(".png")}
    assert {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()} == pictures
