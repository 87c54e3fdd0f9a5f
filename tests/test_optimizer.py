"""training/optimizer.py against torch's own clipping, the MLPerf reference's formula, and the rate that a run really used."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_polynomial_decay_schedule_with_warmup

from callbacks.gradient_norm import GradientNorm
from training.optimizer import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
    lr_multiplier,
    total_batches,
)
from zoo.mlperf_flux import FLUX
from zoo.mlperf_sd import SD


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 4, 1))


def test_warmup_equals_the_mlperf_formula():
    for n in (0, 1, 17, 500, 999):
        expected = (1.0 - 1e-6) * n / 1000 + 1e-6
        assert (
            lr_multiplier(n, schedule=ScheduleConfig(name="constant"), warmup_batches=1000, total_batches=5000)
            == expected
        )
    assert lr_multiplier(1000, schedule=ScheduleConfig(name="constant"), warmup_batches=1000, total_batches=5000) == 1.0


@pytest.mark.parametrize(("benchmark", "warmup"), [(FLUX, 1600), (FLUX, 800), (FLUX, 100), (FLUX, 0), (SD, 1000)])
def test_the_warmup_of_a_benchmark_is_its_references(benchmark, warmup):
    """FLUX.1's, of torchtitan's lr_scheduler.py, counts from 1: (n + 1) / (W + 1), then 1; SD's begins at 1e-6."""

    def reference(n: int) -> float:
        if n >= warmup:
            return 1.0
        return (n + 1) / (warmup + 1) if benchmark is FLUX else (1.0 - 1e-6) * n / warmup + 1e-6

    optimizer = build_optimizer(OptimizerConfig(lr=2e-4), network(), 512)
    schedule = build_schedule(
        ScheduleConfig(warmup_batches=warmup), optimizer, global_batch_size=512, num_batches=20_000, benchmark=benchmark
    )
    for n in range(warmup + 3):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-4 * reference(n), rel=1e-12)
        optimizer.step()
        schedule.step()


def test_cosine_goes_from_one_after_warmup_to_zero_at_the_end():
    cosine = ScheduleConfig(name="cosine")
    values = [lr_multiplier(n, schedule=cosine, warmup_batches=10, total_batches=110) for n in range(111)]
    assert values[10] == 1.0 and values[60] == pytest.approx(0.5) and values[110] == pytest.approx(0.0)
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[35] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize(
    ("keys", "theirs"),
    [
        (dict(name="linear"), dict(power=1.0, lr_end=0.0)),
        (dict(name="polynomial", power=2.0, final_frac=0.1), dict(power=2.0, lr_end=0.01)),
        (dict(name="polynomial", power=0.5, final_frac=0.5), dict(power=0.5, lr_end=0.05)),
    ],
)
def test_linear_and_polynomial_are_those_of_transformers(keys, theirs):
    """From the end of the warm-up on; ours begins at 1e-6 of the rate, theirs at 0."""
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    theirs = {**theirs, "lr_end": theirs["lr_end"] or 1e-30}
    schedule = get_polynomial_decay_schedule_with_warmup(optimizer, 10, 110, **theirs)
    expected = []
    for _ in range(115):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = [
        0.1 * lr_multiplier(n, schedule=ScheduleConfig(**keys), warmup_batches=10, total_batches=110)
        for n in range(115)
    ]
    assert ours[10:] == pytest.approx(expected[10:], abs=1e-15)


def test_a_constant_rate_decays_in_its_last_part():
    """The decay of Haegele et al. 2024: 1 until the last fifth, then straight to the final value."""
    schedule = ScheduleConfig(name="linear", decay_frac=0.2, final_frac=0.5)
    values = [lr_multiplier(n, schedule=schedule, warmup_batches=10, total_batches=100) for n in range(101)]
    assert values[10:81] == [1.0] * 71 and values[90] == pytest.approx(0.75) and values[100] == pytest.approx(0.5)
    whole = ScheduleConfig(name="cosine", decay_frac=1.0)  # of a run whose warm-up is a part of it: as without the key
    for n in range(101):
        expected = lr_multiplier(n, schedule=ScheduleConfig(name="cosine"), warmup_batches=10, total_batches=100)
        assert lr_multiplier(n, schedule=whole, warmup_batches=10, total_batches=100) == expected


def test_a_key_that_a_schedule_does_not_use_is_refused():
    assert ScheduleConfig(name="polynomial", power=2.0, decay_frac=0.1).problems() == []
    assert ScheduleConfig(decay_frac=0.1, power=2.0).problems() == [
        (
            "schedule.decay_frac",
            "0.1, but constant has none. Say schedule.name=linear, cosine or polynomial, or leave it out.",
        ),
        ("schedule.power", "2, but constant has none. Say schedule.name=polynomial, or leave it out."),
    ]
    assert [key for key, _ in ScheduleConfig(name="linear", power=2.0).problems()] == ["schedule.power"]


