"""The reverse process: from noise to a latent, with one of four samplers.

    sampler   what it is                                                                    starts at, ends at
    ddim      DDIM, eta 0 (Song et al. 2021, arXiv:2010.02502, equation 12): MLPerf's       steps 981 ... 1 of 50, abar_0
    plms      pseudo linear multistep of order 4 (Liu et al. 2022, arXiv:2202.09778)        as ddim, one call more
    dpm++     DPM-Solver++ 2M, the ODE (Lu et al. 2022, arXiv:2211.01095, algorithm 2)      999, noise level 0
    euler     Euler's method, without churn (Karras et al. 2022, arXiv:2206.00364)          999, noise level 0

The samplers are diffusers' schedulers with the settings of Stable Diffusion's published scheduler files. All are
deterministic: each row's latent depends only on that row's noise.

A flow has only euler: t from 1 to 0, in equal steps, which a shift moves towards 1, as in FLUX's pipeline; or
`linear_quadratic`, as in Mochi's: half of the steps go from 1 to 0.975, the others ever faster to 0. `inclusive` is as
diffusers' scheduler spaces them by itself, for SD3, PRX, Sana and Wan.

For ddim and plms, choose a number of steps that divides 1000: with 51, for example, they begin at step 951.

Shapes: N prompts, C latent channels, h w latent height and width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from families.objectives import BETA_END, BETA_START, NUM_TRAIN_STEPS
from weights.tensors import copy_to_device

# Stable Diffusion's; only leading spacing uses the offset.
SCHEDULE = dict(
    num_train_timesteps=NUM_TRAIN_STEPS,
    beta_schedule="scaled_linear",
    beta_start=BETA_START,
    beta_end=BETA_END,
    steps_offset=1,
)
LEADING_SPACING = dict(timestep_spacing="leading", set_alpha_to_one=False)
# The published files leave the spacing of these two at diffusers' own.
LINSPACE_SPACING = dict(timestep_spacing="linspace", final_sigmas_type="zero")

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", LEADING_SPACING | dict(clip_sample=False)),
    "plms": ("PNDMScheduler", LEADING_SPACING | dict(skip_prk_steps=True)),
    "dpm++": ("DPMSolverMultistepScheduler", LINSPACE_SPACING | dict(algorithm_type="dpmsolver++", solver_order=2)),
    "euler": ("EulerDiscreteScheduler", LINSPACE_SPACING),
}
"""sampler -> diffusers' class, and its constructor's arguments besides the schedule."""

FLOW = "flow"
FLOW_SCHEDULERS: dict[str, str] = {"euler": "FlowMatchEulerDiscreteScheduler"}
"""The same for a flow."""

PUBLISHED_SETTINGS = dict(clip_sample=False, set_alpha_to_one=False)
"""Settings in all of Stable Diffusion's published scheduler files: another sampler can be made of any of them."""

ZERO_TERMINAL_SNR_SETTINGS = dict(rescale_betas_zero_snr=True, timestep_spacing="trailing")
"""In place of a sampler's own spacing: sampling begins at the last step, pure noise (arXiv:2305.08891, section 3.3)."""

Spacing = Literal["linear", "linear_quadratic", "inclusive"]
SLOW_HALF_NOISE = 0.025
"""What half of the steps take away with linear_quadratic (genmo's mochi: src/genmo/mochi_preview/pipelines.py)."""
SamplerName = Literal["ddim", "plms", "dpm++", "euler"]
SAMPLERS = tuple(SCHEDULERS)
PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", FLOW: "flow_prediction"}
"""What the network predicts -> diffusers' name for it."""

SAMPLERS_WITHOUT_ZERO_SNR = ("plms",)
"""Samplers that diffusers has no schedule with zero terminal SNR for."""

# euler with one step starts at timestep 0, with almost no noise. Above 500 steps, ddim skips the noisiest timesteps.
MIN_STEPS, MAX_STEPS = 2, 500


class Scheduler(Protocol):
    """The interface of a scheduler for `sample`."""

    timesteps: Tensor
    init_noise_sigma: float | Tensor

    def set_timesteps(self, num_inference_steps: int) -> None: ...

    def scale_model_input(self, sample: Tensor, timestep: Tensor) -> Tensor: ...

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool
    ) -> tuple[Tensor, ...]: ...


def default_sampler(prediction: str) -> SamplerName:
    """Return the default sampler: MLPerf's, or the only one of a flow."""
    return "euler" if prediction == FLOW else "ddim"


