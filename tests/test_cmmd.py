"""CMMD: against the published formula and transformers' own tower and preprocessing; its reference file; stop and resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import picture
from safetensors.torch import save_file
from torchvision.transforms.functional import to_pil_image
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from evaluation import cmmd
from evaluation.cmmd import TINY, load_encoder, maximum_mean_discrepancy, read_reference
from evaluation.metrics import Meter
from evaluation.scorer import EvalConfig
from prepare import fid_statistics


def unit(num: int, num_features: int, shift: float = 0.0) -> torch.Tensor:
    rows = torch.randn(num, num_features, generator=torch.Generator().manual_seed(num)) + shift
    return F.normalize(rows, dim=-1)


def published(a: np.ndarray, b: np.ndarray) -> float:
    """Equation 5 of Gretton et al. 2012 with the published constants, from all pairs of differences."""

    def mean_kernel(x: np.ndarray, y: np.ndarray) -> float:
        return np.exp(-np.square(x[:, None] - y[None]).sum(axis=2) / (2 * 10**2)).mean()

    return 1000 * (mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b))


@pytest.mark.parametrize("length", [1.0, 30.0])  # of an embedding: 1 as published; 30: kernel values from 0 to 1
def test_the_distance_in_blocks_is_the_published_formula(monkeypatch, length):
    monkeypatch.setattr(cmmd, "BLOCK", 37)
    a, b = unit(150, 48) * length, unit(101, 48, 0.1) * length
    expected = published(a.double().numpy(), b.double().numpy())
    assert maximum_mean_discrepancy(a, b) == pytest.approx(expected, rel=1e-9) and expected > 0.01
    assert maximum_mean_discrepancy(a, a) == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="CMMD: 0 and 101 images"):
        maximum_mean_discrepancy(a[:0], b)


def test_embeddings_are_those_of_transformers_for_square_images(tmp_path):
    torch.manual_seed(3)
    vision, text = {**TINY, "image_size": 56}, {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = CLIPConfig(
        vision_config=vision, text_config=text | {"num_attention_heads": 1, "vocab_size": 9}, projection_dim=16
    )
    model = CLIPModel(config).eval()
    ids = {"vision_model.embeddings.position_ids": torch.arange(17)[None]}  # in the published file
    save_file(model.state_dict() | ids, tmp_path / "model.safetensors")
    encoder = load_encoder(tmp_path / "model.safetensors", vision)
    pixels = torch.randint(0, 256, (3, 3, 80, 80), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    inputs = processor([to_pil_image(image) for image in pixels], return_tensors="pt").pixel_values
    torch.testing.assert_close(encoder.preprocess(pixels / 255), inputs, rtol=0, atol=1e-6)
    with torch.no_grad():
        expected = model.visual_projection(model.vision_model(inputs).pooler_output)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = encoder(pixels / 255)
    torch.testing.assert_close(embeddings, F.normalize(expected, dim=-1), rtol=0, atol=1e-6)
    wide = F.pad(pixels, (9, 9))  # what lies beside the middle square does not count
    assert torch.equal(encoder(wide / 255), encoder(pixels / 255))
    with pytest.raises(ValueError, match="does not fit CMMD's clip-vit-large-patch14-336"):
        load_encoder(tmp_path / "model.safetensors", TINY)


@pytest.fixture
def statistics(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(6):
        (tmp_path / f"images/{number}.png").write_bytes(picture(number, (40, 32), "PNG"))
    out = tmp_path / "reference.npz"
    reader = "families/shapes_weights/reader/model.safetensors"
    words = [str(tmp_path / "images"), str(out), f"inception={reader}", "cmmd=random", "image_size=32", "batch_size=4"]
    assert fid_statistics.main(words) == 0
    return dict(statistics=str(out), inception=reader)


def test_the_reference_has_the_embeddings_and_other_encoders_are_refused(statistics, tmp_path):
    encoder = load_encoder("random")
    assert read_reference(statistics["statistics"], encoder).shape == (6, 16)
    encoder.fingerprint = "another"
    with pytest.raises(ValueError, match="has embeddings of the encoder .*, this evaluation's is another"):
        read_reference(statistics["statistics"], encoder)
    np.savez(tmp_path / "fid.npz", mu=np.zeros(2), sigma=np.eye(2))
    with pytest.raises(ValueError, match="has no embeddings for CMMD. .* cmmd=ENCODER"):
        read_reference(tmp_path / "fid.npz", encoder)
    alone = EvalConfig(cmmd="random").problems(now=True, images_alone=True)
    assert [key for key, _ in alone] == ["eval.statistics"]


def test_it_is_measured_beside_fid_in_one_pass_and_resumes_to_the_same_figures(statistics):
    meter = Meter(**statistics, resize="bilinear299", clip=None, cmmd="random", precision="fp16")
    images = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with meter.on(torch.device("cpu")):
        meter.add(images[:4], range(3), [""] * 3)  # the fourth is padding
        saved = meter.sums()
        meter.add(images[3:], range(3, 6), [""] * 3)
        figures = meter.figures()
    reference = read_reference(statistics["statistics"], load_encoder("random"))
    expected = published(load_encoder("random")(images).double().numpy(), reference.double().numpy())
    assert figures["cmmd"] == pytest.approx(expected, rel=1e-6) and figures["fid"] > 0 and figures["num_images"] == 6
    meter.reset()
    meter.restore_sums(saved)
    with meter.on(torch.device("cpu")):
        meter.add(images[3:], range(3, 6), [""] * 3)
        assert meter.figures() == figures
    with pytest.raises(ValueError, match="^sums: "):
        meter.restore_sums(saved | {"embeddings": {"rows": torch.zeros(2, 5)}})
    assert meter.facts["cmmd_model"] == "random-CLIP-image-encoder"
