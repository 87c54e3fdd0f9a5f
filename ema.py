"""EMA weights: an exponential moving average of the trained weights. One float32 copy, updated in place, exact on resume.

After each optimizer step, for every trained parameter theta and its EMA weights e (float32):

    e <- beta e + (1 - beta) theta            one `torch._foreach_lerp_` per dtype and device, no temporaries

    ema.decay=0.9999            beta = decay, per batch
    ema.half_life=1000ba        beta = 2^(-1 / 1000): the weight of a batch halves every 1000 batches
    ema.half_life=2048000sp     the same in images, independent of the global batch size
    ema.sigma_rel=0.05          beta_t = (1 - 1/t)^(gamma + 1): power-function average (Karras et al. 2024, arXiv:2312.02696,
                                section 3.1; gamma follows from the average's width relative to the run)

With an update every k batches, the factor is the product of the k single ones. Steps that the gradient scaler skipped do
not count. Keys are canonical parameter names, so a checkpoint does not depend on wrappers (DDP, FSDP, torch.compile).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from composer import Algorithm, Event, Logger, State, Time, TimeUnit
from torch import Tensor, nn

from common.private_api import require_private_api
from common.value_types import duration, exclusive, limited
from weights.tensors import (
    format_difference,
    from_local_shard,
    local_shard,
    shard_like,
    tensor_specs,
    trained_parameters,
)

MAX_SIGMA_REL = 1.0 / math.sqrt(12.0)  # gamma = 0, a uniform average over the whole run
DEFAULT_DECAY = 0.9999  # of MosaicML's and NVIDIA's Stable Diffusion recipes; a half-life of 6,931 batches


@dataclass(frozen=True)
class EMAConfig:
    """EMA weights. Give one of half_life, decay and sigma_rel."""

    enabled: bool = False
    """Keep EMA weights."""
    half_life: str | None = duration(None, "ba", "sp")
    """Batches (1000ba) or images (2048000sp) after which a batch's weight halves."""
    decay: float | None = limited(None, 0.0, 1.0, below=True, usual="0.999 to 0.9999")
    """Factor per batch. null: 0.9999, or from half_life or sigma_rel."""
    sigma_rel: float | None = limited(None, 0.0, MAX_SIGMA_REL, above=True, below=True, usual="0.05 to 0.25")
    """Relative width of a power-function EMA (arXiv:2312.02696)."""
    start: str = duration("0ba", "ba", "sp", least=0)
    """Batches (800000ba) or images (512000sp) before the EMA begins."""
    device: Literal["model", "cpu"] = "model"
    """cpu: in host memory, for a full GPU; then raise `every`."""
    every: int = limited(1, 1)
    """Batches between two updates."""

    def resolved(self) -> EMAConfig:
        """Replace null by its value."""
        is_given = (self.half_life, self.decay, self.sigma_rel) != (None, None, None)
        return self if is_given or not self.enabled else replace(self, decay=DEFAULT_DECAY)

    def problems(self) -> list[tuple[str, str]]:
        """(key, message) for keys that do not go together."""
        problems = exclusive("ema", self, "half_life", "decay", "sigma_rel")
        set_to = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if set_to and not self.enabled:
            text = f"false, but ema.{set_to[0]} is given. Set ema.enabled=true (--use_ema), or leave it out."
            problems.append(("ema.enabled", text))
        return problems


FOREACH = ("_foreach_lerp_", "_foreach_mul_", "_foreach_add_", "_foreach_copy_")
SKIPPED = "amp.GradScaler._found_inf_per_device"
require_private_api(torch, *FOREACH, SKIPPED, why="the EMA takes one pass, and leaves out steps that fp16 skips")


def power_gamma(sigma_rel: float) -> float:
    """Return the exponent of a power-function average of this relative width.

    sigma_rel = sqrt(gamma + 1) / ((gamma + 2) sqrt(gamma + 3)) solved for gamma: the largest real root of
    gamma^3 + 7 gamma^2 + (16 - sigma_rel^-2) gamma + 12 - sigma_rel^-2 (arXiv:2312.02696, section 3.1).
    """
    inverse = sigma_rel**-2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-6))


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or all of it. The EMA needs no other rank's part."""
    return local_shard(parameter.detach())