def sampling_problems(
    sampler: str, steps: int, guidance: float, *, prediction: str | None = None, zero_terminal_snr: bool = False
) -> list[tuple[str, str]]:
    """(key, message) for every invalid value. `prediction`: what the network predicts; None: epsilon or v."""
    problems = []
    if sampler not in SAMPLERS:
        problems.append(("sampler", f"unknown sampler '{sampler}'. Known: {', '.join(SAMPLERS)}."))
    elif prediction == FLOW and sampler not in FLOW_SCHEDULERS:
        problems.append(("sampler", f"{sampler} does not sample a flow. Possible: {', '.join(FLOW_SCHEDULERS)}."))
    if zero_terminal_snr and sampler in SAMPLERS_WITHOUT_ZERO_SNR:
        possible = ", ".join(name for name in SAMPLERS if name not in SAMPLERS_WITHOUT_ZERO_SNR)
        problems.append(("sampler", f"{sampler} cannot begin at pure noise (zero_terminal_snr). Possible: {possible}."))
    if not MIN_STEPS <= steps <= MAX_STEPS:
        problems.append(("steps", f"{steps} is not possible. Possible: {MIN_STEPS} to {MAX_STEPS}."))
    if not (math.isfinite(guidance) and guidance >= 0.0):
        problems.append(
            ("guidance", f"{guidance} is not possible. Possible: 0 and up; 1: the conditional model alone.")
        )
    return problems


def build_scheduler(
    sampler: str,
    prediction: str,
    *,
    zero_terminal_snr: bool = False,
    shift: float = 1.0,
    spacing: Spacing = "linear",
    last_time: float | None = None,
) -> Scheduler:
    """Build diffusers' scheduler for one pass; it keeps state between steps.

    Args:
        sampler: one of SAMPLERS.
        prediction: what the network predicts, "epsilon" or "v". plms averages the predictions over steps before it converts
            them to epsilon. So with v it takes another path than with epsilon, and is only of order 1; the others are not
            affected.
        zero_terminal_snr: of the objective that the network was trained on.
        shift: of a flow's times, see `families.objectives.shift_times`.
        spacing: of a flow's times before the shift, see `flow_times`.
        last_time: to which a flow's shifted times are stretched; None: they are not.

    Raises:
        ValueError: an unknown sampler or prediction, or one that does not sample a flow; the message lists the known ones.
    """
    if prediction not in PREDICTIONS:
        raise ValueError(f"prediction: unknown prediction '{prediction}'. Known: {', '.join(PREDICTIONS)}.")
    known = FLOW_SCHEDULERS if prediction == FLOW else SCHEDULERS
    if sampler not in known:
        raise ValueError(f"sampler: unknown sampler '{sampler}'. Known: {', '.join(known)}.")
    import diffusers

    if prediction == FLOW:
        scheduler = getattr(diffusers, FLOW_SCHEDULERS[sampler])(shift=shift, shift_terminal=last_time)
        return _FlowScheduler(scheduler, spacing)
    name, settings = SCHEDULERS[sampler]
    if zero_terminal_snr:
        settings = settings | ZERO_TERMINAL_SNR_SETTINGS
    return getattr(diffusers, name)(**SCHEDULE, **settings, prediction_type=PREDICTIONS[prediction])


class _FlowScheduler:
    """A flow's scheduler, whose times are t in [0, 1] as in training; diffusers counts thousandths.

    Its own times for a number of steps, `inclusive`, go from 1 to the shifted thousandth, both included, and are shifted
    again; Stability AI's sd3-ref does the same. FLUX's pipeline gives it other times: see `flow_times`.
    """

    init_noise_sigma: float | Tensor = 1.0

    def __init__(self, scheduler: Any, spacing: Spacing = "linear"):
        self.scheduler, self.spacing = scheduler, spacing
        self.timesteps = torch.empty(0)

    def set_timesteps(self, num_inference_steps: int) -> None:
        if self.spacing == "inclusive":
            self.scheduler.set_timesteps(num_inference_steps)
        else:
            self.scheduler.set_timesteps(sigmas=flow_times(num_inference_steps, self.spacing))
        self.scheduler.set_begin_index(0)  # it counts its steps, and looks for none of them by its time
        self.timesteps = self.scheduler.sigmas[:-1]

    def scale_model_input(self, sample: Tensor, timestep: Tensor) -> Tensor:
        return sample

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool) -> tuple[Tensor, ...]:
        return self.scheduler.step(model_output, timestep, sample, return_dict=return_dict)


def flow_times(steps: int, spacing: Spacing = "linear") -> list[float]:
    """Return the times at which a flow's network is called: from 1 on, 0 is not among them.

    linear: 1, 1 - 1/n, ... 1/n. linear_quadratic: of n steps the first m = n // 2 take SLOW_HALF_NOISE / m each; the noise
    taken away keeps growing at that rate, plus the square of the steps after m, scaled so that it is 1 after n.
    """
    if spacing == "linear":
        return [1.0 - step / steps for step in range(steps)]
    slow = steps // 2
    rate = SLOW_HALF_NOISE / slow
    bend = (1.0 - rate * steps) / (steps - slow) ** 2
    return [1.0 - rate * step - bend * max(0, step - slow) ** 2 for step in range(steps)]


