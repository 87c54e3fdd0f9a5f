"""training/fp8.py with torchao's own emulation: the casts are float8's, the products float32's, on a CPU. No speed.

torchao is not in the environment, since diffusers would import it at every start: `make test-fp8` has it in a folder beside.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from test_speed import fresh_dynamo, model_of, train
from torch import nn

from cli.errors import ConfigError
from training import fp8, speed
from training.speed import SpeedKeys
from zoo import load_family

with_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao: make test-fp8 has it")
WIDE = 32  # of the tiny preset: what stands for 1280 here


def cast(values: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 (4 bits of exponent, 3 of mantissa, 448 at most) by one scale for the tensor, and back."""
    scale = 448.0 / values.abs().max()
    return (values * scale).to(torch.float8_e4m3fn).float() / scale


@with_torchao
def test_the_product_is_that_of_both_factors_cast_by_their_largest_value():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(1)
    layer, x = nn.Linear(32, 48, bias=False), torch.randn(5, 32)
    expected = cast(x) @ cast(layer.weight.detach()).T
    plain = layer(x).detach()
    found = convert_to_float8_training(nn.Sequential(layer), config=Float8LinearConfig(emulate=True))(x).detach()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert 0.005 < ((found - plain).norm() / plain.norm()).item() < 0.06  # what 3 bits of mantissa cost


@with_torchao
def test_wide_layers_of_transformers_are_exchanged_with_the_same_parameters():
    model = model_of({}, "sd2")
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    num = fp8.use(model.denoiser, min_features=WIDE, emulate=True)
    exchanged = {n: m for n, m in model.denoiser.named_modules() if type(m).__name__ == "Float8Linear"}
    assert num == len(exchanged) > 0
    assert all("attentions" in name for name in exchanged), "the layers of the time see one row an image"
    assert all(min(layer.in_features, layer.out_features) >= WIDE for layer in exchanged.values())
    assert list(model.state_dict()) == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


@with_torchao
def test_the_full_network_has_such_layers_where_the_table_of_speed_says():
    with torch.device("meta"):
        denoiser = load_family("sd2", "full", "stock").build_denoiser()
    fp8.use(denoiser)
    exchanged = [m for m in denoiser.modules() if type(m).__name__ == "Float8Linear"]
    # A transformer at 1280 channels: q, k, v, out of self-attention, q and out of the other, both of the feed-forward, both
    # projections; k and v of the text have 1024 inputs. Two of the transformers on the way down, the one in the middle and
    # three on the way up are that wide.
    assert {(m.in_features, m.out_features) for m in exchanged} == {(1280, 1280), (1280, 10240), (5120, 1280)}
    assert len(exchanged) == 10 * (2 + 1 + 3)


@with_torchao
def test_a_network_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match="precision: fp8, but no linear layer .* has 1280 inputs and outputs"):
        fp8.use(model_of({}, "sd2").denoiser)


@with_torchao
@pytest.mark.parametrize("keys", [{}, {"channels_last": True, "gradient_checkpointing": 0.5}], ids=str)
def test_a_curve_is_near_that_of_bf16(keys):
    plain = train(model_of(keys, "sd2", precision="bf16"), 6)
    model = model_of({}, "sd2", precision="bf16")
    fp8.use(model.denoiser, min_features=WIDE, emulate=True)
    speed.apply(model, SpeedKeys(**keys), None)
    found = train(model, 6)
    assert found != plain
    assert found == pytest.approx(plain, rel=0.03)


@with_torchao
def test_it_is_one_graph(monkeypatch):
    monkeypatch.setattr(speed, "BACKEND", "aot_eager")
    for _ in fresh_dynamo():
        model = model_of({}, "sd2", precision="bf16")
        fp8.use(model.denoiser, min_features=WIDE, emulate=True)
        speed.apply(model, SpeedKeys(compile="whole"), None)
        train(model, 3)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the denoiser's and the text encoder's


def test_what_it_needs_is_said(monkeypatch):
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: name)
    assert fp8.problem(compiled=True) == "needs a GPU. Possible on a CPU: fp32, bf16, bf16_params."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert "this is a Tesla V100. Use precision=bf16." in fp8.problem(compiled=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert fp8.problem(compiled=True) is None
    with monkeypatch.context() as amd:  # an MI300X, whose capability is (9, 4)
        amd.setattr(torch.version, "hip", "7.2")
        assert fp8.problem(compiled=True).startswith("needs an NVIDIA GPU with float8")
    assert "Say compile=whole, or use precision=bf16." in fp8.problem(compiled=False)
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: None)
    for torch_version, which in (
        ("2.10.0+cu128", "torchao==0.16.0"),
        ("2.99.0", "torchao in the release for torch 2.99.0"),
    ):
        monkeypatch.setattr(torch, "__version__", torch_version)
        said = f"needs torchao, which is not installed. pip install --no-deps {which}, or use precision=bf16."
        assert fp8.problem(compiled=True) == said


def test_a_run_of_this_precision_has_its_layers_exchanged_and_no_other_has(monkeypatch):
    model, exchanged = model_of({}, "sd2"), []
    monkeypatch.setattr(fp8, "use", exchanged.append)
    speed.apply(model, SpeedKeys(), "bf16")
    assert exchanged == []
    speed.apply(model, SpeedKeys(), "fp8")
    assert exchanged == [model.denoiser]
