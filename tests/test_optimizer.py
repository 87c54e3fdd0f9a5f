"""training/optimizer.py against torch's own clipping, the MLPerf reference's formula, and the rate that a run really used."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import get_polynomial_decay_schedule_with_warmup

from callbacks.gradient_norm import GradientNorm
from families.mlperf import FLUX, SD
from training.optimizer import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
    images_of,
    lr_multiplier,
    total_batches,
)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 4, 1))


@pytest.mark.parametrize(("benchmark", "warmup"), [(FLUX, 1600), (FLUX, 800), (FLUX, 100), (FLUX, 0), (SD, 1000)])
def test_the_warmup_of_a_benchmark_is_its_references(benchmark, warmup):
    """FLUX.1's, of torchtitan's lr_scheduler.py, counts from 1: (n + 1) / (W + 1), then 1; SD's begins at 1e-6."""

    def reference(n: int) -> float:
        if n >= warmup:
            return 1.0
        return (n + 1) / (warmup + 1) if benchmark is FLUX else (1.0 - 1e-6) * n / warmup + 1e-6

    optimizer = build_optimizer(OptimizerConfig(lr=2e-4), network(), 512)
    of_run = dict(global_batch_size=512, num_batches=20_000, benchmark=benchmark)
    schedule = build_schedule(ScheduleConfig(warmup_batches=warmup), optimizer, **of_run)
    for n in range(warmup + 3):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-4 * reference(n), rel=1e-12)
        optimizer.step()
        schedule.step()


def test_cosine_goes_from_one_after_warmup_to_zero_at_the_end():
    rates = multipliers(111, 10, 110, name="cosine")
    assert rates[10:] == pytest.approx([0.5 * (1 + math.cos(math.pi * n / 100)) for n in range(101)], abs=1e-12)
    assert rates[:10] == pytest.approx([(1.0 - 1e-6) * n / 10 + 1e-6 for n in range(10)], rel=1e-12)


def multipliers(num: int, warmup: int, total: int, **keys) -> list[float]:
    schedule = ScheduleConfig(**keys)
    return [lr_multiplier(n, schedule=schedule, warmup_batches=warmup, total_batches=total) for n in range(num)]


@pytest.mark.parametrize(
    ("keys", "theirs"),
    [
        (dict(name="linear"), dict(power=1.0, lr_end=1e-30)),
        (dict(name="polynomial", power=2.0, final_frac=0.1), dict(power=2.0, lr_end=0.01)),
    ],
)
def test_linear_and_polynomial_are_those_of_transformers(keys, theirs):
    """From the end of the warm-up on; ours begins at 1e-6 of the rate, theirs at 0."""
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    schedule = get_polynomial_decay_schedule_with_warmup(optimizer, 10, 110, **theirs)
    expected = [0.1 * schedule.lr_lambdas[0](n) for n in range(10, 115)]
    ours = [0.1 * multiplier for multiplier in multipliers(115, 10, 110, **keys)[10:]]
    assert ours == pytest.approx(expected, abs=1e-15)


def test_a_constant_rate_decays_in_its_last_part():
    """The decay of Haegele et al. 2024: 1 until the last fifth, then straight to the final value."""
    values = multipliers(101, 10, 100, name="linear", decay_frac=0.2, final_frac=0.5)
    assert values[10:81] == [1.0] * 71 and values[90] == pytest.approx(0.75) and values[100] == pytest.approx(0.5)
    assert multipliers(101, 10, 100, name="cosine", decay_frac=1.0) == multipliers(101, 10, 100, name="cosine")


def test_keys_without_effect_and_keys_that_exclude_each_other_are_named():
    assert ScheduleConfig(name="polynomial", power=2.0, decay_frac=0.1).problems() == []
    for keys, names in (
        (dict(decay_frac=0.1, power=2.0), ["schedule.decay_frac", "schedule.power"]),
        (dict(name="linear", power=2.0), ["schedule.power"]),
        (dict(warmup_batches=1, warmup_images=5), ["schedule.warmup_batches"]),
    ):
        assert [name for name, _ in ScheduleConfig(**keys).problems()] == names
    problem = ("optimizer.lr", "0.0001 and optimizer.lr_per_image: 1e-07 conflict. Give one of them.")
    assert OptimizerConfig(lr=1e-4, lr_per_image=1e-7).problems() == [problem]


@pytest.mark.parametrize(("duration", "total"), [("40ba", 40), ("2ep", 24), ("640sp", 40), ("630sp", 40)])
def test_every_duration_has_its_number_of_batches(duration, total):
    assert total_batches(duration, global_batch_size=16, epoch_batches=12) == total
    assert images_of(duration, 16) == (None if duration == "2ep" else 16 * total)


def test_warm_up_and_rate_are_given_by_batch_or_by_image():
    """1.25e-7 x 512 = 6.4e-5: the MLPerf reference's rate at its global batch."""
    batches = [dict(warmup_images=1000), dict(warmup_batches=7), {}]
    assert [ScheduleConfig(**keys).num_warmup_batches(256) for keys in batches] == [4, 7, 0]
    rates = [dict(lr_per_image=1.25e-7), dict(lr=3e-4), {}]
    assert [OptimizerConfig(**keys).learning_rate(512) for keys in rates] == pytest.approx([6.4e-5, 3e-4, 1e-4])


def test_weight_decay_groups_are_those_of_optimizer_decay():
    def groups(decay: str) -> list[tuple[list[int], float]]:
        optimizer = build_optimizer(OptimizerConfig(weight_decay=0.1, decay=decay), network(), 8)
        assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
        return [([p.ndim for p in group["params"]], group["weight_decay"]) for group in optimizer.param_groups]

    assert groups("all") == [([4, 1, 1, 1, 4, 1], 0.1)]
    assert groups("matrices") == [([4, 4], 0.1), ([1, 1, 1, 1], 0.0)]


@pytest.mark.parametrize(
    ("clip_norm", "dtype"), [(None, torch.float32), (1.0, torch.float32), (1e6, torch.float32), (1.0, torch.bfloat16)]
)
def test_gradient_norm_and_clipping_equal_torchs(clip_norm, dtype):
    """Of gradients in bfloat16 too the norm is computed in float32."""
    model, reference = network().to(dtype), network().double()
    (model(torch.ones(1, 3, 5, 5, dtype=dtype)).float().square().sum() * 100).backward()
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    for ours, other in pairs:
        other.grad = ours.grad.double()
    callback = GradientNorm(clip_norm)
    callback.after_train_batch(SimpleNamespace(model=model), None)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm or math.inf)
    assert callback.mean() == pytest.approx(expected.item(), rel=1e-5)
    for ours, other in pairs:
        tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(ours.grad.double(), other.grad, rtol=tolerance, atol=0)


def test_gradient_norm_is_the_mean_since_the_window_began_also_after_a_resume():
    model, whole, resumed = torch.nn.Linear(1, 1, bias=False), GradientNorm(None), GradientNorm(None)
    assert whole.mean() is None and whole.state_dict() == {}
    for n, value in enumerate((0.1, 0.2, 0.7)):
        model.weight.grad = torch.full((1, 1), value)
        whole.after_train_batch(SimpleNamespace(model=model), None)
        if n == 1:
            resumed.load_state_dict(whole.state_dict())
    resumed.after_train_batch(SimpleNamespace(model=model), None)
    assert resumed.mean() == whole.mean() == pytest.approx(1.0 / 3, rel=1e-6)
    whole.restart()
    assert whole.mean() is None and whole.state_dict() == {}
