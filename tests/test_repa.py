"""algorithms/repa.py: the term by hand, features as transformers', a run that resumes bit for bit, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from composer import Event
from conftest import TINY_RUN
from mlperf_fixture import problems_of
from test_checkpoints import newest, same_training
from test_sharding import TOLERANCE, distance, trained
from torch import nn
from transformers import AutoImageProcessor, BitImageProcessor, Dinov2Config, Dinov2Model

import benchmark
from algorithms.repa import Repa
from common.errors import ConfigError
from weights.image_features import ImageFeatures

FLOW = ["model.family=shapes", "model.variant=flow", "data.synthetic=true", "image_size=32", "ema.enabled=true"]
CLIP = "families/shapes_weights/clip"
pytestmark = pytest.mark.timeout(120, func_only=True)


def word(encoder: str = CLIP, depth: int = 1, more: str = "") -> str:
    return f"algorithms=[\"algorithms.repa:Repa(encoder='{encoder}', depth={depth}{more})\"]"


@pytest.fixture(scope="module")
def dino(tmp_path_factory) -> str:
    """A DINOv2 with random weights as it is published: patches of 14 px, the means of ImageNet."""
    folder = str(tmp_path_factory.mktemp("dino"))
    sizes = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(folder)
    BitImageProcessor(do_resize=False, do_center_crop=False).save_pretrained(folder)
    return folder


def test_features_are_transformers_own_for_each_token(dino):
    images = torch.rand(2, 3, 56, 84, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    pixels = AutoImageProcessor.from_pretrained(dino)(
        [(255 * image).byte().permute(1, 2, 0).numpy() for image in images], return_tensors="pt"
    )
    expected = Dinov2Model.from_pretrained(dino)(**pixels).last_hidden_state[:, 1:]
    features = ImageFeatures(dino)
    torch.testing.assert_close(features(images, 4, 6), expected, rtol=1e-5, atol=1e-5)
    assert features(images, 2, 3).shape == (2, 6, 12)


@pytest.mark.parametrize("spatial", [False, True])
def test_the_term_and_its_gradient_are_those_of_the_formula(spatial):
    """The derivative d cos(y, p) / dp = (y / |y| - cos p / |p|) / |p|; in float64, with a projection of one linear map."""
    own = torch.Generator().manual_seed(0)
    states, features = torch.randn(2, 6, 5, generator=own), torch.randn(2, 6, 4, generator=own)
    weight = torch.randn(4, 5, generator=own)
    repa = Repa("none", spatial=spatial)
    repa.encoder = lambda images, rows, columns: features
    repa.projection = nn.Conv2d(5, 4, 3, padding=1, bias=False) if spatial else nn.Linear(5, 4, bias=False)
    with torch.no_grad():
        center = repa.projection.weight.zero_()[:, :, 1, 1] if spatial else repa.projection.weight
        center.copy_(weight)
    states.requires_grad_()
    term = repa.alignment(states, torch.zeros(2, 3, 16, 24), 8)
    term.backward()
    y, p = features.double(), states.detach().double() @ weight.double().T
    if spatial:
        y = (y - 0.6 * y.mean(1, keepdim=True)) / y.std(1, keepdim=True)
    y, size = y / y.norm(dim=-1, keepdim=True), p.norm(dim=-1, keepdim=True)
    cosine = (y * p).sum(-1, keepdim=True) / size
    expected = (y - cosine * p / size) / size / 12 @ weight.double()
    assert term.item() == pytest.approx(cosine.mean().item(), rel=1e-5)
    torch.testing.assert_close(states.grad.double(), expected, rtol=1e-4, atol=1e-6)


def test_fewer_tokens_than_the_image_has_are_refused():
    with pytest.raises(ConfigError, match="4 of 16 tokens enter block 8. .* up to where the route starts"):
        Repa("none").alignment(torch.zeros(1, 4, 4), torch.zeros(1, 3, 32, 32), 8)


@pytest.mark.slow
def test_routing_and_alignment_go_together_in_either_order_up_to_the_route(tmp_path, capsys):
    tread = "algorithms.tread:Tread(start=1, end=-1)"
    keys = [*TINY_RUN, *FLOW, "model.preset=full", "max_duration=2ba", "save.every_images=16", f"run_folder={tmp_path}"]
    repa = f"algorithms.repa:Repa(encoder='{CLIP}', depth=1)"
    for name, order in (("a", [tread, repa]), ("b", [repa, tread])):
        assert benchmark.main([*keys, f"run_name={name}", f"algorithms={json.dumps(order)}"]) == 0
    assert same_training(newest(tmp_path, "a"), newest(tmp_path, "b"))
    inside = json.dumps([tread, repa.replace("depth=1", "depth=2")])
    assert benchmark.main([*keys, "run_name=c", f"algorithms={inside}"]) == 2
    assert "repa: 8 of 16 tokens enter block 2. With token routing," in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param("images", marks=pytest.mark.long), "moments"])
def test_a_run_resumes_bit_for_bit_in_microbatches(stage, dino, tmp_path):
    keys = [*TINY_RUN, *FLOW, f"data.stage={stage}", "device_train_microbatch_size=4", "save.every_images=16"]
    keys.append(f"run_folder={tmp_path}")
    with_repa = word(dino, more=", spatial=true") if stage == "images" else word()
    for name, *more in (["whole", with_repa], ["cut", with_repa, "max_duration=2ba"], ["cut", with_repa], ["plain"]):
        assert benchmark.main([*keys, f"run_name={name}", *more]) == 0
    whole, cut, plain = (newest(tmp_path, name) for name in ("whole", "cut", "plain"))
    assert same_training(whole, cut) and not same_training(whole, plain)
    assert whole["model"].keys() == plain["model"].keys() and whole["ema"].keys() == plain["ema"].keys()
    (name,) = [name for name in whole["callbacks"] if "Repa" in name]
    for tensor, other in zip(*(each["callbacks"][name]["projection"].values() for each in (whole, cut)), strict=True):
        assert torch.equal(tensor, other)


def test_a_checkpoint_with_another_encoder_is_refused(dino):
    repa = Repa(dino)
    repa.load_state_dict({"encoder": "another"})
    with pytest.raises(ValueError, match="not the encoder that the checkpoint"):
        repa.apply(Event.FIT_START, SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu"))), None)


@pytest.mark.long
@pytest.mark.timeout(400, func_only=True)
def test_sharded_weights_are_trained_as_whole_ones(tmp_path):
    keys = [*TINY_RUN, *FLOW, word(), f"run_folder={tmp_path}", "gradient_checkpointing=0.5", "max_duration=2ba"]
    for name, how in (("ddp", "off"), ("full", "full")):
        trained(2, [*keys, "save.every_images=16", f"run_name={name}", f"sharding={how}"])
    assert distance(tmp_path / "full", tmp_path / "ddp") < TOLERANCE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([word(), "model.family=wan", "model.variant=stock", "image_size=64"], "makes videos"),
        ([word(), "model.family=sd2", "model.variant=stock", "image_size=64"], "has no list of transformer blocks"),
        ([word(depth=2)], "depth=2, but there are 2 blocks. Possible: 1 to 1."),
        ([word(), "compile=whole"], "Set compile=blocks."),
        (
            [word(), "data.stage=moments", "data.text=stored"],
            "without a VAE, and it needs images. Set data.stage=images.",
        ),
        ([word("no/folder/here")], "no encoder no/folder/here"),
        ([word("families/shapes_weights/vae")], "no encoder families/shapes_weights/vae"),
        ([word(depth=1.5)], "depth is 1.5. Possible: an integer from 1"),
        ([word(more=", spatial='no'")], "spatial is 'no'. Possible: true, false"),
        ([word(more=", until_images=0")], "until_images is 0. Possible: null, or an integer from 1"),
        ([word(more=", weight=1e999")], "weight is inf. Possible: a number above 0"),
        (["algorithms=['algorithms.tread:Tread(rate=0.0)']"], "rate is 0.0. Possible: a number above 0 and below 1"),
        (["algorithms=['algorithms.tread:Tread(end=1.5)']"], "start is 2, end is 1.5. Possible: integers"),
        (["algorithms=['algorithms.repa:Repa']"], "missing a required argument: 'encoder'"),
    ],
)
def test_what_cannot_be_aligned_is_refused(words, message):
    assert any(message in problem for problem in problems_of(*TINY_RUN, *FLOW, *words))
