"""Optimizer, weight-decay groups, learning-rate schedule, gradient norm and clipping."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from composer import Time, TimeUnit
from torch import nn

from common.plugins import is_plugin, parse_plugin
from common.value_types import exclusive, limited, read_duration
from families.mlperf import Benchmark
from training.low_memory_adamw import SmallAdamW, has_small_weights
from training.muon import MuonAdamW, hidden_weights

DEFAULT_LR = 1e-4
WARMUP_START = 1e-6  # of a run that is no benchmark's: as MLPerf's Stable Diffusion has it


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, learning rate and clipping."""

    name: str = "adamw"
    """adamw, muon (arXiv:2502.16982), or another class, e.g. 'torch.optim:RAdam(decoupled_weight_decay=true)'."""
    lr: float | None = limited(None, 0.0, above=True)
    """Learning rate after warm-up. null: 1e-4, or from lr_per_image; mlperf: the reference's."""
    lr_per_image: float | None = limited(None, 0.0, above=True)
    """Learning rate per image of the global batch, instead of lr."""
    betas: tuple[float, float] = limited((0.9, 0.999), 0.0, 1.0, below=True, usual="[0.9, 0.999]")
    """AdamW's two betas."""
    eps: float = limited(1e-8, 0.0, above=True)
    """AdamW's epsilon."""
    weight_decay: float = limited(0.01, 0.0)
    """Decoupled weight decay."""
    decay: Literal["all", "matrices"] = "all"
    """Parameters with weight decay; matrices: those of two or more dimensions."""
    clip_norm: float | None = limited(None, 0.0, above=True)
    """Clip the norm of all gradients. null: no clipping."""
    states: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Type of AdamW's moments."""
    rounding: Literal["stochastic", "nearest"] | None = None
    """Rounding to bf16. null: stochastic. nearest loses small changes."""

    def problems(self) -> list[tuple[str, str]]:
        """(key, message) for keys that do not go together."""
        problems = exclusive("optimizer", self, "lr", "lr_per_image")
        if self.name == "adamw":
            return problems
        if self.name == "muon":
            text = "but muon keeps its states in float32. Leave it out, or set optimizer.name=adamw."
            given = ((key, getattr(self, key)) for key in ("states", "rounding"))
            return problems + [(f"optimizer.{k}", f"{v}, {text}") for k, v in given if v not in ("fp32", None)]
        if not is_plugin(self.name):
            text = f"'{self.name}' is unknown. Possible: adamw, muon, or a class: package.module:Class"
            return [*problems, ("optimizer.name", f"{text}.")]
        try:
            own = parse_plugin("optimizer.name", self.name).arguments.keys() & {"lr", "weight_decay"}
        except ValueError as error:
            return [*problems, ("optimizer.name", str(error).removeprefix("optimizer.name: "))]
        problems += [
            ("optimizer.name", f"{key} is an argument of it. Give optimizer.{key} instead.") for key in sorted(own)
        ]
        for key in ("betas", "eps", "states", "rounding"):
            if (value := getattr(self, key)) != getattr(OptimizerConfig(), key):
                text = f"{value}, but only adamw has it. Give the arguments in optimizer.name: Class(name=value)."
                problems.append((f"optimizer.{key}", text))
        return problems

    def resolved(self, lr_per_image: float | None, precision: str) -> OptimizerConfig:
        """Replace null by its value.

        Args:
            lr_per_image: the rate of a benchmark, where neither `lr` nor `lr_per_image` is given; None: there is none.
            precision: of the run.
        """
        lr_per_image = self.lr_per_image if lr_per_image is None else lr_per_image
        rounds = self.name == "adamw" and (self.states == "bf16" or precision == "bf16_params")
        return dataclasses.replace(
            self,
            lr=DEFAULT_LR if self.lr is None and lr_per_image is None else self.lr,
            lr_per_image=lr_per_image,
            rounding="stochastic" if self.rounding is None and rounds else self.rounding,
        )

    def learning_rate(self, global_batch_size: int) -> float:
        """Return the rate after warm-up."""
        if self.lr_per_image is not None:
            return self.lr_per_image * global_batch_size
        return DEFAULT_LR if self.lr is None else self.lr


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over time."""

    name: Literal["constant", "linear", "cosine", "polynomial"] = "constant"
    """Decay of the rate after warm-up."""
    final_frac: float = limited(0.0, 0.0, 1.0)
    """Final rate, as a fraction of lr."""
    decay_frac: float | None = limited(None, 0.0, 1.0, above=True)
    """Last fraction of the run in which the rate decays. null: all after warm-up."""
    power: float = limited(1.0, 0.0, above=True)
    """Power of polynomial; 1 is linear."""
    warmup_batches: int | None = limited(None, 0)
    """Batches of linear warm-up. null: 0, or from warmup_images; mlperf: 1000."""
    warmup_images: int | None = limited(None, 0)
    """Images of warm-up, instead of warmup_batches."""

    def problems(self) -> list[tuple[str, str]]:
        """(key, message) for keys that do not go together."""
        messages = exclusive("schedule", self, "warmup_batches", "warmup_images")
        unused = {"final_frac": 0.0, "decay_frac": None} if self.name == "constant" else {}
        unused |= {"power": 1.0} if self.name != "polynomial" else {}
        for key, default in unused.items():
            if (value := getattr(self, key)) != default:
                users = "polynomial" if key == "power" else "linear, cosine or polynomial"
                text = f"{value:g}, but {self.name} has none. Set schedule.name={users}, or leave it out."
                messages.append((f"schedule.{key}", text))
        return messages

    def resolved(self, warmup_batches: int | None) -> ScheduleConfig:
        """Use this warm-up if none is given."""
        has_warmup = (self.warmup_batches, self.warmup_images) != (None, None)
        return self if has_warmup else dataclasses.replace(self, warmup_batches=warmup_batches)

    def num_warmup_batches(self, global_batch_size: int) -> int:
        if self.warmup_images is not None:
            return math.ceil(self.warmup_images / global_batch_size)
        return self.warmup_batches or 0


def lr_multiplier(
    batch: int,
    *,
    schedule: ScheduleConfig,
    warmup_batches: int,
    total_batches: int,
    warmup_start: float = WARMUP_START,
) -> float:
    """Return the learning rate's factor for the batch with this index, counted from 0.

    Linear from s = `warmup_start` to 1 over the W batches of warm-up: (1 - s) n / W + s. MLPerf's Stable Diffusion has
    s = 1e-6; with FLUX.1's s = 1 / (W + 1) this is (n + 1) / (W + 1). Then 1 until the decay begins, which reaches
    `final_frac` at the batch after the last: with p its part that is over, by 1 - p (linear), (1 - p) ** power, or half a
    cosine (Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts). A linear decay of the last tenth or fifth after a
    constant rate is that of Hu et al. 2024 (arXiv:2404.06395) and Haegele et al. 2024 (arXiv:2405.18392).
    """
    if batch < warmup_batches:
        return (1.0 - warmup_start) * batch / warmup_batches + warmup_start
    if schedule.name == "constant":
        return 1.0
    begin = warmup_batches
    if schedule.decay_frac is not None:
        begin = max(begin, total_batches - round(schedule.decay_frac * total_batches))
    over = min(1.0, max(0.0, (batch - begin) / max(1, total_batches - begin)))
    left = 0.5 * (1.0 + math.cos(math.pi * over)) if schedule.name == "cosine" else (1.0 - over) ** schedule.power
    return schedule.final_frac + (1.0 - schedule.final_frac) * left


def total_batches(duration: str, *, global_batch_size: int, epoch_batches: int) -> int:
    """Return the batches of a Composer duration given in batches, samples or epochs."""
    time = Time.from_timestring(duration)
    if time.unit == TimeUnit.SAMPLE:
        return math.ceil(time.value / global_batch_size)
    return time.value * (epoch_batches if time.unit == TimeUnit.EPOCH else 1)


def images_of(max_duration: str, global_batch_size: int) -> int | None:
    """Return the images of a duration in batches or samples, in whole batches; None: it is in epochs, or invalid."""
    if read_duration(max_duration, ("ba", "sp")) is None:
        return None
    images = total_batches(max_duration, global_batch_size=global_batch_size, epoch_batches=0) * global_batch_size
    return images if images > 0 else None


def build_schedule(
    config: ScheduleConfig,
    optimizer: torch.optim.Optimizer,
    benchmark: Benchmark | None = None,
    *,
    global_batch_size: int,
    num_batches: int,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule; step it after every batch.

    It is a plain torch schedule. Composer evaluates its own before it counts the batch, so each learning rate would come
    one batch late (seen with 0.32.1).

    Args:
        benchmark: whose network the run trains; it says how the warm-up begins.
    """
    num_warmup = config.num_warmup_batches(global_batch_size)
    multiplier = functools.partial(
        lr_multiplier,
        schedule=config,
        warmup_batches=num_warmup,
        total_batches=num_batches,
        warmup_start=benchmark.warmup_start(num_warmup) if benchmark else WARMUP_START,
    )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, multiplier)


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, global_batch_size: int, *, seed: int = 0
) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters, in at most two groups (decayed, not decayed); muon's before them.

    fused=True: one kernel for all tensors, on GPU and CPU. Small states and bfloat16 weights: training/low_memory_adamw.py.

    Args:
        seed: of stochastic rounding, where something is rounded.

    Raises:
        ValueError: the class of `name` cannot be built, see common/plugins.py; or muon has no matrices here.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    hidden = hidden_weights(getattr(model, "denoiser", model)) if config.name == "muon" else []
    if config.name == "muon" and not hidden:
        blocks = "the network has no blocks with matrices, as diffusers' transformers and UNets have"
        raise ValueError(f"optimizer.name: muon, but {blocks}. Set optimizer.name=adamw.")
    is_hidden = set(map(id, hidden))
    parameters = [p for p in parameters if id(p) not in is_hidden]
    groups: list[dict[str, Any]]
    if config.decay == "all":
        groups = [{"params": parameters, "weight_decay": config.weight_decay}]
    else:
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
    if is_plugin(config.name):
        plugin = parse_plugin("optimizer.name", config.name)
        return plugin.build(torch.optim.Optimizer, groups, lr=config.learning_rate(global_batch_size))
    options: dict[str, Any] = dict(lr=config.learning_rate(global_batch_size), betas=config.betas, eps=config.eps)
    if config.name == "muon":
        own = {"params": hidden, "weight_decay": config.weight_decay, "muon": True}
        return MuonAdamW([own, *({**group, "muon": False} for group in groups)], **options)
    if config.states == "fp32" and not has_small_weights(parameters):
        return torch.optim.AdamW(groups, **options, fused=True)
    is_stochastic = config.rounding != "nearest"
    return SmallAdamW(groups, **options, states=config.states, stochastic=is_stochastic, seed=seed)
