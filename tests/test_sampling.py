"""zoo/sampling.py against the reference's trajectory, closed forms and diffusers' own draws; what each row depends on."""

from __future__ import annotations

import math
import re

import diffusers
import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor
from test_golden import golden, relative_error, small_family, small_unet
from torch import Tensor

from zoo.objectives import scaled_linear_alphas_cumprod, with_zero_terminal_snr
from zoo.sampling import (
    SAMPLERS,
    build_scheduler,
    prompt_generator,
    prompt_noise,
    sample,
    sampling_problems,
    shard,
)

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
    unet = small_unet(family)
    scheduler = build_scheduler("ddim", "v")
    scheduler.set_timesteps(50)
    assert torch.equal(scheduler.timesteps.flip(0), golden("ddim_timesteps"))
    text = torch.cat([golden("ddim_uncond").expand(2, -1, -1), golden("ddim_cond")])
    with torch.no_grad():
        found = sample(
            lambda x, times: family.denoise(unet, x, times, {"text": text}),
            golden("ddim_x_T"),
            sampler="ddim",
            prediction="v",
            steps=50,
            guidance=8.0,
        )
    assert relative_error(found, golden("ddim_x_0")) < 1e-4


@pytest.mark.parametrize(
    ("sampler", "prediction", "at_50", "at_500"),
    [
        ("ddim", "epsilon", 0.1, 0.01),
        ("ddim", "v", 0.1, 0.01),
        ("plms", "epsilon", 0.01, 0.001),
        ("plms", "v", 0.1, 0.01),
        ("dpm++", "epsilon", 0.01, 0.001),
        ("dpm++", "v", 0.01, 0.001),
        ("euler", "epsilon", 0.1, 0.01),
        ("euler", "v", 0.1, 0.01),
    ],
)
def test_many_steps_come_near_the_exact_flow_and_more_come_nearer(sampler, prediction, at_50, at_500):
    """Order 1: ddim, euler, and plms with v; a higher one: dpm++, and plms with epsilon."""
    noise = draw(64, 1, 1, 1)
    errors = [
        float((sample(ideal(prediction), noise, sampler=sampler, prediction=prediction, steps=steps) - end).abs().max())
        for steps, end in ((steps, exact(noise, sampler, steps)) for steps in (50, 500))
    ]
    assert errors[0] < at_50 and errors[1] < at_500
    assert errors[1] < errors[0] / 6


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_epsilon_and_v_take_the_same_course_except_with_plms(sampler):
    epsilon, v = (
        sample(ideal(name), draw(64, 1, 1, 1), sampler=sampler, prediction=name, steps=20) for name in ("epsilon", "v")
    )
    difference = float((epsilon - v).abs().max())
    assert 0.01 < difference < 0.5 if sampler == "plms" else difference < 1e-5


# Of Stable Diffusion 2's repository, the file of its scheduler; its documentation makes the other samplers from it.
PUBLISHED = {
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
}
CLASSES = {
    "ddim": diffusers.DDIMScheduler,
    "plms": diffusers.PNDMScheduler,
    "dpm++": diffusers.DPMSolverMultistepScheduler,
    "euler": diffusers.EulerDiscreteScheduler,
}


@pytest.mark.parametrize(("prediction", "diffusers_name"), [("epsilon", "epsilon"), ("v", "v_prediction")])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_scheduler_is_what_the_published_file_makes(sampler, prediction, diffusers_name):
    def settings(scheduler) -> dict[str, object]:
        return {name: value for name, value in scheduler.config.items() if not name.startswith("_")}

    theirs = CLASSES[sampler].from_config({**PUBLISHED, "prediction_type": diffusers_name})
    ours = build_scheduler(sampler, prediction)
    assert type(ours) is type(theirs)
    assert settings(ours) == {name: value for name, value in settings(theirs).items() if name in settings(ours)}


@pytest.mark.parametrize("guidance", [1.0, 8.0])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_is_the_same_in_any_batch_and_place(sampler, guidance):
    def run(noise: Tensor) -> Tensor:
        return sample(ideal("v"), noise, sampler=sampler, prediction="v", steps=7, guidance=guidance)

    noise = draw(7, 4, 5, 3)
    whole = run(noise)
    for rows in ([0], [6], [6, 2], [5, 0, 3], [6, 5, 4, 3, 2, 1, 0], [1, 1, 1, 4]):
        # Element by element; where a vector ends a processor may round a*b+c once or twice.
        torch.testing.assert_close(run(noise[rows]), whole[rows], rtol=1e-5, atol=1e-6, msg=str(rows))