def _average_specs(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tensor specs of these parameters' EMA weights, in float32."""
    meta = {name: torch.empty(p.shape, dtype=torch.float32, device="meta") for name, p in parameters.items()}
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
        else:  # float32 EMA of bfloat16 weights: lerp needs equal types, add promotes them
            torch._foreach_mul_(to, 1.0 - amount)
            torch._foreach_add_(to, of, alpha=amount)


class EMA(Algorithm):
    """Keeps the EMA weights; `applied()` puts them into the model for a while.

    `weights`: canonical name -> EMA weights, float32; empty until `start`. `num_steps`: optimizer steps averaged so far.
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
        self._staging: list[Tensor] = []  # pinned; used if weights and EMA are on different devices
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
            assert state.previous_timestamp is not None
            self._step(state.timestamp.sample.value - state.previous_timestamp.sample.value)
        elif state.timestamp >= self._start:
            self._begin()

    def bind(self, model: nn.Module) -> None:
        """Take the model's trained parameters, without wrappers. Raises ValueError: the EMA is of other parameters."""
        parameters = trained_parameters(model)
        weights = {
            name: from_local_shard(weight, parameters.get(name, weight)) for name, weight in self.weights.items()
        }
        if weights and (text := format_difference(_average_specs(parameters), tensor_specs(weights))):
            raise ValueError(f"ema: the EMA weights are of another model: {text}.")
        self._parameters = parameters

    # --- what ---

    def _begin(self) -> None:
        """Start as a copy of the weights: an average that starts from zeros would need a bias correction."""
        self.weights = {name: self._empty(p).copy_(_local(p)) for name, p in self._parameters.items()}

    def _empty(self, parameter: Tensor) -> Tensor:
        local = _local(parameter)
        if self.config.device == "model":
            return torch.empty_like(local, dtype=torch.float32)  # keeps the memory format: foreach needs equal strides
        return torch.empty_like(local, dtype=torch.float32, device="cpu", pin_memory=local.is_cuda)

    def _step(self, num_images: int) -> None:
        assert not self._applied, "the EMA weights are in the model: an update would average them with themselves"
        if self._skipped:
            return
        self.num_steps += 1
        self._pending_steps += 1
        self._pending_images += num_images
        if self._pending_steps < self.config.every:
            return
        amount = 1.0 - self.compute_decay(self._pending_steps, self._pending_images, self.num_steps)
        self._pending_steps = self._pending_images = 0
        lerp_(list(self.weights.values()), self._weights_on_average_device(), amount)

    def compute_decay(self, steps: int, images: int, total_steps: int) -> float:
        """Return the factor of an update over `steps` steps, the last of which is number `total_steps` (from 1)."""
        if self._gamma is not None:
            return ((total_steps - steps) / total_steps) ** (self._gamma + 1.0)  # the product of (1 - 1/t)^(gamma + 1)
        if self._half_life is not None:
            passed = images if self._half_life.unit == TimeUnit.SAMPLE else steps
            return 0.5 ** (passed / self._half_life.value)
        return (DEFAULT_DECAY if self.config.decay is None else self.config.decay) ** steps

    @torch.no_grad()
    def _weights_on_average_device(self) -> list[Tensor]:
        # Not `_local`: no gradient is recorded here, and detaching hundreds of tensors takes 1/30 of the update's time.
        local = [local_shard(p) for p in self._parameters.values()]
        if self.config.device == "model" or not any(tensor.is_cuda for tensor in local):
            return local
        if not self._staging:
            self._staging = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in local]
        torch._foreach_copy_(self._staging, local, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._staging

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the EMA weights into the model, and the training weights back afterwards, even after an error.

        Tensors are swapped one by one, so the extra memory is that of the largest one. Before the EMA has begun, or inside
        another `applied()`, this does nothing.
        """
        if self._applied or not self.weights:
            yield
            return
        exchanged: list[tuple[Tensor, Tensor]] = []
        saved: list[Tensor] = []  # training weights of another type than float32: a swap would round the EMA
        try:
            self._applied = True
            for name, parameter in self._parameters.items():
                weight, average = _local(parameter), self.weights[name]
                if weight.dtype == average.dtype:
                    _exchange(weight, average)
                    exchanged.append((weight, average))
                else:
                    saved.append(weight.clone())
                    exchanged.append((weight, saved[-1]))
                    with torch.no_grad():
                        weight.copy_(average)
            yield
        finally:
            for weight, other in reversed(exchanged):
                _exchange(weight, other)
            self._applied = False

    # --- in checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return the EMA weights and their counts; not copied, in parts where the weights are."""
        counts = {"steps": self.num_steps, "pending_steps": self._pending_steps, "pending_images": self._pending_images}
        weights = {name: from_local_shard(weight, self._parameters[name]) for name, weight in self.weights.items()}
        return {"weights": weights, **counts}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = False) -> None:
        """Load EMA weights by exact name and shape, whatever `strict` says. Call `bind` first.

        For tensors without memory (on meta) only storage is allocated, to be filled through what `state_dict` returns.

        Raises:
            ValueError: names or shapes differ; lists tensors that are missing, left over or of another shape.
        """
        assert self._parameters, "bind the model first"
        saved = state["weights"]
        if saved or state["steps"]:  # not begun yet: nothing to compare
            if text := format_difference(_average_specs(self._parameters), tensor_specs(saved)):
                raise ValueError(f"ema: the saved EMA weights do not fit the model: {text}.")
            self.weights = {name: self._empty(p) for name, p in self._parameters.items()}
            for name, p in self._parameters.items():
                if not saved[name].is_meta:
                    self.weights[name].copy_(shard_like(saved[name], p))
        self.num_steps = state["steps"]
        self._pending_steps, self._pending_images = state["pending_steps"], state["pending_images"]


@torch.no_grad()
def _exchange(tensor: Tensor, other: Tensor) -> None:
    """Swap the contents of two tensors, on any devices; `tensor` is restored if that fails midway."""
    before = tensor.clone()
    try:
        tensor.copy_(other)
        other.copy_(before)
    except BaseException:
        tensor.copy_(before)
        raise


def step_will_be_skipped(state: State) -> bool:
    """True if the gradient scaler has found an infinity in this batch's gradients; it has already unscaled them.

    The scaler is asked because a hook on the optimizer's step is called even if a fused optimizer skips the step. Only
    fp16 has a scaler; reading its answer waits for the device.
    """
    if state.scaler is None or not state.scaler.is_enabled():
        return False
    infinities = (state.scaler._found_inf_per_device(optimizer) for optimizer in state.optimizers)
    return any(tensor.item() > 0.0 for per_device in infinities for tensor in per_device.values())
