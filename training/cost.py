"""The cost of a model's training step: memory by kind, FLOPs, and whether it fits a device.

`measure_cost` traces one training step of the real model with fake tensors. It takes no memory and computes nothing, and
the numbers come from the model itself, not from a table. training/kept_cost.py keeps them from one start to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch
from composer.utils import dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cli.limits import ImageSize
from cli.private_api import require_private_api
from model import AUTOCAST_DTYPES, LatentDiffusion, build_model, zero_states
from training import adapter, speed
from weights.tensors import on_meta
from zoo import load_family
from zoo.encoders import RANDOM
from zoo.lora import LoraConfig
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig
from zoo.spec import Column

if TYPE_CHECKING:
    from training.run_config import RunConfig

# All float32; AdamW has two moments.
BYTES_PER_TRAINED_PARAMETER = {"weights": 4, "gradients": 4, "optimizer moments": 8}
# CUDA's autocast keeps outputs of normalisations in float32, the CPU's does not: 1.14 against 0.88 GiB per image for the SD2
# UNet at 512 px. A compiled network recomputes them in the backward pass: 0.83.
CUDA_AUTOCAST_FACTOR = 1.3
BYTES_PER_PARAMETER_OF_EMA = 4
BYTES_PER_PARAMETER_OF_DDP = 4  # its gradient buckets; Composer 0.32.1 does not let gradients live in them
NOT_SHARDED = "Sharding the weights over devices is not part of this version"
USABLE_FRACTION = 0.95  # the rest goes to fragmentation and library workspaces

require_private_api("torch._subclasses.fake_tensor", "FakeTensorMode", why="a step is traced without being computed")
require_private_api(torch.UntypedStorage, "_cdata", why="tensors that share a storage are counted once")


@dataclass(frozen=True)
class Cost:
    """The cost of one training step.

    flops_per_image: of the device: forward and backward of the denoiser, forward of the encoders that the stage needs.
    activation_gib_per_image: saved for the backward pass, per image of a microbatch.
    activation_gib_once: saved for the backward pass, independent of the microbatch size (weights cast by autocast).
    frozen_gib: of the frozen encoders on the device; frozen_host_gib: of those that stay in the machine's memory.
    base_gib: of the denoiser that an adapter is trained on.
    """

    trained_parameters: int
    frozen_parameters: int
    flops_per_image: float
    activation_gib_per_image: float
    activation_gib_once: float
    frozen_gib: float
    frozen_host_gib: float = 0.0
    base_gib: float = 0.0

    def memory_gib(self, microbatch: int, *, ema: bool) -> float:
        """Return the memory that one device needs, GiB; `ema`: with EMA weights on it."""
        return sum(self.memory_by_kind(microbatch, ema=ema).values())

    def memory_by_kind(self, microbatch: int, *, ema: bool) -> dict[str, float]:
        """Return the parts of `memory_gib`: kind -> GiB on one device, 0 if there is none of a kind."""
        bytes_each = {
            **BYTES_PER_TRAINED_PARAMETER,
            "EMA": BYTES_PER_PARAMETER_OF_EMA if ema else 0,
            "DDP buckets": BYTES_PER_PARAMETER_OF_DDP if dist.get_world_size() > 1 else 0,
        }
        return {
            **{kind: self.trained_parameters * num_bytes / 2**30 for kind, num_bytes in bytes_each.items()},
            "frozen base": self.base_gib,
            "frozen encoders": self.frozen_gib,
            "cast weights": self.activation_gib_once,
            "activations": microbatch * self.activation_gib_per_image,
        }

    def checkpoint_gib(self, *, ema: bool) -> float:
        """Return the size of a full checkpoint, GiB: weights, two moments, EMA weights."""
        return self.trained_parameters * 4 * (4 if ema else 3) / 2**30

    def snapshot_gib(self, *, ema: bool) -> float:
        """Return the size of a snapshot, GiB: weights, EMA weights."""
        return self.trained_parameters * 4 * (2 if ema else 1) / 2**30


def measure_cost(
    config: ModelConfig,
    objective: ObjectiveConfig,
    *,
    stage: str,
    stored_text: bool = False,
    has_encoders: bool = True,
    size: ImageSize,
    precision: str,
    is_compiled: bool = False,
    gradient_checkpointing: float = 0.0,
    lora: tuple[int, Sequence[str]] | None = None,
) -> Cost:
    """Trace a training step with one and with two images; takes about 5 s for SD2 at 512 px.

    The FLOPs are the model's own. Recomputation in checkpointed blocks is not counted, nor are encoders on another device.

    Args:
        stage, stored_text: what a batch has, see zoo.spec.Family.columns.
        has_encoders: False: batches have all that the encoders make, and none is built.
        lora: rank and targets of an adapter; None: the denoiser itself is trained.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = replace(config, weights=RANDOM)
    empty = None if has_encoders else zero_states(load_family(config.family, config.preset, config.variant), size)
    ways: dict[str, Any] = dict(size=size, normalize="symmetric", seed=0, empty_states=empty)
    model = on_meta(lambda: build_model(config, objective, **ways))
    columns = model.family.columns(stage, size, stored_text=stored_text)
    if lora is not None:
        resolved = LoraConfig(lora[0]).resolved(lora[1])
        on_meta(lambda: adapter.add(model, resolved, base=None, seed=0, precision=precision))
    compute = AUTOCAST_DTYPES.get(precision, torch.float32)
    model.encoders.to(torch.device("meta"), compute)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in (model.denoiser, *model.encoders.modules.values()):
            module.to_empty(device="cpu")
        model.compute_on(torch.device("cpu"), precision)
        model.empty_condition()  # encoded once in a run, so it is no part of a step
        is_apart = config.frozen_device == "cpu" and torch.cuda.is_available()
        flops = _flops(model, columns, with_encoders=not is_apart)
        speed.checkpoint_blocks(model.denoiser, gradient_checkpointing)
        one, two = (_saved_gib(model, columns, num_images) for num_images in (1, 2))
    is_cuda_autocast = torch.cuda.is_available() and precision in AUTOCAST_DTYPES
    factor = CUDA_AUTOCAST_FACTOR if is_cuda_autocast and not is_compiled else 1.0
    base = [p for p in model.denoiser.parameters() if not p.requires_grad]  # none without an adapter
    frozen = sum(_num_parameters(module) for module in model.encoders.modules.values())
    frozen_gib = model.encoders.num_bytes / 2**30
    return Cost(
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        frozen_parameters=frozen + sum(p.numel() for p in base),
        flops_per_image=flops,
        activation_gib_per_image=(two - one) * factor,
        activation_gib_once=max(0.0, 2 * one - two),
        frozen_gib=0.0 if is_apart else frozen_gib,
        frozen_host_gib=frozen_gib if is_apart else 0.0,
        base_gib=sum(p.numel() * p.element_size() for p in base) / 2**30,
    )


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _batch(model: LatentDiffusion, columns: dict[str, Column], num_images: int) -> dict[str, Tensor]:
    batch = {name: torch.zeros(num_images, *column.shape, dtype=column.dtype) for name, column in columns.items()}
    batch |= {name: torch.zeros(num_images, *model.latent_shape) for name in ("posterior_noise", "noise")}
    batch["times"] = model.objective.times_at(torch.zeros(num_images, dtype=torch.int64))
    batch["caption_dropped"] = torch.zeros(num_images, dtype=torch.bool)
    return batch


