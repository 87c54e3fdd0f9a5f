"""CLIP score: against open_clip's own towers and preprocessing; sums, files, and what is refused."""

from __future__ import annotations

import io
import json

import open_clip
import pytest
import torch
from conftest import picture
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms.functional import to_pil_image, to_tensor

from evaluation import clip_score
from evaluation.clip_score import TINY, CLIPScore, load_clip, times_100

CAPTIONS = ["a red square", "a cat, sleeping", "word " * 100, "Straße & ümlauts"]
WIDE = {**TINY, "embed_dim": 16, "vision_cfg": {**TINY["vision_cfg"], "image_size": 64, "patch_size": 16}}


@pytest.fixture(scope="module")
def pair():
    return load_clip("random")


def images(num: int, height: int, width: int) -> torch.Tensor:
    """Neither noise nor whole 8-bit values."""
    pictures = [to_tensor(Image.open(io.BytesIO(picture(n, (width, height), "PNG")))) for n in range(num)]
    return (torch.stack(pictures) * 0.97 + 0.011).clamp(0, 1)


def unit(*shape: int) -> torch.Tensor:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))
    return torch.nn.functional.normalize(rows, dim=-1)


# --- the pair ---


@pytest.mark.parametrize(("height", "width"), [(512, 512), (100, 150)])
def test_preprocessing_is_open_clips_own(pair, height, width):
    given = images(3, height, width)
    transform = image_transform_v2(PreprocessCfg(), is_train=False)
    expected = torch.stack([transform(to_pil_image(one)) for one in given])
    # Both resize bytes with Pillow; one step of a byte is 0.015 here, a rounding of the normalization 2e-7.
    torch.testing.assert_close(pair.preprocess(given), expected, rtol=0.0, atol=1e-6)


def test_features_and_cosines_are_open_clips_in_float32_whatever_is_outside(pair):
    given = images(4, 96, 96)
    torch.manual_seed(clip_score.RANDOM_SEED)
    network = open_clip.CLIP(**TINY).eval()
    transform = image_transform_v2(PreprocessCfg(), is_train=False)
    with torch.no_grad():
        image = torch.cat([network.encode_image(transform(to_pil_image(one))[None], normalize=True) for one in given])
        text = torch.cat([network.encode_text(open_clip.tokenize([one]), normalize=True) for one in CAPTIONS])
    score = CLIPScore()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = load_clip("random")
    assert again.fingerprint == pair.fingerprint and torch.equal(torch.get_rng_state(), state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = again.encode_images(given), again.encode_texts(CAPTIONS)
        score.update(*found)
    torch.testing.assert_close(found, (image, text), rtol=0, atol=1e-6)
    assert {score.n.dtype, score.sum.dtype, score.compute().dtype} == {torch.float64}
    assert float(score.compute()) == pytest.approx(float((image * text).sum(dim=1).double().mean()), abs=1e-6)
    assert pair.name == "random-CLIP" and pair.num_features == 32 and not found[0].requires_grad


def test_texts_are_encoded_once(monkeypatch):
    pair, seen = load_clip("random"), []
    encode = pair.network.encode_text
    monkeypatch.setattr(pair.network, "encode_text", lambda tokens: seen.append(len(tokens)) or encode(tokens))
    monkeypatch.setattr(clip_score, "TEXTS_A_PASS", 3)
    captions = [*CAPTIONS, "a dog", CAPTIONS[0]]
    first = pair.encode_texts(captions)
    assert first.shape == (6, 32) and torch.equal(first[0], first[5])
    pair.to("cpu")
    assert torch.equal(pair.encode_texts(captions[3:5]), first[3:5])
    assert seen == [3, 2], "batches, the caption that is there twice only once"


# --- files ---


def write_config(folder, config=TINY, **more):
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, **more}))


def write(path, config=TINY, prefix=""):
    """A state dict as OpenCLIP publishes one, or, with a prefix, as its training saves it."""
    torch.manual_seed(3)
    network = open_clip.CLIP(**config)
    state = {f"{prefix}{name}": tensor for name, tensor in network.state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"epoch": 3, "state_dict": state} if prefix else state, path)
    return network.eval()


@pytest.mark.parametrize(("name", "prefix"), [("a.bin", ""), ("a.safetensors", ""), ("epoch_3.pt", "module.")])
def test_files_of_open_clip_are_read(tmp_path, name, prefix):
    path = tmp_path / name
    network = write(path, prefix=prefix)
    write_config(tmp_path)
    pair = load_clip(str(path))
    with torch.no_grad():
        expected = network.encode_text(open_clip.tokenize(CAPTIONS), normalize=True)
    torch.testing.assert_close(pair.encode_texts(CAPTIONS), expected, rtol=0, atol=1e-6)
    assert pair.fingerprint == clip_score.file_digest(path, "sha256") and pair.name == "CLIP of a model config"


@pytest.mark.parametrize(("name", "image", "text"), [("ViT-H-14", 1280, 1024), ("ViT-L-14", 1024, 768)])
def test_architectures_are_told_by_shapes(tmp_path, monkeypatch, name, image, text):
    config = open_clip.get_model_config(name)
    assert (config["vision_cfg"]["width"], config["text_cfg"]["width"]) == (image, text)
    assert clip_score._name_of(config) == name, "and so is one beside the file"
    path, built = tmp_path / "a.bin", []
    torch.save({"visual.conv1.weight": torch.zeros(image, 1), "token_embedding.weight": torch.zeros(1, text)}, path)
    monkeypatch.setattr(clip_score, "_build", lambda *given: built.append(given) or (torch.nn.Linear(1, 1), None, 1))
    with pytest.raises(ValueError, match=f"does not fit OpenCLIP's {name}: 2 missing"):
        load_clip(path)
    assert built == [(config, {})]


def test_files_of_other_networks_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    with pytest.raises(ValueError, match="there is no such file"):
        load_clip(path)
    torch.save(open_clip.CLIP(**TINY).state_dict(), path)
    widths = "its image tower is 64 and its text tower 32 wide .0: there is none.. Known by its shapes: ViT-H-14"
    with pytest.raises(ValueError, match=f"a.bin: {widths}"):
        load_clip(path)
    write_config(tmp_path, WIDE)
    with pytest.raises(ValueError, match="does not fit OpenCLIP's CLIP of a model config: 4 of another form "):
        load_clip(path)


# --- the score ---


def test_the_score_is_the_plain_mean_of_cosines():
    """Not clamped, not times 100: half of these are below 0."""
    image, text = unit(40, 8), torch.cat([unit(20, 8), -unit(40, 8)[20:]])
    score = CLIPScore()
    for part in (slice(0, 7), slice(7, 40)):
        score.update(image[part], text[part])
    expected = (image.double() * text.double()).sum(dim=1).mean()
    assert float(score.compute()) == pytest.approx(float(expected), rel=1e-12) and expected < 0
    assert times_100(0.25) == 25.0 and times_100(score.compute()) == 0.0
    image[1] = float("nan")
    with pytest.raises(ValueError, match=r"^CLIP score: NaN or infinite for 1 of 3 images \(prompts 417\)\."):
        score.update(image[:3], text[:3], ids=[7, 417, 9])
    with pytest.raises(ValueError, match=r"^CLIP score: 0 images were given\. A mean needs 1 at least\."):
        CLIPScore().compute()
