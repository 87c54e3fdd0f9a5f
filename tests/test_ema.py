"""ema.py against closed forms, a replay in float64, and diffusers' EMAModel; then its contracts."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composer import Event, Timestamp
from torch import nn

import ema as ema_module
from ema import EMA, EMAConfig, lerp_, power_gamma
from weights.tensors import canonical_name


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("position_ids", torch.arange(77))
    model[2].bias.requires_grad_(False)
    return model


class Run:
    """Drives an EMA as Composer does: events in order, a timestamp that has advanced at BATCH_END."""

    def __init__(self, model: nn.Module, ema: EMA, images: int = 10):
        self.ema, self.images = ema, images
        self.state = SimpleNamespace(model=model, timestamp=Timestamp(), previous_timestamp=None)
        self.state.scaler, self.state.optimizers = None, []
        self.event(Event.FIT_START)

    def event(self, event: Event) -> None:
        assert self.ema.match(event, self.state)
        self.ema.apply(event, self.state, None)

    def step(self, change: float = 1.0) -> None:
        with torch.no_grad():
            for p in self.state.model.parameters():
                p.add_(change * torch.randn(p.shape, generator=torch.Generator().manual_seed(self.batch)))
        self.event(Event.AFTER_TRAIN_BATCH)
        self.end_batch()

    def end_batch(self) -> None:
        self.state.previous_timestamp = self.state.timestamp
        self.state.timestamp = self.state.timestamp.to_next_batch(samples=self.images)
        self.event(Event.BATCH_END)

    @property
    def batch(self) -> int:
        return self.state.timestamp.batch.value


def weight_of(run: Run) -> torch.Tensor:
    return run.state.model[0].weight.detach().clone()


def replay(history: list[torch.Tensor], factors: list[float]) -> torch.Tensor:
    """The definition in float64: e <- b e + (1 - b) theta."""
    average = history[0].double()
    for theta, factor in zip(history[1:], factors, strict=True):
        average = factor * average + (1.0 - factor) * theta.double()
    return average


# --- laws ---


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        (EMAConfig(True), lambda t: 0.9999),
        (EMAConfig(True, half_life="4ba"), lambda t: 0.5 ** (1 / 4)),
        (EMAConfig(True, half_life="40sp"), lambda t: 0.5 ** (10 / 40)),
        (EMAConfig(True, sigma_rel=0.1), lambda t: (1 - 1 / t) ** (6.937 + 1)),
        (EMAConfig(True, decay=0.9, every=3), lambda t: 0.9**3),
    ],
    ids=["default", "half-life in batches", "half-life in images", "power function", "every third batch"],
)
def test_every_kind_of_decay_equals_its_definition_replayed_in_float64(config, factor):
    run = Run(tiny_model(), EMA(config))
    storages = [average.data_ptr() for average in run.ema.weights.values()]
    history = [weight_of(run)]
    for n in range(1, 14):
        run.step()
        if n % config.every == 0:
            history.append(weight_of(run))
    expected = replay(history, [factor(t) for t in range(1, len(history))])
    torch.testing.assert_close(run.ema.weights["0.weight"].double(), expected, rtol=1e-4, atol=1e-5)
    assert [average.data_ptr() for average in run.ema.weights.values()] == storages, "updated in place"


def test_it_equals_diffusers_ema_of_the_same_weights():
    from diffusers.training_utils import EMAModel

    run = Run(tiny_model(), EMA(EMAConfig(True, decay=0.9)))
    trained = [p for p in run.state.model.parameters() if p.requires_grad]
    reference = EMAModel(trained, decay=0.9, min_decay=0.9)
    reference.optimization_step = 1  # its first step is always a copy
    for _ in range(8):
        run.step()
        reference.step(trained)
    for average, expected in zip(run.ema.weights.values(), reference.shadow_params, strict=True):
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-6)


def test_power_gamma_solves_its_equation_and_agrees_with_the_paper():
    for sigma in (0.01, 0.05, 0.1, 0.25, 0.288):
        gamma = power_gamma(sigma)
        assert np.sqrt(gamma + 1) / ((gamma + 2) * np.sqrt(gamma + 3)) == pytest.approx(sigma, rel=1e-9)
    assert power_gamma(0.05) == pytest.approx(16.97, abs=0.01) and power_gamma(0.10) == pytest.approx(6.94, abs=0.01)


@pytest.mark.parametrize("config", [{"decay": 0.9}, {"half_life": "7ba"}, {"half_life": "33sp"}, {"sigma_rel": 0.1}])
def test_the_factor_of_k_steps_is_the_product_of_k_factors(config):
    ema = EMA(EMAConfig(True, **config))
    single = np.prod([ema.compute_decay(1, 10, t) for t in range(5, 9)])
    assert ema.compute_decay(4, 40, 8) == pytest.approx(single)


def test_a_float32_average_of_bfloat16_weights_does_not_stall():
    """In bfloat16, 1 + 1e-4 * 1 is 1: EMA weights of that type would never change."""
    weights, averages = [torch.ones(4, dtype=torch.bfloat16)], [torch.zeros(4)]
    for _ in range(100):
        lerp_(averages, weights, 1e-4)
    assert averages[0][0].item() == pytest.approx(1.0 - 0.9999**100, rel=1e-4)


# --- what is averaged, and when ---


@pytest.mark.parametrize(("start", "first"), [("0ba", 0), ("3ba", 3), ("25sp", 3)])
def test_it_starts_as_a_copy_of_trained_parameters_at_its_time_and_takes_no_memory_before(start, first):
    run = Run(tiny_model(), EMA(EMAConfig(True, decay=0.9, start=start)))
    for _ in range(first):
        assert run.ema.weights == {}
        run.step()
    assert torch.equal(run.ema.weights["0.weight"], weight_of(run)) and run.ema.num_steps == 0
    run.step()
    assert run.ema.num_steps == 1 and not torch.equal(run.ema.weights["0.weight"], weight_of(run))
    assert list(run.ema.weights) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert all(average.dtype == torch.float32 for average in run.ema.weights.values())


def test_steps_that_the_scaler_skips_are_not_averaged():
    """A real scaler and optimizer: the third of five steps has an infinite gradient."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = Run(model, EMA(EMAConfig(True, decay=0.5)))
    run.state.scaler, run.state.optimizers = scaler, [optimizer]
    averaged = [model.weight.detach().clone()]
    for n in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * (float("inf") if n == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        run.event(Event.AFTER_TRAIN_BATCH)
        scaler.step(optimizer)
        scaler.update()
        run.end_batch()
        if n != 2:
            averaged.append(model.weight.detach().clone())
    assert run.ema.num_steps == 4
    torch.testing.assert_close(run.ema.weights["weight"].double(), replay(averaged, [0.5] * 4))


# --- lending it to the model ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applied_swaps_the_average_in_and_out_to_the_last_bit(dtype):
    run = Run(tiny_model().to(dtype), EMA(EMAConfig(True, decay=0.5, start="1ba")))
    untrained = weight_of(run)
    with run.ema.applied():  # there is no average yet
        assert torch.equal(weight_of(run), untrained)
    for _ in range(2):
        run.step()
    trained, average = weight_of(run), run.ema.weights["0.weight"].clone()
    with run.ema.applied():
        assert torch.equal(weight_of(run), average.to(dtype)) and not torch.equal(weight_of(run), trained)
        with run.ema.applied():
            assert torch.equal(weight_of(run), average.to(dtype))
        assert torch.equal(weight_of(run), average.to(dtype))
    assert torch.equal(weight_of(run), trained) and torch.equal(run.ema.weights["0.weight"], average)


def test_applied_restores_what_it_had_swapped_when_it_fails_midway_or_inside(monkeypatch):
    run = Run(tiny_model(), EMA(EMAConfig(True, decay=0.5)))
    run.step()
    before, averages = copy.deepcopy(run.state.model.state_dict()), copy.deepcopy(run.ema.weights)
    exchange, calls = ema_module._exchange, []

    def fail_at_the_third(one, other):
        calls.append(one)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        exchange(one, other)

    def verify() -> None:
        assert all(torch.equal(tensor, before[name]) for name, tensor in run.state.model.state_dict().items())
        assert all(torch.equal(tensor, averages[name]) for name, tensor in run.ema.weights.items())

    with pytest.raises(KeyboardInterrupt), run.ema.applied():
        raise KeyboardInterrupt
    verify()
    monkeypatch.setattr(ema_module, "_exchange", fail_at_the_third)
    with pytest.raises(torch.OutOfMemoryError), run.ema.applied():
        raise AssertionError("not reached")
    verify()


# --- kept and found again ---


def test_names_are_canonical_whatever_wraps_the_model():
    assert canonical_name("module.denoiser._orig_mod.conv.weight") == "denoiser.conv.weight"
    assert canonical_name("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b") == "a.b"
    assert "0.weight" in Run(nn.ModuleDict({"module": tiny_model()}), EMA(EMAConfig(True, decay=0.5))).ema.weights


def test_a_resumed_average_continues_bit_for_bit():
    config = EMAConfig(True, half_life="70sp", every=2)
    whole = Run(tiny_model(), EMA(config))
    for _ in range(5):
        whole.step()
    saved, model, timestamp = copy.deepcopy((whole.ema.state_dict(), whole.state.model, whole.state.timestamp))
    ema = EMA(config)
    ema.bind(model)
    ema.load_state_dict(saved)  # between two updates
    resumed = Run(model, ema)
    resumed.state.timestamp = timestamp
    for _ in range(4):
        whole.step()
        resumed.step()
    assert all(torch.equal(ema.weights[name], whole.ema.weights[name]) for name in whole.ema.weights)


def test_an_average_that_does_not_fit_is_refused_with_the_names():
    ema = EMA(EMAConfig(True, decay=0.5))
    Run(tiny_model(), ema).step()
    state = ema.state_dict()
    state["weights"]["2.weight"] = torch.zeros(1)
    state["weights"]["extra"] = state["weights"].pop("0.bias")
    fresh = EMA(EMAConfig(True, decay=0.5))
    fresh.bind(tiny_model())
    with pytest.raises(ValueError) as error:
        fresh.load_state_dict(state)
    for text in ("1 missing (0.bias); 1 left over (extra); ", "2.weight is float32 (1,), not float32 (2, 4)"):
        assert text in str(error.value)
    with pytest.raises(ValueError, match="5 missing "):  # an emptied one is not one that has not begun
        fresh.load_state_dict({**state, "weights": {}})


def test_keys_that_contradict_each_other_are_named():
    assert EMAConfig().problems() == EMAConfig(enabled=True).problems() == []
    both = EMAConfig(enabled=True, half_life="1000ba", decay=0.9)
    assert both.problems() == [("ema.half_life", "1000ba and ema.decay: 0.9 conflict. Give one of them.")]
    assert [key for key, _ in EMAConfig(half_life="10ba").problems()] == ["ema.enabled"]
