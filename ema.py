"""Exponential moving average of the trained weights: one float32 copy, updated in place, exact on resume.

After each optimizer step, for every trained parameter theta and its average e (float32):

    e <- beta e + (1 - beta) theta            one `torch._foreach_lerp_` per dtype and device, no temporaries

    ema.decay=0.9999            beta = decay, a batch
    ema.half_life=1000ba        beta = 2^(-1 / 1000): the weight of a batch halves every 1000 batches
    ema.half_life=2048000sp     the same in images: survives another global batch size
    ema.sigma_rel=0.05          beta_t = (1 - 1/t)^(gamma + 1): power-function average (Karras et al. 2024, arXiv:2312.02696,
                                section 3.1; gamma follows from the average's width relative to the run)

Updated every k batches, the factor is the product of the k single ones. Steps that the gradient scaler skipped do not count.
Keys are canonical parameter names, so that a checkpoint fits whatever wraps the model (DDP, FSDP, torch.compile).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from composer import Algorithm, Event, Logger, State, Time, TimeUnit
from torch import Tensor, nn

from cli.limits import limited, read_duration
from cli.private_api import require_private_api
from weights.tensors import difference, tensor_specs, trained_parameters

DEFAULT_DECAY = 0.9999  # of MosaicML's and NVIDIA's Stable Diffusion recipes; a half-life of 6,931 batches


@dataclass(frozen=True)
class EMAConfig:
    """EMA weights. Give one of half_life, decay and sigma_rel."""

    enabled: bool = False
    """Keep EMA weights."""
    half_life: str | None = None
    """Batches (1000ba) or images (2048000sp) after which a batch's weight in the EMA has halved."""
    decay: float | None = None
    """Fixed factor for each batch. null: 0.9999 where neither half_life nor sigma_rel is given."""
    sigma_rel: float | None = None
    """Relative width of a power-function average (arXiv:2312.02696); 0.05 to 0.25 are usual."""
    start: str = "0ba"
    """Batches (800000ba) or images (512000sp) before it begins. It takes no memory until then."""
    device: Literal["model", "cpu"] = "model"
    """model: beside the weights. cpu: in host memory, for a full GPU; then set `every` well above 1."""
    every: int = limited(1, 1)
    """Batches between two updates."""

    def problems(self) -> list[tuple[str, str]]:
        """(key, message) for every invalid value."""
        found = []
        set_to = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if set_to and not self.enabled:
            text = f"false, but ema.{set_to[0]} is given. Say ema.enabled=true (--use_ema), or leave it out."
            found.append(("ema.enabled", text))
        given = [key for key in ("half_life", "decay", "sigma_rel") if getattr(self, key) is not None]
        if len(given) > 1:
            words = " and ".join(f"ema.{key}: {getattr(self, key)}" for key in given[1:])
            found.append((f"ema.{given[0]}", f"{getattr(self, given[0])} and {words} exclude each other."))
        if self.half_life is not None and read_duration(self.half_life, ("ba", "sp")) is None:
            found.append(
                ("ema.half_life", f"'{self.half_life}' is not possible. Possible: 1000ba, 2048000sp; 1 and up.")
            )
        if read_duration(self.start, ("ba", "sp"), least=0) is None:
            found.append(("ema.start", f"'{self.start}' is not possible. Possible: 0ba, 800000ba, 512000sp."))
        if self.decay is not None and not 0.0 <= self.decay < 1.0:
            found.append(("ema.decay", f"{self.decay} is not in [0, 1). Usual: 0.999 to 0.9999."))
        if self.sigma_rel is not None and not 0.0 < self.sigma_rel < MAX_SIGMA_REL:
            found.append(
                ("ema.sigma_rel", f"{self.sigma_rel} is not in (0, {MAX_SIGMA_REL:.3f}). Usual: 0.05 to 0.25.")
            )
        return found


MAX_SIGMA_REL = 1.0 / math.sqrt(12.0)  # gamma = 0, a uniform average over the whole run

