"""families/objectives.py against diffusers' schedulers and the papers' formulas."""

from __future__ import annotations

import pytest
import torch

from families.objectives import (
    DiscreteDiffusion,
    ObjectiveConfig,
    rescale_to_zero_terminal_snr,
    scaled_linear_alphas_cumprod,
)


@pytest.fixture(scope="module")
def scheduler():
    from diffusers import DDPMScheduler

    return DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000)


@pytest.fixture
def sample() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(5, 4, 8, 8, generator=generator) for _ in range(2))
    return latents, noise, torch.tensor([0, 1, 500, 998, 999])


def test_corruption_equals_diffusers(scheduler, sample):
    latents, noise, times = sample
    objective = DiscreteDiffusion(ObjectiveConfig(prediction="epsilon"))
    torch.testing.assert_close(
        objective.corrupt(latents, noise, times), scheduler.add_noise(latents, noise, times), rtol=1e-5, atol=1e-6
    )


def test_velocity_equals_diffusers_and_epsilon_is_the_noise(scheduler, sample):
    latents, noise, times = sample
    velocity = DiscreteDiffusion(ObjectiveConfig(prediction="v")).target(latents, noise, times)
    torch.testing.assert_close(velocity, scheduler.get_velocity(latents, noise, times), rtol=1e-5, atol=1e-6)
    assert DiscreteDiffusion(ObjectiveConfig(prediction="epsilon")).target(latents, noise, times) is noise


def test_zero_terminal_snr_equals_diffusers_and_ends_in_the_noise_itself(scheduler, sample):
    from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr

    theirs = torch.cumprod(1.0 - rescale_zero_terminal_snr(scheduler.betas.double()), dim=0)
    torch.testing.assert_close(
        rescale_to_zero_terminal_snr(scaled_linear_alphas_cumprod()), theirs, rtol=1e-6, atol=1e-9
    )
    latents, noise, times = sample
    objective = DiscreteDiffusion(ObjectiveConfig(zero_terminal_snr=True, prediction="v"))
    assert torch.equal(objective.corrupt(latents, noise, times)[-1], noise[-1])
    assert torch.equal(objective.target(latents, noise, times)[-1], -latents[-1])
    assert objective.alpha_bar[0] == DiscreteDiffusion(ObjectiveConfig(prediction="v")).alpha_bar[0]


def test_pure_noise_needs_v_and_a_weight_other_than_zero():
    of_epsilon, of_v = {"prediction": "epsilon", "caption_dropout": 0.1}, {"prediction": "v", "caption_dropout": 0.1}
    config = ObjectiveConfig(zero_terminal_snr=True, weighting="min_snr")
    terminal, weighting = config.problems(of_epsilon)
    assert terminal[1].startswith("true, but the prediction is epsilon, ") and config.problems(of_v) == [weighting]
    assert weighting[0] == "objective.weighting" and weighting[1].startswith(
        "min_snr weights a step without signal with"
    )
    assert ObjectiveConfig(zero_terminal_snr=True, prediction="v").problems(of_epsilon) == []
    assert ObjectiveConfig(weighting="min_snr").problems(of_epsilon) == []


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_the_weight_is_one_or_that_of_the_min_snr_paper(scheduler, prediction):
    from diffusers.training_utils import compute_snr

    times = torch.tensor([0, 10, 300, 700, 999])
    snr = compute_snr(scheduler, times)
    expected = torch.minimum(snr, torch.tensor(5.0)) / (snr if prediction == "epsilon" else snr + 1)
    objective = DiscreteDiffusion(ObjectiveConfig(weighting="min_snr", prediction=prediction))
    torch.testing.assert_close(objective.weight(times), expected, rtol=1e-4, atol=0)
    assert torch.equal(DiscreteDiffusion(ObjectiveConfig(prediction=prediction)).weight(times), torch.ones(5))


def test_times_are_uniform_over_all_thousand_steps():
    times = DiscreteDiffusion(ObjectiveConfig(prediction="v")).draw_times(200_000, torch.Generator().manual_seed(0))
    counts = torch.bincount(times, minlength=1000)
    assert len(counts) == 1000
    # 200 expected a step, standard deviation 14: six of them on each side. Step 0 is among them.
    assert counts.min() > 200 - 6 * 14.2 and counts.max() < 200 + 6 * 14.2
