"""families/sampling.py against the reference's trajectory, closed forms and diffusers' draws; what each row depends on."""

from __future__ import annotations

import math

import diffusers
import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor
from test_golden import golden, relative_error, small_family, small_unet
from torch import Tensor

from families.objectives import rescale_to_zero_terminal_snr, scaled_linear_alphas_cumprod
from families.sampling import SAMPLERS, build_scheduler, prompt_generator, prompt_noise, sample, split_by_rank

MEAN, STD = 0.7, 0.5  # of the Gaussian data in the closed forms
ALPHA_BAR = scaled_linear_alphas_cumprod()


def signal_and_noise(times: Tensor, alpha_bar: Tensor = ALPHA_BAR) -> tuple[Tensor, Tensor]:
    """sqrt(abar) and sqrt(1 - abar), float64; between two steps their ratio is linear, as euler takes it."""
    levels = ((1 - alpha_bar) / alpha_bar).sqrt()
    below = times.double().floor().long()
    level = torch.lerp(levels[below], levels[(below + 1).clamp(max=999)], times.double() - below)
    return 1 / (1 + level**2).sqrt(), level / (1 + level**2).sqrt()


def ideal(prediction: str, alpha_bar: Tensor = ALPHA_BAR, mean: float = MEAN):
    """What a perfect network says where the data are N(mean, STD^2): linear in x."""

    def predict(x: Tensor, times: Tensor) -> Tensor:
        signal, sigma = (value.reshape(-1, 1, 1, 1) for value in signal_and_noise(times, alpha_bar))
        residual = (x.double() - signal * mean) / (signal**2 * STD**2 + sigma**2)
        epsilon, x_0 = sigma * residual, mean + signal * STD**2 * residual
        return (epsilon if prediction == "epsilon" else signal * epsilon - sigma * x_0).float()

    return predict


def exact(noise: Tensor, sampler: str, steps: int) -> Tensor:
    """The end of the probability flow (Song et al. 2021, arXiv:2011.13456, equation 13), on which the standardised latent
    stays what it is. ddim and plms end at abar_0, the other two with the ideal guess at x_0 of their last step.
    """

    def moments(time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        signal, sigma = signal_and_noise(time)
        return signal, signal * MEAN, (signal**2 * STD**2 + sigma**2).sqrt()

    scheduler = build_scheduler(sampler, "epsilon")
    scheduler.set_timesteps(steps)
    first, last = scheduler.timesteps[0], scheduler.timesteps[-1]
    start = noise.double()
    if sampler == "euler":  # it walks x / signal, and begins at sigma / signal times the noise
        start = start * signal_and_noise(first)[1]
    _, mean, std = moments(first)
    standardised = (start - mean) / std
    if sampler in ("ddim", "plms"):
        _, mean, std = moments(torch.tensor(0))
        return (mean + std * standardised).float()
    signal, _, std = moments(last)
    return (MEAN + signal * STD**2 / std * standardised).float()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- samplers ---


def test_ddim_follows_the_references_trajectory():
    family = small_family()
    unet, scheduler = small_unet(family), build_scheduler("ddim", "v")
    scheduler.set_timesteps(50)
    assert torch.equal(scheduler.timesteps.flip(0), golden("ddim_timesteps"))
    text = torch.cat([golden("ddim_uncond").expand(2, -1, -1), golden("ddim_cond")])
    predict = lambda x, times: family.denoise(unet, x, times, {"text": text})  # noqa: E731
    with torch.no_grad():
        found = sample(predict, golden("ddim_x_T"), sampler="ddim", prediction="v", steps=50, guidance=8.0)
    assert relative_error(found, golden("ddim_x_0")) < 1e-4


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_more_steps_come_nearer_to_the_exact_flow(sampler, prediction):
    """Order 1: ddim, euler, and plms with v; a higher one: dpm++, and plms with epsilon."""
    at_50 = 0.01 if sampler == "dpm++" or (sampler, prediction) == ("plms", "epsilon") else 0.1
    noise, errors = draw(64, 1, 1, 1), []
    for steps in (50, 500):
        found = sample(ideal(prediction), noise, steps=steps, sampler=sampler, prediction=prediction)
        errors.append(float((found - exact(noise, sampler, steps)).abs().max()))
    assert errors[0] < at_50 and errors[1] < at_50 / 10 and errors[1] < errors[0] / 6


# Of Stable Diffusion 2's repository, the file of its scheduler; its documentation makes the other samplers from it.
PUBLISHED = {"beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": False}
PUBLISHED |= {"num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1}
PUBLISHED |= {"trained_betas": None}
CLASSES = {
    "ddim": diffusers.DDIMScheduler,
    "plms": diffusers.PNDMScheduler,
    "dpm++": diffusers.DPMSolverMultistepScheduler,
    "euler": diffusers.EulerDiscreteScheduler,
}


@pytest.mark.parametrize("sampler", ["ddim", "dpm++", "euler"])
def test_from_pure_noise_the_data_have_their_mean(sampler):
    """The problem of arXiv:2305.08891: else samples of bright data are darker, since training never saw pure noise."""
    noise, bright = draw(16, 1, 4, 4), 5.0

    def drawn(alpha_bar: Tensor, is_zero: bool) -> Tensor:
        ways = dict(sampler=sampler, prediction="v", steps=250, zero_terminal_snr=is_zero)
        return sample(ideal("v", alpha_bar, bright), noise, **ways)

    zero = rescale_to_zero_terminal_snr(ALPHA_BAR).clamp(min=2.0**-48)  # a level of noise that has a number
    torch.testing.assert_close(drawn(zero, True), bright + STD * noise, atol=0.05, rtol=0.0)
    assert (bright + STD * noise - drawn(ALPHA_BAR, False)).mean() > 0.1
    scheduler = build_scheduler(sampler, "v", zero_terminal_snr=True)
    scheduler.set_timesteps(10)
    assert scheduler.timesteps.tolist() == list(range(999, 0, -100))


# --- noise and shards ---


def test_a_prompts_noise_is_what_diffusers_draws_and_depends_on_no_other_prompt():
    ids, shape, before = [3, 0, 17, 2**40], (4, 8, 6), torch.random.get_rng_state()
    theirs = randn_tensor((4, *shape), generator=[prompt_generator(5, number) for number in ids], dtype=torch.float32)
    whole = prompt_noise(5, ids, shape)
    assert torch.equal(whole, theirs) and whole.dtype == torch.float32
    odd = randn_tensor((1, 3, 1, 1), generator=prompt_generator(5, 3), dtype=torch.float32)
    assert torch.equal(prompt_noise(5, [3], (3, 1, 1)), odd)
    assert torch.equal(prompt_noise(5, ["17", 3], shape), whole[[2, 0]])  # a text, as a file may have it
    assert not torch.equal(prompt_noise(1, [3], shape)[0], whole[0]) and prompt_noise(0, [], shape).shape == (0, *shape)
    noise = prompt_noise(0, range(2000), (4, 2, 2)).double()  # standard normal over prompts too
    assert float(noise.mean(dim=0).abs().max()) < 5 / math.sqrt(2000)
    assert float((noise.var(dim=0) - 1).abs().max()) < 5 * math.sqrt(2 / 2000)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("num", "world_size"), [(30_000, 7), (30_000, 1), (30_000, 8), (5, 8), (0, 3)])
def test_shards_hold_every_prompt_once(num, world_size):
    shards = [split_by_rank(num, rank, world_size) for rank in range(world_size)]
    assert sorted(index for part in shards for index in part) == list(range(num))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