def _step(model: LatentDiffusion, columns: dict[str, Column], num_images: int) -> Tensor:
    batch = _batch(model, columns, num_images)
    return model.loss(model(batch), batch)


def _saved_gib(model: LatentDiffusion, columns: dict[str, Column], num_images: int) -> float:
    """GiB of the distinct storages that autograd saves for the backward pass, without parameters."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = _step(model, columns, num_images)
    del loss
    return sum(storage.nbytes() for key, storage in kept.items() if key not in parameters) / 2**30


def _flops(model: LatentDiffusion, columns: dict[str, Column], *, with_encoders: bool) -> float:
    """Count the FLOPs of one image's step. Attention is plain, so that the counter knows its matrix products everywhere."""
    counter, of_encoders = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH):
        with counter:
            _step(model, columns, 1).backward()
        if not with_encoders:
            with of_encoders:
                model.encode(_batch(model, columns, 1))
    return float(counter.get_total_flops() - of_encoders.get_total_flops())


def available_gib() -> tuple[float, str]:
    """Return the memory available to this process, GiB, and its name: the GPU's, or what is free on the machine."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(dist.get_local_rank())  # this rank's own; opens no context on GPU 0
        return gpu.total_memory / 2**30, f"this GPU ({gpu.name})"
    return psutil.virtual_memory().available / 2**30, "this machine (free now)"


def room_of_a_rank(ranks_on_device: int) -> str:
    """Describe the available memory, GiB, and how much of it each of the processes that share it can use."""
    available, place = available_gib()
    usable = f"{usable_gib(ranks_on_device):.1f} can be planned with"
    each = f" for each of {ranks_on_device} processes" if ranks_on_device > 1 else ""
    more = f"; a GPU keeps {CUDA_AUTOCAST_FACTOR} times a CPU's activations in bf16 and fp16"
    return f"{place} has {available:.1f}, of which {usable}{each}{'' if torch.cuda.is_available() else more}"


def usable_gib(ranks_on_device: int) -> float:
    """Return the memory that each of the processes that share a device can use, GiB."""
    return USABLE_FRACTION * available_gib()[0] / ranks_on_device


def memory_problem(
    cost: Cost, microbatch: int, ranks_on_device: int, *, ema: bool, savings: Sequence[str] = ()
) -> str | None:
    """Return the message that a run does not fit and what would, or None if it fits.

    Args:
        microbatch: images per device and pass.
        ranks_on_device: processes that share the memory: all of this machine's on a CPU, one on a GPU.
        ema: the EMA weights are on the device.
        savings: keys that would lower the need, e.g. gradient_checkpointing=1.
    """
    available, place = available_gib()
    usable = usable_gib(ranks_on_device)
    need = cost.memory_gib(microbatch, ema=ema)
    if need <= usable:
        return None
    share = f", {usable:.1f} GiB of it for each of {ranks_on_device} processes" if ranks_on_device > 1 else ""
    fixed = cost.memory_gib(0, ema=ema)
    fits = int((usable - fixed) / cost.activation_gib_per_image)
    ways = ", ".join([*savings, "a smaller image_size", "model.preset=tiny", "or a larger device"])
    if fits >= 1:
        ways = f"Ways out: device_train_microbatch_size={fits} or less, {ways}"
    else:
        one = cost.memory_gib(1, ema=ema)
        least = f"one image a pass takes {ranks_on_device * one / USABLE_FRACTION:.1f} GiB"
        ways = f"No microbatch fits: {least}. {NOT_SHARDED}. Ways out: {ways}"
    return (
        f"{microbatch} images a pass need about {need:.1f} GiB ({fixed:.1f} for weights, gradients, optimizer, "
        f"encoders and cast weights, {cost.activation_gib_per_image:.2f} an image); {place} has {available:.1f}{share}. "
        f"{ways}."
    )


def host_memory_problem(cost: Cost, ranks: int) -> str | None:
    """Return the message that the encoders do not fit into the machine's memory, of which each rank holds them, or None."""
    need, available = ranks * cost.frozen_host_gib, psutil.virtual_memory().available / 2**30
    if need <= USABLE_FRACTION * available:
        return None
    given = f"cpu, and the frozen encoders of {ranks} process{'es' * (ranks > 1)} need {need:.1f} GiB there"
    return f"{given}; this machine has {available:.1f} free. Use device, or start fewer processes on it."


def has_average_on_device(config: RunConfig) -> bool:
    """True if EMA weights take the device's memory."""
    return config.ema.enabled and (config.ema.device == "model" or not torch.cuda.is_available())