def test_nothing_is_random_and_no_call_sees_the_one_before():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    for sampler in SAMPLERS:
        first, second = (
            sample(ideal("v"), draw(2, 1, 1, 1), sampler=sampler, prediction="v", steps=5) for _ in range(2)
        )
        assert torch.equal(first, second), sampler
    assert torch.equal(before, torch.random.get_rng_state())


def test_guidance_is_one_doubled_batch_the_unconditional_half_first():
    seen = []

    def halves(x: Tensor, times: Tensor) -> Tensor:
        seen.append((len(x), len(times)))
        assert torch.equal(x[:3], x[3:])
        return torch.cat([0.1 * x[:3], 0.3 * x[3:]])

    def steered(x: Tensor, times: Tensor) -> Tensor:
        return 0.1 * x + 8.0 * (0.3 * x - 0.1 * x)

    noise = draw(3, 4, 2, 2)
    found = sample(halves, noise, sampler="ddim", prediction="epsilon", steps=5, guidance=8.0)
    # The same sum, written otherwise.
    torch.testing.assert_close(found, sample(steered, noise, sampler="ddim", prediction="epsilon", steps=5))
    assert seen == [(6, 6)] * 5


def test_without_guidance_the_network_sees_each_row_once():
    seen = []

    def predict(x: Tensor, times: Tensor) -> Tensor:
        seen.append((len(x), times.tolist(), times.dtype))
        return x

    sample(predict, draw(2, 4, 2, 2), sampler="ddim", prediction="v", steps=2, guidance=1.0)
    assert seen == [(2, [501, 501], torch.int64), (2, [1, 1], torch.int64)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_latents_stay_float32_whatever_the_network_computes_in(sampler):
    def predict(x: Tensor, times: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return ideal("v")(x, times).bfloat16()

    def run(noise: Tensor) -> Tensor:
        return sample(predict, noise, sampler=sampler, prediction="v", steps=5)

    plain = run(draw(2, 4, 2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = run(draw(2, 4, 2, 2))
    assert plain.dtype == torch.float32
    assert torch.equal(plain, under_autocast)
    assert run(draw(2, 4, 2, 2).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(("sampler", "num"), [("ddim", 5), ("plms", 6), ("dpm++", 5), ("euler", 5)])
def test_progress_is_told_after_every_step(sampler, num):
    told = []
    sample(
        ideal("v"),
        draw(1, 1, 1, 1),
        sampler=sampler,
        prediction="v",
        steps=5,
        progress=lambda *done: told.append(done),
    )
    assert told == [(number, num) for number in range(1, num + 1)]


def test_another_familys_scheduler_fits():
    """The straight flow of rectified flow: from noise to one point, exactly, in any number of steps."""

    class Straight:
        init_noise_sigma = 1.0

        def set_timesteps(self, num: int) -> None:
            self.timesteps = torch.linspace(1, 0, num + 1)[:-1]
            self.size = 1 / num

        def scale_model_input(self, x: Tensor, time: Tensor) -> Tensor:
            return x

        def step(self, velocity: Tensor, time: Tensor, x: Tensor, *, return_dict: bool) -> tuple[Tensor]:
            return (x - self.size * velocity,)

    def predict(x: Tensor, times: Tensor) -> Tensor:
        return (x - 3.0) / times.reshape(-1, 1, 1, 1)

    found = sample(
        predict,
        draw(2, 4, 2, 2),
        sampler="euler",
        prediction="flow",
        steps=4,
        build=lambda sampler, prediction, **_: Straight(),
    )
    torch.testing.assert_close(found, torch.full_like(found, 3.0))


@pytest.mark.parametrize("sampler", ["ddim", "dpm++", "euler"])
def test_from_pure_noise_the_data_have_their_mean(sampler):
    """What arXiv:2305.08891 mends: without it samples of bright data are darker, since training never saw pure noise."""
    noise, bright = draw(16, 1, 4, 4), 5.0
    zero = with_zero_terminal_snr(ALPHA_BAR).clamp(min=2.0**-48)  # a level of noise that has a number
    found, before = (
        sample(
            ideal("v", alpha_bar, bright),
            noise,
            sampler=sampler,
            prediction="v",
            steps=250,
            zero_terminal_snr=is_zero,
        )
        for alpha_bar, is_zero in ((zero, True), (ALPHA_BAR, False))
    )
    torch.testing.assert_close(found, bright + STD * noise, atol=0.05, rtol=0.0)
    assert (bright + STD * noise - before).mean() > 0.1


def test_the_samplers_from_pure_noise_begin_at_the_last_step():
    for sampler in ("ddim", "dpm++", "euler"):
        scheduler = build_scheduler(sampler, "v", zero_terminal_snr=True)
        scheduler.set_timesteps(10)
        assert scheduler.timesteps.tolist() == list(range(999, 0, -100))
    said = "sampler: plms cannot begin at pure noise (zero_terminal_snr). Possible: ddim, dpm++, euler."
    with pytest.raises(ValueError, match=re.escape(said)):
        sample(ideal("v"), draw(1, 1, 1, 1), sampler="plms", prediction="v", steps=5, zero_terminal_snr=True)


def test_what_cannot_be_is_said_with_the_choices():
    with pytest.raises(ValueError) as error:
        sample(ideal("v"), draw(1, 1, 1, 1), sampler="heun", prediction="v", steps=0, guidance=-1.0)
    assert str(error.value).splitlines() == [
        "sampler: unknown sampler 'heun'. Known: ddim, plms, dpm++, euler.",
        "steps: 0 is not possible. Possible: 2 to 500.",
        "guidance: -1.0 is not possible. Possible: 0 and up; 1: the conditional model alone.",
    ]
    with pytest.raises(ValueError, match=r"^prediction: unknown prediction 'x_0'. Known: epsilon, v, flow\.$"):
        sample(ideal("v"), draw(1, 1, 1, 1), sampler="ddim", prediction="x_0", steps=5)
    with pytest.raises(ValueError, match=r"^sampler: unknown sampler 'heun'. Known: ddim, plms, dpm\+\+, euler\.$"):
        build_scheduler("heun", "v")
    assert [key for key, _ in sampling_problems("ddim", 501, math.nan)] == ["steps", "guidance"]
    assert sampling_problems("euler", 2, 0.0) == sampling_problems("ddim", 500, 8.0) == []


def test_a_network_that_was_not_given_both_halves_is_our_mistake():
    with pytest.raises(AssertionError, match=r"predict made \(1, 1, 1, 1\) of \(2, 1, 1, 1\)"):
        sample(lambda x, _: x[:1], draw(1, 1, 1, 1), sampler="ddim", prediction="v", steps=5, guidance=8.0)


# --- noise and shards ---


def test_noise_is_what_diffusers_draws_from_a_list_of_generators():
    ids = [3, 0, 17, 2**40]
    theirs = randn_tensor((4, 4, 8, 6), generator=[prompt_generator(5, number) for number in ids], dtype=torch.float32)
    assert torch.equal(prompt_noise(5, ids, (4, 8, 6)), theirs)
    odd = randn_tensor((1, 3, 1, 1), generator=prompt_generator(5, 3), dtype=torch.float32)
    assert torch.equal(prompt_noise(5, [3], (3, 1, 1)), odd)


def test_a_prompts_noise_depends_on_no_other_prompt():
    shape = (4, 8, 8)
    whole = prompt_noise(0, range(100), shape)
    assert torch.equal(prompt_noise(0, [41], shape)[0], whole[41])
    assert torch.equal(prompt_noise(0, [99, 41], shape), whole[[99, 41]])
    assert torch.equal(prompt_noise(0, ["41"], shape)[0], whole[41])  # as a file may have it
    assert not torch.equal(prompt_noise(1, [41], shape)[0], whole[41])
    assert prompt_noise(0, [], shape).shape == (0, 4, 8, 8)
    assert whole.dtype == torch.float32 and len({float(row[0, 0, 0]) for row in whole}) == 100


def test_noise_is_standard_normal_over_prompts_too():
    noise = prompt_noise(0, range(2000), (4, 2, 2)).double()
    assert float(noise.mean(dim=0).abs().max()) < 5 / math.sqrt(2000)
    assert float((noise.var(dim=0) - 1).abs().max()) < 5 * math.sqrt(2 / 2000)


def test_noise_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    prompt_noise(0, range(3), (4, 2, 2))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("num", "world_size"), [(30_000, 7), (30_000, 1), (30_000, 8), (5, 8), (0, 3)])
def test_shards_hold_every_prompt_once(num, world_size):
    shards = [shard(num, rank, world_size) for rank in range(world_size)]
    assert sorted(index for part in shards for index in part) == list(range(num))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_rank_that_is_not_there_is_our_mistake():
    with pytest.raises(AssertionError, match="rank 2 of 2"):
        shard(10, 2, 2)