@pytest.mark.parametrize(("duration", "total"), [("40ba", 40), ("2ep", 24), ("640sp", 40), ("630sp", 40)])
def test_every_duration_has_its_number_of_batches(duration, total):
    assert total_batches(duration, global_batch_size=16, epoch_batches=12) == total


def test_the_schedule_gives_each_batch_its_own_rate():
    optimizer = build_optimizer(OptimizerConfig(lr=0.1), network(), 8)
    schedule = build_schedule(
        ScheduleConfig(name="cosine", warmup_batches=2), optimizer, global_batch_size=8, num_batches=6
    )
    for batch in range(7):
        expected = 0.1 * lr_multiplier(batch, schedule=ScheduleConfig(name="cosine"), warmup_batches=2, total_batches=6)
        assert optimizer.param_groups[0]["lr"] == expected
        optimizer.step()
        schedule.step()


def test_warmup_in_images_is_rounded_up_to_batches():
    assert ScheduleConfig(warmup_images=1000).num_warmup_batches(256) == 4
    assert ScheduleConfig(warmup_batches=7).num_warmup_batches(256) == 7
    assert ScheduleConfig().num_warmup_batches(256) == 0


def test_learning_rate_per_image_scales_with_the_global_batch():
    """1.25e-7 x 512 = 6.4e-5: the MLPerf reference's rate at its global batch."""
    assert OptimizerConfig(lr_per_image=1.25e-7).learning_rate(512) == pytest.approx(6.4e-5)
    assert OptimizerConfig(lr=3e-4).learning_rate(512) == 3e-4
    assert OptimizerConfig().learning_rate(512) == 1e-4


def test_adamw_equals_torchs_plain_one():
    ours, theirs = network(), network()
    optimizer = build_optimizer(OptimizerConfig(lr=0.01, weight_decay=0.1), ours, 8)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1, foreach=False, fused=False)
    for step in range(5):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            model(torch.full((1, 3, 5, 5), 0.1 * step)).square().sum().backward()
            opt.step()
    assert optimizer.defaults["fused"]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_weight_decay_groups_are_the_choice_that_was_made():
    every = build_optimizer(OptimizerConfig(weight_decay=0.1, decay="all"), network(), 8).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in every] == [(6, 0.1)]
    matrices, rest = build_optimizer(OptimizerConfig(weight_decay=0.1, decay="matrices"), network(), 8).param_groups
    assert matrices["weight_decay"] == 0.1 and all(p.ndim >= 2 for p in matrices["params"])
    assert rest["weight_decay"] == 0.0 and all(p.ndim < 2 for p in rest["params"])
    assert len(matrices["params"]) + len(rest["params"]) == 6


@pytest.mark.parametrize("clip_norm", [None, 1.0, 1e6])
def test_gradient_norm_and_clipping_equal_torchs(clip_norm):
    class Holder:
        model = network()

    reference = network()
    for model in (Holder.model, reference):
        (model(torch.ones(1, 3, 5, 5)).square().sum() * 100).backward()
    callback = GradientNorm(clip_norm)
    callback.after_train_batch(Holder, None)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm or math.inf)
    assert callback.mean() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(Holder.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_gradient_norm_is_the_mean_since_the_window_began_and_goes_on_from_a_checkpoint():
    class Holder:
        model = torch.nn.Linear(1, 1, bias=False)

    whole, resumed = GradientNorm(None), GradientNorm(None)
    assert whole.mean() is None and whole.state_dict() == {}
    for n, value in enumerate((0.1, 0.2, 0.7)):
        Holder.model.weight.grad = torch.full((1, 1), value)
        whole.after_train_batch(Holder, None)
        if n == 1:
            resumed.load_state_dict(whole.state_dict())
    resumed.after_train_batch(Holder, None)
    assert resumed.mean() == whole.mean() == pytest.approx(1.0 / 3, rel=1e-6)
    whole.restart()
    assert whole.mean() is None and whole.state_dict() == {}


def test_keys_that_exclude_each_other_are_named():
    config = OptimizerConfig(lr=1e-4, lr_per_image=1e-7)
    assert config.problems() == [
        ("optimizer.lr", "0.0001 and optimizer.lr_per_image: 1e-07 exclude each other."),
    ]
    assert ScheduleConfig(warmup_batches=1, warmup_images=5).problems() == [
        ("schedule.warmup_batches", "1 and schedule.warmup_images: 5 exclude each other."),
    ]
