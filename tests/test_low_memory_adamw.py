"""training/low_memory_adamw.py: rounding that is right in the mean, moments and weights in bfloat16, bit for bit on resume.

Moments in 8 bits: tests/test_low_memory_adamw_8bit.py. The kernel for a GPU: tests/test_adamw_kernel.py.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN
from test_checkpoints import newest, same_training
from torch import nn

import benchmark
from training import low_memory_adamw
from training.low_memory_adamw import GOLDEN, SMALL, SmallAdamW, mix, random_bits, rounded
from training.optimizer import OptimizerConfig, build_optimizer

pytestmark = pytest.mark.timeout(120, func_only=True)
DISTANCE = 2.0**-7
"""Of two neighbors in bfloat16, as a part of the number, at most: it has 8 bits with the leading one."""


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Tensors that are large and small, in two memory formats."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(16, 64, 3), nn.GroupNorm(2, 64), nn.Conv2d(64, 8, 1), nn.Conv2d(8, 640, 1))
    return layers.to(dtype).to(memory_format=torch.channels_last)


def optimizer_of(model: nn.Module, states: str, seed: int = 0, **more) -> torch.optim.Optimizer:
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, decay="matrices", states=states, **more)
    return build_optimizer(config, model, 8, seed=seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(1, 16, 5, 5, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# --- rounding ---


def bits_of(values: torch.Tensor, step: int) -> torch.Tensor:
    return random_bits(slice(0, len(values)), (step, 7919 * step), "cpu")


def test_bits_are_uniform_independent_of_their_neighbors_and_the_same_for_a_part():
    """Each bit, and each pair of a bit with one of the next number, or of the next step, is even within 6 deviations."""
    num = 2**16
    one, other = (random_bits(slice(0, num + 1), keys, "cpu") for keys in ((123, -5), (124, 2**31 - 1)))
    bits = torch.stack(
        [(words >> place) & 1 for words in (one, other, mix(one + GOLDEN)) for place in range(32)]
    ).double()
    allowed = 6.0 * 0.5 / math.sqrt(num)
    assert (bits.mean(1) - 0.5).abs().max() < allowed
    signs = 2.0 * bits - 1.0
    for a, b in ((signs[:, :-1], signs[:, 1:]), (signs[:32], signs[32:64]), (signs[:32], signs[64:])):
        assert (a @ b.T / num).abs().max() < 2.0 * allowed
    for start in (1000, 2**31 - 5, 2**32 + 7):
        part = random_bits(slice(start, start + 20), (123, -5), "cpu")
        assert torch.equal(part[3:9], random_bits(slice(start + 3, start + 9), (123, -5), "cpu"))
    assert torch.equal(one[1000:1020], random_bits(slice(1000, 1020), (123, -5), "cpu"))


def test_a_rounding_is_a_neighbor_in_bfloat16_and_the_mean_of_many_is_the_value():
    """Each is off by less than the distance d of two neighbors, with a variance of at most d^2 / 4."""
    num = 4096
    values = torch.randn(500, generator=torch.Generator().manual_seed(1))
    one = rounded(values, bits_of(values, 0))
    assert torch.equal(one, one.bfloat16().float()) and ((one - values).abs() < DISTANCE * values.abs()).all()
    assert torch.equal(rounded(one, bits_of(one, 1)), one)
    mean = sum(rounded(values, bits_of(values, step)).double() for step in range(num)) / num
    allowed = 6.0 * 0.5 * DISTANCE * values.abs().double() / math.sqrt(num)
    assert ((mean - values).abs() <= allowed).all()
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    odd = torch.cat([odd, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])  # nan of a GPU
    same = rounded(odd, torch.full(odd.shape, -1, dtype=torch.int32))
    assert torch.equal(same.isnan(), odd.isnan()) and torch.equal(same[1:5], odd[1:5])


def stepped(weights: torch.Tensor, steps: int, rounding: str, lr: float, states: str = "fp32") -> torch.Tensor:
    """Return the weights after so many steps with gradients of 1: each of AdamW's steps is then the rate."""
    weights = nn.Parameter(weights.clone())
    config = OptimizerConfig(weight_decay=0.0, lr=lr, rounding=rounding, states=states)
    optimizer = build_optimizer(config, nn.ParameterList([weights]), 8)
    for _ in range(steps):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    return weights.detach()


def test_small_changes_are_lost_to_the_nearest_and_kept_in_the_mean_by_stochastic_rounding():
    """100 steps of 1e-4 from 1: the next number in bfloat16 is 0.996, and each step's variance is below 0.0039^2 / 4."""
    ones = torch.ones(SMALL, dtype=torch.bfloat16)
    assert (stepped(ones, 100, "nearest", 1e-4) == 1.0).all()
    allowed = 6.0 * 0.5 * (DISTANCE / 2) * math.sqrt(100 / SMALL)
    mean = stepped(ones, 100, "stochastic", 1e-4).double().mean().item()
    assert mean == pytest.approx(1.0 - 100 * 1e-4, abs=allowed)


# --- steps ---