FOREACH = ("_foreach_lerp_", "_foreach_mul_", "_foreach_add_", "_foreach_copy_")
require_private_api(torch, *FOREACH, why="the average of all weights in one pass")
require_private_api(
    torch.amp.GradScaler, "_found_inf_per_device", why="a step that fp16 skips is left out of the average"
)


def power_gamma(sigma_rel: float) -> float:
    """Return the exponent of a power-function average of this relative width.

    sigma_rel = sqrt(gamma + 1) / ((gamma + 2) sqrt(gamma + 3)) solved for gamma: the largest real root of
    gamma^3 + 7 gamma^2 + (16 - sigma_rel^-2) gamma + 12 - sigma_rel^-2 (arXiv:2312.02696, section 3.1).
    """
    inverse = sigma_rel**-2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-6))


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter: the shard of a DTensor (FSDP2), or all of it. An average needs no other rank's."""
    tensor = parameter.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _average_specs(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tensor specs that an average of these parameters has: their local parts, in float32."""
    meta = {name: torch.empty(_local(p).shape, dtype=torch.float32, device="meta") for name, p in parameters.items()}
    return tensor_specs(meta)


@torch.no_grad()
def lerp_(averages: list[Tensor], weights: list[Tensor], amount: float) -> None:
    """Set averages <- averages + amount (weights - averages), in place, grouped by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for average, weight in zip(averages, weights, strict=True):
        group = groups.setdefault((weight.dtype, weight.device), ([], []))
        group[0].append(average)
        group[1].append(weight)
    for (dtype, _), (to, of) in groups.items():
        if dtype == torch.float32:
            torch._foreach_lerp_(to, of, amount)
        else:  # a float32 average of bfloat16 weights: lerp wants one type, add promotes as it goes
            torch._foreach_mul_(to, 1.0 - amount)
            torch._foreach_add_(to, of, alpha=amount)


class EMA(Algorithm):
    """Keeps the average; `applied()` lends it to the model.

    `weights`: canonical name -> average, float32; empty until `start`. `num_steps`: optimizer steps that went into it.
    """

    def __init__(self, config: EMAConfig):
        self.config = config
        self.weights: dict[str, Tensor] = {}
        self.num_steps = 0
        self._pending_steps = 0  # since the last update
        self._pending_images = 0
        self._skipped = False
        self._applied = False
        self._parameters: dict[str, nn.Parameter] = {}
        self._staging: list[Tensor] = []  # pinned, where weights and average are on different devices
        assert not config.problems(), config.problems()
        start = Time.from_timestring(config.start)
        half_life = None if config.half_life is None else Time.from_timestring(config.half_life)
        self._start, self._half_life = start, half_life
        self._gamma = None if config.sigma_rel is None else power_gamma(config.sigma_rel)

    # --- when ---

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.FIT_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.FIT_START:
            self.bind(state.model)
            if not self.weights and state.timestamp >= self._start:
                self._begin()
        elif event == Event.AFTER_TRAIN_BATCH:
            self._skipped = step_will_be_skipped(state)
        elif self.weights:
            self._step(state.timestamp.sample.value - state.previous_timestamp.sample.value)
        elif state.timestamp >= self._start:
            self._begin()

    def bind(self, model: nn.Module) -> None:
        """Take the model's trained parameters, whatever wraps them. Raises ValueError: they are not those averaged."""
        parameters = trained_parameters(model)
        if self.weights and (text := difference(_average_specs(parameters), tensor_specs(self.weights))):
            raise ValueError(f"ema: the average is not of this model: {text}.")
        self._parameters = parameters

    # --- what ---

    def _begin(self) -> None:
        """Start as a copy of the weights: averaging from zeros would need a correction ever after."""
        self.weights = {name: self._empty(p).copy_(_local(p)) for name, p in self._parameters.items()}

    def _empty(self, parameter: Tensor) -> Tensor:
        local = _local(parameter)
        if self.config.device == "model":
            return torch.empty_like(local, dtype=torch.float32)  # keeps the memory format: foreach wants equal strides
        return torch.empty_like(local, dtype=torch.float32, device="cpu", pin_memory=local.is_cuda)

    def _step(self, num_images: int) -> None:
        assert not self._applied, "the average is in the model: an update would average it with itself"
        if self._skipped:
            return
        self.num_steps += 1
        self._pending_steps += 1
        self._pending_images += num_images
        if self._pending_steps < self.config.every:
            return
        amount = 1.0 - self.decay_of(self._pending_steps, self._pending_images, self.num_steps)
        self._pending_steps = self._pending_images = 0
        lerp_(list(self.weights.values()), self._weights_where_the_average_is(), amount)

    def decay_of(self, steps: int, images: int, total_steps: int) -> float:
        """Return the factor of an update over some steps, the last of which is number `total_steps` (from 1)."""
        if self._gamma is not None:
            return ((total_steps - steps) / total_steps) ** (self._gamma + 1.0)  # the product of (1 - 1/t)^(gamma + 1)
        if self._half_life is not None:
            passed = images if self._half_life.unit == TimeUnit.SAMPLE else steps
            return 0.5 ** (passed / self._half_life.value)
        return (DEFAULT_DECAY if self.config.decay is None else self.config.decay) ** steps

    @torch.no_grad()
    def _weights_where_the_average_is(self) -> list[Tensor]:
        # Not `_local`: no gradient is recorded here, and detaching some hundred tensors is a thirtieth of the update.
        local = [p.to_local() if hasattr(p, "to_local") else p for p in self._parameters.values()]
        if self.config.device == "model" or not any(tensor.is_cuda for tensor in local):
            return local
        if not self._staging:
            self._staging = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in local]
        torch._foreach_copy_(self._staging, local, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._staging

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the model and take it out again, whatever happens in between.

        An exchange, tensor by tensor: the extra memory is that of the largest one. Without an average yet, or inside
        another `applied()`, it changes nothing.
        """
        if self._applied or not self.weights:
            yield
            return
        exchanged: list[tuple[Tensor, Tensor]] = []
        kept: list[Tensor] = []  # training weights of another type than float32: an exchange would round the average
        try:
            self._applied = True
            for name, parameter in self._parameters.items():
                weight, average = _local(parameter), self.weights[name]
                if weight.dtype == average.dtype:
                    _exchange(weight, average)
                    exchanged.append((weight, average))
                else:
                    kept.append(weight.clone())
                    exchanged.append((weight, kept[-1]))
                    with torch.no_grad():
                        weight.copy_(average)
            yield
        finally:
            for weight, other in reversed(exchanged):
                _exchange(weight, other)
            self._applied = False

    # --- kept in checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its counts; tensors are the live ones."""
        counts = {"steps": self.num_steps, "pending_steps": self._pending_steps, "pending_images": self._pending_images}
        return {"weights": dict(self.weights), **counts}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = False) -> None:
        """Take over an average, always by exact name and shape. Call `bind` first.

        Raises:
            ValueError: lists what is missing, left over or of another shape.
        """
        assert self._parameters, "bind the model first"
        saved = state["weights"]
        if saved or state["steps"]:  # not begun yet: nothing to compare
            if text := difference(_average_specs(self._parameters), tensor_specs(saved)):
                raise ValueError(f"ema: the saved average does not fit the model: {text}.")
            self.weights = {name: self._empty(p).copy_(saved[name]) for name, p in self._parameters.items()}
        self.num_steps = state["steps"]
        self._pending_steps, self._pending_images = state["pending_steps"], state["pending_images"]


@torch.no_grad()
def _exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the contents of two tensors, on the same device or not; `one` is restored if that fails midway."""
    before = one.clone()
    try:
        one.copy_(other)
        other.copy_(before)
    except BaseException:
        one.copy_(before)
        raise


def step_will_be_skipped(state: State) -> bool:
    """True when the gradient scaler has found an infinity in this batch's gradients, which it has unscaled by now.

    Asked of the scaler, since a hook on the optimizer's step sees a fused step that does nothing. Only fp16 has a scaler;
    reading its answer waits for the device.
    """
    if state.scaler is None or not state.scaler.is_enabled():
        return False
    found = (state.scaler._found_inf_per_device(optimizer) for optimizer in state.optimizers)
    return any(tensor.item() > 0.0 for per_device in found for tensor in per_device.values())