def dynamic_shift(latent: Sequence[int], scheduler: Mapping[str, Any]) -> float:
    """Return the shift for latents of this shape: its logarithm grows with the number of image tokens, 2 x 2 latents each.

    Args:
        scheduler: settings of diffusers' FlowMatchEulerDiscreteScheduler with use_dynamic_shifting.
    """
    least, most = scheduler["base_image_seq_len"], scheduler["max_image_seq_len"]
    slope = (scheduler["max_shift"] - scheduler["base_shift"]) / (most - least)
    return math.exp(scheduler["base_shift"] + slope * (latent[-2] * latent[-1] // 4 - least))


def classifier_free_guidance(unconditional: Tensor, conditional: Tensor, guidance: float) -> Tensor:
    """Return the guided prediction (Ho & Salimans 2022, arXiv:2207.12598, equation 6, as Stable Diffusion scales it)."""
    return unconditional + guidance * (conditional - unconditional)


def sample(
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    *,
    sampler: str,
    prediction: str,
    steps: int,
    guidance: float = 1.0,
    zero_terminal_snr: bool = False,
    shift: float = 1.0,
    spacing: Spacing = "linear",
    last_time: float | None = None,
    guide: Callable[[Tensor, Tensor, float], Tensor] = classifier_free_guidance,
    progress: Callable[[int, int], None] | None = None,
    build: Callable[..., Scheduler] = build_scheduler,
) -> Tensor:  # (N, C, h, w) -> (N, C, h, w)
    """Sample latents from noise, in float32 whatever precision the network uses.

    Args:
        predict: (x, times) -> prediction of x's shape. With guidance other than 1 it gets 2N rows, the unconditional
            first; with guidance 1 the N conditional ones. `times` has one entry per row: int64, or float32 where the
            sampler uses times between the training timesteps (euler).
        noise: standard normal; on the device where the latents are wanted.
        sampler, prediction, zero_terminal_snr: see `build_scheduler`.
        steps: calls of the network (plms: one more).
        guidance: guidance scale; 1 is none.
        shift, spacing, last_time: of a flow's times, see `build_scheduler`.
        guide: (unconditional, conditional, guidance) -> the guided prediction; both are from one call of the network.
        progress: called after every step with the steps done and their total.
        build: takes `build_scheduler`'s arguments, returns a new scheduler.

    Returns:
        Latents, scaled as in training.

    Raises:
        ValueError: an invalid value (see `sampling_problems`), or an unknown prediction.
    """
    objective: dict[str, Any] = dict(prediction=prediction, zero_terminal_snr=zero_terminal_snr)
    if problems := sampling_problems(sampler, steps, guidance, **objective):
        raise ValueError("\n".join(f"{key}: {text}" for key, text in problems))
    times_of_flow = {"shift": shift, "spacing": spacing, "last_time": last_time} if prediction == FLOW else {}
    scheduler = build(sampler, **objective, **times_of_flow)
    scheduler.set_timesteps(steps)  # its constants stay on the CPU: reading one does not wait for the device
    x = noise.float() * scheduler.init_noise_sigma
    times = copy_to_device(scheduler.timesteps, x.device)
    copies = 1 if guidance == 1.0 else 2
    for index, time in enumerate(scheduler.timesteps):
        rows = torch.cat([scheduler.scale_model_input(x, time)] * copies)
        predicted = predict(rows, times[index].expand(len(rows))).float()
        assert predicted.shape == rows.shape, f"predict made {tuple(predicted.shape)} of {tuple(rows.shape)}"
        if copies == 2:
            unconditional, conditional = predicted.chunk(2)
            predicted = guide(unconditional, conditional, guidance)
        x = scheduler.step(predicted, time, x, return_dict=False)[0]
        if progress is not None:
            progress(index + 1, len(times))
    return x


def prompt_generator(seed: int, prompt_id: int | str) -> torch.Generator:
    """Return a prompt's own CPU generator, seeded by a hash of seed and id, so that neighbours are independent."""
    digest = hashlib.blake2b(f"prompt {seed} {prompt_id}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def prompt_noise(seed: int, prompt_ids: Sequence[int | str], shape: Sequence[int]) -> Tensor:
    """Draw (N, *shape) standard normal float32 on the CPU, each row from its prompt's own generator.

    A prompt's noise depends on no other prompt, rank, batch or device. A diffusers pipeline draws the same from
    `generator=[prompt_generator(seed, prompt_id) for ...]`.
    """
    noise = torch.empty(len(prompt_ids), *shape)
    for row, prompt_id in zip(noise, prompt_ids, strict=True):
        row.normal_(generator=prompt_generator(seed, prompt_id))
    return noise


def split_by_rank(num: int, rank: int, world_size: int) -> range:
    """Return a rank's share of the indices in [0, num). Each index is on exactly one rank; sizes differ by at most one."""
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    return range(rank, num, world_size)