def test_with_float32_states_it_is_torchs_adamw():
    ours, reference = network(), network()
    groups = optimizer_of(ours, "fp32").param_groups
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
    small = SmallAdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8, states="fp32")
    train(ours, small, range(5))
    train(reference, optimizer_of(reference, "fp32"), range(5))  # torch's, see below
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_moments_in_bfloat16_stay_within_the_bound_of_their_roundings():
    """With one gradient g again and again, AdamW moves by its rate each step: both moments are g and g^2, corrected.

    A rounding changes a moment by less than DISTANCE of itself, and earlier ones fade: after n of them it is off by less
    than n DISTANCE. So step n + 1 is off by less than (1 + n DISTANCE) / sqrt(1 - n DISTANCE) - 1 of the rate.
    """
    weights, steps, rate = nn.Parameter(torch.zeros(SMALL)), 8, 0.01
    gradient = torch.randn(SMALL, generator=torch.Generator().manual_seed(1))
    config = OptimizerConfig(lr=rate, weight_decay=0.0, states="bf16")
    optimizer = build_optimizer(config, nn.ParameterList([weights]), 8)
    for _ in range(steps):
        weights.grad = gradient.clone()
        optimizer.step()
    expected = -steps * rate * gradient.sign()
    off = (weights.detach() - expected).abs()
    bound = rate * sum((1 + n * DISTANCE) / math.sqrt(1 - n * DISTANCE) - 1 for n in range(steps))
    assert 0 < off.max() < bound
    assert (weights.detach() - expected).mul(gradient.sign()).mean().abs() < bound / 10  # in the mean they cancel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16_params"])
def test_large_tensors_have_small_states_and_small_ones_float32(dtype):
    model = network(dtype)
    optimizer = optimizer_of(model, "bf16")
    train(model, optimizer, range(1))
    for parameter, state in optimizer.state.items():
        kind = torch.bfloat16 if parameter.numel() >= SMALL else torch.float32
        assert {state[name].dtype for name in low_memory_adamw.NAMES} == {kind}, parameter.shape
    assert isinstance(optimizer_of(network(), "fp32"), torch.optim.AdamW), "the default is what it was"


def test_a_tensor_in_pieces_is_that_in_one(monkeypatch):
    whole, parts = network(), network()
    train(whole, optimizer_of(whole, "bf16", rounding="nearest"), range(3))
    monkeypatch.setattr(low_memory_adamw, "PIECE", {"cpu": 1024})
    train(parts, optimizer_of(parts, "bf16", rounding="nearest"), range(3))
    assert equal(whole, parts)


# --- the same again ---


@pytest.mark.parametrize(
    ("states", "dtype"), [("bf16", torch.float32), ("fp32", torch.bfloat16), ("bf16", torch.bfloat16)]
)
def test_a_seed_gives_the_same_weights_on_every_rank_and_after_a_resume(monkeypatch, states, dtype):
    """Whatever the global generator does."""
    whole, stopped, resumed, other = (network(dtype) for _ in range(4))
    train(whole, optimizer_of(whole, states, seed=5), range(4))
    train(other, optimizer_of(other, states, seed=6), range(4))
    monkeypatch.setenv("RANK", "1")  # a copy on another rank
    torch.manual_seed(1)
    optimizer, file = optimizer_of(stopped, states, seed=5), io.BytesIO()
    train(stopped, optimizer, range(2))
    torch.save(optimizer.state_dict(), file)
    resumed.load_state_dict(stopped.state_dict())
    again = optimizer_of(resumed, states, seed=5)
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    train(resumed, again, range(2, 4))
    assert equal(whole, resumed) and not equal(whole, other)


# --- runs ---


def words_of(folder: Path, name: str, *more: str) -> list[str]:
    often = ["save.every_images=16", "save.keep=9", "save.snapshot_every_images=0", "ema.enabled=true"]
    return [*TINY_RUN, "data.synthetic=true", f"run_folder={folder}", f"run_name={name}", *often, *more]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", pytest.param("sd2", marks=pytest.mark.long)])
def test_each_family_trains_with_bfloat16_weights_and_resumes_bit_for_bit(tmp_path, capsys, family):
    keys = ["precision=bf16_params", "optimizer.states=bf16", f"model.family={family}"]
    assert benchmark.main(words_of(tmp_path, "whole", *keys)) == 0
    assert benchmark.main(words_of(tmp_path, "resumed", *keys, "max_duration=2ba")) == 0
    assert benchmark.main(words_of(tmp_path, "resumed", *keys)) == 0
    whole, resumed = newest(tmp_path, "whole"), newest(tmp_path, "resumed")
    assert same_training(whole, resumed)
    assert {t.dtype for t in whole["model"].values()} == {torch.bfloat16}
    assert {t.dtype for t in whole["ema"]["weights"].values()} == {torch.float32}
    for key, value, was in (("optimizer.states", "fp32", "bf16"), ("precision", "fp32", "bf16_params")):
        assert benchmark.main(words_of(tmp_path, "resumed", *keys, "max_duration=6ba", f"{key}={value}")) == 2
        assert f"{key}: {value}, but {tmp_path}/resumed was begun with {was}." in capsys.readouterr().err


def test_keys_that_contradict_each_other_are_refused_by_name():
    def result(precision: str | None, **keys) -> list[tuple[str, str]]:
        return low_memory_adamw.problems(OptimizerConfig(**keys), precision)

    assert result("fp32") == result("bf16_params", rounding="nearest") == result("fp32", states="bf16") == []
    assert result("fp32", states="bf16", rounding="stochastic") == []
    [(_, reason)] = result("bf16", states="8bit", rounding="stochastic")
    assert reason.startswith("stochastic, but nothing is rounded to bf16: ")
