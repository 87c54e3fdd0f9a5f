"""The forward process: noise schedules, prediction targets and loss weights.

Symbols as in Ho et al. 2020 (arXiv:2006.11239): x_0 the latent, eps standard normal noise, abar_t the cumulative signal
fraction, x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps (its equation 4). A flow goes straight: x_t = (1 - t) x_0 + t eps,
with t in [0, 1] (Liu et al. 2022, arXiv:2209.03003).

Shapes: B batch, C latent channels, h w latent height and width, T steps of the schedule (1000).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from common.plugins import parse_plugin
from common.value_types import limited

NUM_TRAIN_STEPS, BETA_START, BETA_END = 1000, 0.00085, 0.012
"""Of Stable Diffusion's schedule; its configuration calls the betas `linear_start` and `linear_end`."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the denoiser is trained to predict."""

    name: str | None = None
    """A loss of your own: path/to/file.py:Class, a subclass of families.objectives.RectifiedFlow or DiscreteDiffusion."""
    prediction: str | None = None
    """epsilon, v or flow. null: the variant's default."""
    weighting: Literal["none", "min_snr"] = "none"
    """Weight of each timestep in the loss; min_snr: arXiv:2303.09556."""
    min_snr_gamma: float = limited(5.0, 0.0, above=True)
    """Gamma of min_snr."""
    timesteps: Literal["uniform", "logit_normal"] | None = None
    """How timesteps are drawn; logit_normal (flow): arXiv:2403.03206. null: the variant's default."""
    shift: float | None = limited(None, 0.0, above=True)
    """Shifts a flow's times towards noise (arXiv:2403.03206, equation 23). null: the variant's default."""
    zero_terminal_snr: bool = False
    """The last step is pure noise (arXiv:2305.08891). Needs prediction v."""
    offset_noise: float = limited(0.0, 0.0)
    """Adds noise per image and channel, times this; 0.1 is usual."""
    caption_dropout: float | None = limited(None, 0.0, 1.0)
    """Fraction of captions left empty; guidance needs it. null: the variant's, 0.1 or 0."""

    def problems(self, variant_values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(key, message) for keys that do not go together. `variant_values`: see `resolved`."""
        resolved = self.resolved(variant_values)
        problems = _flow_problems(self) if resolved.prediction == "flow" else _diffusion_problems(self)
        if problems or not resolved.zero_terminal_snr:
            return problems
        if resolved.prediction != "v":
            text = f"true, but the prediction is {resolved.prediction}, and pure noise says nothing of epsilon"
            problems.append(("objective.zero_terminal_snr", f"{text}. Set objective.prediction=v."))
        if resolved.weighting == "min_snr":
            text = "min_snr weights a step without signal with 0. Set objective.weighting=none with zero_terminal_snr."
            problems.append(("objective.weighting", text))
        return problems

    def score_settings(self) -> dict[str, Any]:
        """Return the settings that a score of trained weights depends on."""
        zero_snr = {"zero_terminal_snr": True} if self.zero_terminal_snr else {}
        return {"prediction": self.prediction, **zero_snr}

    def resolved(self, variant_values: Mapping[str, Any]) -> ObjectiveConfig:
        """Return a copy with the variant's own values in place of null."""
        values = {key: value for key, value in variant_values.items() if getattr(self, key) is None}
        return dataclasses.replace(self, **values)


def _flow_problems(config: ObjectiveConfig) -> list[tuple[str, str]]:
    diffusion_only: dict[str, tuple[Any, Any]] = {
        "weighting": (config.weighting, "none"),
        "min_snr_gamma": (config.min_snr_gamma, ObjectiveConfig().min_snr_gamma),
        "zero_terminal_snr": (config.zero_terminal_snr, False),
    }
    text = "{}, but a flow has no noise schedule that it could mean. Leave it out."
    return [
        (f"objective.{key}", text.format(_format_yaml(value)))
        for key, (value, default) in diffusion_only.items()
        if value != default
    ]


def _diffusion_problems(config: ObjectiveConfig) -> list[tuple[str, str]]:
    problems, text = [], "{}, but only a flow has it (objective.prediction=flow). Leave it out."
    if config.timesteps == "logit_normal":
        problems.append(("objective.timesteps", text.format(config.timesteps)))
    if config.shift is not None:
        problems.append(("objective.shift", text.format(config.shift)))
    return problems


def _format_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Objective:
    """A forward process with its loss: what model.py calls."""

    prediction: str
    """What the network predicts, one of PREDICTIONS in families/sampling.py."""
    zero_terminal_snr: bool
    """The schedule ends in pure noise, and the reverse process begins there."""
    offset_noise: float
    """See `ObjectiveConfig`."""

    def __init__(self, config: ObjectiveConfig):
        """`config`: without null."""
        raise NotImplementedError

    def to(self, device: torch.device) -> Objective:
        return self

    def draw_times(self, num: int, generator: torch.Generator) -> Tensor:
        """Draw one time per sample, (B,), on the generator's device."""
        raise NotImplementedError

    def times_at(self, thousandths: Tensor) -> Tensor:
        """# (B,) in [0, 1000) -> (B,): the times at these thousandths of the schedule, from the least noise on."""
        raise NotImplementedError

    def corrupt(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """# (B, C, h, w), (B, C, h, w), (B,) -> (B, C, h, w) in the latents' dtype."""
        raise NotImplementedError

    def target(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the network's target, (B, C, h, w)."""
        raise NotImplementedError

    def weight(self, times: Tensor) -> Tensor:
        """Return each sample's weight in the loss, (B,) float32."""
        return torch.ones(len(times), device=times.device)

    def losses(self, prediction: Tensor, target: Tensor) -> Tensor:
        """# (B, C, h, w) float32, twice -> (B,): each sample's loss without its weight; here the mean squared error."""
        return mean_squared_errors(prediction, target)


def mean_squared_errors(prediction: Tensor, target: Tensor) -> Tensor:
    """# (B, ...) twice -> (B,)."""
    return F.mse_loss(prediction, target, reduction="none").flatten(1).mean(dim=1)


def build_objective(config: ObjectiveConfig) -> Objective:
    """Build the forward process of a configuration without null. Raises ValueError: see common/plugins.py."""
    kind = RectifiedFlow if config.prediction == "flow" else DiscreteDiffusion
    return kind(config) if config.name is None else parse_plugin("objective.name", config.name).build(kind, config)


def scaled_linear_alphas_cumprod() -> Tensor:
    """Return abar of Stable Diffusion's schedule, float64 (T,): betas are linear in their square roots.

    diffusers calls it "scaled_linear"; the MLPerf reference calls the same schedule "linear".
    """
    betas = torch.linspace(BETA_START**0.5, BETA_END**0.5, NUM_TRAIN_STEPS, dtype=torch.float64) ** 2
    return torch.cumprod(1.0 - betas, dim=0)


def rescale_to_zero_terminal_snr(alpha_bar: Tensor) -> Tensor:
    """Shift and scale sqrt(abar), (T,), so that its last value is 0 and its first stays (arXiv:2305.08891, algorithm 1)."""
    root = alpha_bar.sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2


def min_snr_weight(alpha_bar: Tensor, gamma: float, prediction: str) -> Tensor:
    """Return min(SNR, gamma) / SNR for epsilon, min(SNR, gamma) / (SNR + 1) for v, with SNR = abar / (1 - abar).

    Hang et al. 2023 (arXiv:2303.09556), section 3.4: the clamped weight of the x_0 loss, converted to the loss of each
    prediction.
    """
    snr = alpha_bar / (1.0 - alpha_bar)
    return torch.clamp(snr, max=gamma) / (snr if prediction == "epsilon" else snr + 1.0)


class DiscreteDiffusion(Objective):
    """T discrete steps, uniform times, target epsilon or v (v: Salimans & Ho 2022, arXiv:2202.00512)."""

    def __init__(self, config: ObjectiveConfig):
        assert config.prediction is not None
        self.prediction = config.prediction
        self.weighting, self.gamma = config.weighting, config.min_snr_gamma
        self.zero_terminal_snr, self.offset_noise = config.zero_terminal_snr, config.offset_noise
        alpha_bar = scaled_linear_alphas_cumprod()
        if self.zero_terminal_snr:
            alpha_bar = rescale_to_zero_terminal_snr(alpha_bar)
        self.alpha_bar = alpha_bar.float()  # (T,)

    def to(self, device: torch.device) -> DiscreteDiffusion:
        self.alpha_bar = self.alpha_bar.to(device)
        return self

    def draw_times(self, num: int, generator: torch.Generator) -> Tensor:
        # 0 is included: otherwise the step with the least noise would stay untrained.
        return torch.randint(0, len(self.alpha_bar), (num,), generator=generator, device=generator.device)

    def times_at(self, thousandths: Tensor) -> Tensor:
        return thousandths * len(self.alpha_bar) // 1000

    def _signal_and_noise(self, times: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(abar_t) and sqrt(1 - abar_t), (B, 1, ..., 1), computed in float32, then cast to `like`'s dtype."""
        alpha_bar = self.alpha_bar[times].reshape(-1, *[1] * (like.ndim - 1))
        return alpha_bar.sqrt().to(like.dtype), (1.0 - alpha_bar).sqrt().to(like.dtype)

    def corrupt(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        signal, sigma = self._signal_and_noise(times, latents)
        return signal * latents + sigma * noise  # Ho et al. 2020, equation 4

    def target(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        if self.prediction == "epsilon":
            return noise
        signal, sigma = self._signal_and_noise(times, latents)
        return signal * noise - sigma * latents  # v, Salimans & Ho 2022, appendix D

    def weight(self, times: Tensor) -> Tensor:
        if self.weighting == "none":
            return torch.ones(len(times), device=times.device)
        return min_snr_weight(self.alpha_bar[times], self.gamma, self.prediction)


class RectifiedFlow(Objective):
    """Straight paths from data to noise: x_t = (1 - t) x_0 + t eps, target eps - x_0 (Liu et al. 2022, arXiv:2209.03003).

    `timesteps` says how t is drawn: "uniform", or "logit_normal": the logistic function of a standard normal number
    (Esser et al. 2024, arXiv:2403.03206, equation 19, with mean 0 and deviation 1); `shift` moves it, see `shift_times`.
    """

    prediction = "flow"
    zero_terminal_snr = False  # a path ends in pure noise by itself; this is about schedules in steps

    def __init__(self, config: ObjectiveConfig):
        assert config.timesteps is not None and config.shift is not None
        self.timesteps, self.shift, self.offset_noise = config.timesteps, config.shift, config.offset_noise

    def draw_times(self, num: int, generator: torch.Generator) -> Tensor:
        """Return t in [0, 1], float32."""
        if self.timesteps == "uniform":
            return shift_times(torch.rand(num, generator=generator, device=generator.device), self.shift)
        return shift_times(torch.randn(num, generator=generator, device=generator.device).sigmoid(), self.shift)

    def times_at(self, thousandths: Tensor) -> Tensor:
        return thousandths.float() / 1000.0

    def corrupt(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        t = times.reshape(-1, *[1] * (latents.ndim - 1))
        return (1.0 - t).to(latents.dtype) * latents + t.to(latents.dtype) * noise

    def target(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        return noise - latents


def shift_times(times: Tensor, shift: float) -> Tensor:
    """Return s t / (1 + (s - 1) t): times with more noise, as more pixels need it (arXiv:2403.03206, equation 23)."""
    return times if shift == 1.0 else shift * times / (1.0 + (shift - 1.0) * times)
