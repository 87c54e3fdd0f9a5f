"""The cost of a model's training step: memory by kind, FLOPs, and whether it fits a device.

`measure_cost` traces one training step of the real model with fake tensors. It takes no memory and computes nothing, and
the numbers come from the model itself, not from a table.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from common import dist
from common.log import log
from common.private_api import require_private_api
from common.value_types import ImageSize
from ema import EMAConfig
from families import load_family
from families.encoders import RANDOM, ModelConfig
from families.lora import LoraConfig
from families.lora import add as add_adapter
from families.objectives import ObjectiveConfig
from families.spec import Column
from model import AUTOCAST_DTYPES, LatentDiffusion, build_model, cast_weights, weights_dtype, zero_states
from training import low_memory_adamw, muon
from training.speed import Float32Attention, checkpoint_blocks, denoiser_parts
from weights.tensors import build_on_meta, is_out_of_memory, iterate_tensors

# CUDA's autocast keeps outputs of normalizations in float32, the CPU's does not: 1.14 against 0.88 GiB per image for the SD2
# UNet at 512 px. A compiled network recomputes them in the backward pass: 0.83.
CUDA_AUTOCAST_FACTOR = 1.3
BYTES_PER_PARAMETER_OF_EMA = 4
STATES, EMA, BUCKETS, UPDATE = "optimizer states", "EMA", "DDP buckets", "update"
OF_STEP = (STATES, EMA, BUCKETS, UPDATE)
"""Kinds of memory that forward and backward pass do not take themselves."""
USABLE_FRACTION = 0.95  # the rest goes to fragmentation and library workspaces

require_private_api(
    "torch",
    "_subclasses.fake_tensor.FakeTensorMode",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    why="a step is traced without being computed, and its FLOPs are counted",
)


@dataclass(frozen=True)
class Cost:
    """The cost of one training step.

    flops_per_image: of the device: forward and backward of the denoiser, forward of the encoders that the dataset needs.
    forward_flops: of the denoiser's forward pass alone, per image: what recomputation adds.
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
    forward_flops: float = 0.0
    small_parameters: int = 0
    """Of tensors whose moments stay float32, whatever optimizer.states says."""
    uneven_parameters: int = 0
    """Of further tensors whose moments stay float32 with optimizer.states=8bit."""
    hidden_parameters: int = 0
    """Of the tensors that optimizer.name=muon updates without a second moment."""
    muon_flops: float = 0.0
    """A step of optimizer.name=muon takes these on each device, whatever the batch."""
    largest_stack: int = 0
    """Parameters that optimizer.name=muon updates at once, at most."""
    largest_block: int = 0
    """Parameters of the largest block."""
    num_blocks: int = 0
    beside_blocks: int = 0
    """Parameters in no block."""
    precision: str = "fp32"
    states: str = "fp32"
    """optimizer.states, of the run."""
    optimizer: str = "adamw"
    """optimizer.name, of the run."""
    sharding: str = "off"
    """off, full: over all ranks, or hybrid: over those of a machine."""
    num_ranks: int | None = None
    """Ranks of the run, and of a machine; None: as this process was started."""
    ranks_a_machine: int | None = None

    def memory_gib(self, microbatch: int, *, ema: bool) -> float:
        """Return the memory that one device needs, GiB; `ema`: with EMA weights on it."""
        return sum(self.memory_by_kind(microbatch, ema=ema).values())

    def memory_by_kind(self, microbatch: int, *, ema: bool) -> dict[str, float]:
        """Return the parts of `memory_gib`: kind -> GiB on one device, 0 if there is none of a kind.

        DDP keeps the gradients in its buckets once more: Composer 0.32.1 does not let gradients live in them. Sharding
        divides what is kept for each parameter by the ranks. A pass gathers the parameters of a block and of the one after
        it, in the precision of the step, and has the whole gradient of one; what is in no block stays gathered. The cast
        weights are those gathered ones then.
        """
        num, parts, is_sharded = self.trained_parameters, self.parts, self.sharding != "off"
        wide = weights_dtype(self.precision).itemsize
        compute = AUTOCAST_DTYPES.get(self.precision, torch.float32).itemsize
        num_bytes = {
            "weights": wide * num / parts,
            "gradients": wide * num / parts,
            STATES: self.bytes_of_states / parts,
            EMA: BYTES_PER_PARAMETER_OF_EMA * num / parts if ema else 0,
            BUCKETS: wide * num if self.ranks > 1 and not is_sharded else 0,
            "gathered blocks": compute * (3 * self.largest_block + 2 * self.beside_blocks) if is_sharded else 0,
            UPDATE: self._bytes_of_update,
        }
        return {
            **{kind: of_kind / 2**30 for kind, of_kind in num_bytes.items()},
            "frozen base": self.base_gib,
            "frozen encoders": self.frozen_gib,
            "cast weights": 0.0 if is_sharded else self.activation_gib_once,
            "activations": microbatch * self.activation_gib_per_image,
        }

    @property
    def can_be_shared(self) -> bool:
        """False for moments in 8 bits and for an adapter: training.sharding refuses them."""
        return self.states != "8bit" and not self.base_gib

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.num_ranks or dist.get_world_size()

    @property
    def parts(self) -> int:
        """Number of ranks over which weights, gradients, states and EMA weights are divided."""
        of_machine = min(self.ranks, self.ranks_a_machine or dist.get_local_world_size())
        return {"off": 1, "hybrid": of_machine, "full": self.ranks}[self.sharding]

    @property
    def bytes_of_states(self) -> float:
        """Bytes of all moments, over all ranks that they are divided over."""
        wide = self.small_parameters + (self.uneven_parameters if self.states == "8bit" else 0)
        each = low_memory_adamw.BYTES_OF_STATES
        if self.optimizer == "muon":
            others = self.trained_parameters - self.hidden_parameters
            return muon.BYTES_OF_MOMENTUM * self.hidden_parameters + each["fp32"] * others
        return each["fp32"] * wide + each[self.states] * (self.trained_parameters - wide)

    @property
    def _bytes_of_update(self) -> float:
        """Bytes that an optimizer's step takes in addition to the states; AdamW takes next to none."""
        return muon.BYTES_OF_UPDATE * self.largest_stack if self.optimizer == "muon" else 0

    def checkpoint_gib(self, *, ema: bool) -> float:
        """Return the size of a full checkpoint, GiB: weights, two moments, EMA weights."""
        return self.snapshot_gib(ema=ema) + self.bytes_of_states / 2**30

    def snapshot_gib(self, *, ema: bool) -> float:
        """Return the size of a snapshot, GiB: weights, EMA weights."""
        each = weights_dtype(self.precision).itemsize + (BYTES_PER_PARAMETER_OF_EMA if ema else 0)
        return self.trained_parameters * each / 2**30


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
    float32_attention: bool = False,
    lora: tuple[int, Sequence[str]] | None = None,
) -> Cost:
    """Trace a training step with one and with two images; takes about 5 s for SD2 at 512 px.

    The FLOPs are the model's own, and attention's for all gradients of its inputs, also where an adapter needs fewer.
    Recomputation in checkpointed blocks is not counted, nor are encoders on another device.

    Args:
        stage, stored_text: what a batch has, see families.spec.Family.columns.
        has_encoders: False: batches have all that the encoders make, and none is built.
        float32_attention: see training.speed.attends_in_float32.
        lora: rank and targets of an adapter; None: the denoiser itself is trained.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    empty = None if has_encoders else zero_states(load_family(config.family, config.preset, config.variant), size)
    model = build_on_meta(lambda: _build_in_precision(config, objective, size, empty, precision, lora))
    columns = model.family.columns(stage, size, stored_text=stored_text)
    attention = Float32Attention() if float32_attention else contextlib.nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), attention:
        for module in (model.denoiser, *model.encoders.modules.values()):
            module.to_empty(device="cpu")
        model.set_compute_device(torch.device("cpu"), precision)
        model.empty_condition()  # encoded once in a run, so it is no part of a step
        is_apart = config.frozen_device == "cpu" and torch.cuda.is_available()
        flops, one = _trace_one_image(model, columns, with_encoders=not is_apart)
        if checkpoint_blocks(model.denoiser, gradient_checkpointing):
            one = _saved_gib(model, columns, 1)
        two = _saved_gib(model, columns, 2)
    is_cuda_autocast = torch.cuda.is_available() and precision in AUTOCAST_DTYPES
    factor = CUDA_AUTOCAST_FACTOR if is_cuda_autocast and not is_compiled else 1.0
    base = [p for p in model.denoiser.parameters() if not p.requires_grad]  # none without an adapter
    frozen = sum(_num_parameters(module) for module in model.encoders.modules.values())
    frozen_gib = model.encoders.num_bytes / 2**30
    return Cost(
        **_sizes(model.denoiser),
        frozen_parameters=frozen + sum(p.numel() for p in base),
        **flops,
        activation_gib_per_image=(two - one) * factor,
        activation_gib_once=max(0.0, 2 * one - two),
        frozen_gib=0.0 if is_apart else frozen_gib,
        frozen_host_gib=frozen_gib if is_apart else 0.0,
        precision=precision,
        base_gib=sum(p.numel() * p.element_size() for p in base) / 2**30,
    )


def _build_in_precision(
    config: ModelConfig,
    objective: ObjectiveConfig,
    size: ImageSize,
    empty: Mapping[str, Tensor] | None,
    precision: str,
    lora: tuple[int, Sequence[str]] | None,
) -> LatentDiffusion:
    """Return the model with its adapter on the meta device, in the types of a run in this precision."""
    options: dict[str, Any] = dict(size=size, normalize="symmetric", seed=0, empty_states=empty)
    model, dtype = build_model(replace(config, weights=RANDOM), objective, **options), AUTOCAST_DTYPES.get(precision)
    if lora is not None:
        add_adapter(model, LoraConfig(lora[0]).resolved(lora[1]), base=None, seed=0, base_dtype=dtype)
    model.encoders.to(torch.device("meta"), dtype or torch.float32)
    cast_weights(model.denoiser, precision)
    return model


def _sizes(denoiser: nn.Module) -> dict[str, Any]:
    """Return what a Cost has of the sizes of a denoiser's trained parameters."""
    tensors = [parameter.numel() for parameter in denoiser.parameters() if parameter.requires_grad]
    hidden = [weight for weight in muon.hidden_weights(denoiser) if weight.requires_grad]
    blocks = [_num_parameters(block) for block in denoiser_parts(denoiser, "blocks")]
    large = [num for num in tensors if num >= low_memory_adamw.SMALL]
    return {
        "trained_parameters": sum(tensors),
        "small_parameters": sum(tensors) - sum(large),
        "uneven_parameters": sum(num for num in large if num % low_memory_adamw.BLOCK),
        "hidden_parameters": sum(weight.numel() for weight in hidden),
        "muon_flops": muon.step_flops(hidden),
        "largest_stack": muon.largest_stack(hidden),
        "largest_block": max(blocks, default=0),
        "num_blocks": len(blocks),
        "beside_blocks": _num_parameters(denoiser) - sum(blocks),
    }


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


def _saved_gib(
    model: LatentDiffusion, columns: dict[str, Column], num_images: int, *, with_backward: bool = False
) -> float:
    """GiB of the distinct storages that a step keeps for the backward pass, without parameters.

    A block that is computed twice keeps its inputs. What the largest of them saves is there too, in its turn.
    """
    parameters = {StorageWeakRef(p.untyped_storage()).cdata for p in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}
    again = [0]

    def look(block: nn.Module, args: tuple[Any, ...], more: dict[str, Any], output: Any) -> None:
        inputs: dict[int, torch.UntypedStorage] = {}
        for tensor in iterate_tensors([args, more]):
            _keep(inputs, tensor)
        seen.update(inputs)
        own: dict[int, torch.UntypedStorage] = {}
        with torch.autograd.graph.saved_tensors_hooks(partial(_keep, own), lambda tensor: tensor):
            of_before: Any = type(block).__mro__[1]  # the class that it had
            of_before.forward(block, *args, **more)
        again.append(sum(storage.nbytes() for key, storage in own.items() if key not in parameters | inputs.keys()))

    blocks = [block for block in model.denoiser.modules() if type(block).__name__.startswith("CheckpointedBlock")]
    hooks = [block.register_forward_hook(look, with_kwargs=True) for block in blocks]
    with torch.autograd.graph.saved_tensors_hooks(partial(_keep, seen), lambda tensor: tensor):
        loss = _step(model, columns, num_images)
    if with_backward:
        loss.backward()
    del loss
    for hook in hooks:
        hook.remove()
    num_bytes = sum(storage.nbytes() for key, storage in seen.items() if key not in parameters)
    return (num_bytes + max(again)) / 2**30


def _keep(storages: dict[int, torch.UntypedStorage], tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    storages[StorageWeakRef(storage).cdata] = storage
    return tensor


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention's two matrix products, from shapes (B, heads, L, D)."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


# torch's counter does not know a CPU's fused attention. What its backward pass computes again is not counted.
FLOPS_OF: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda _, *shapes, **more: 2 * _attention_flops(*shapes, **more)
    ),
}


def _trace_one_image(
    model: LatentDiffusion, columns: dict[str, Column], *, with_encoders: bool
) -> tuple[dict[str, Any], float]:
    """Trace one image's step; return its FLOPs and the denoiser's forward pass's, by a Cost's names, and _saved_gib."""
    counter, of_encoders = (FlopCounterMode(display=False, custom_mapping=FLOPS_OF) for _ in range(2))
    ends: list[float] = []  # before and after the denoiser's forward pass
    hooks = [
        model.denoiser.register_forward_pre_hook(lambda *_: ends.append(counter.get_total_flops())),
        model.denoiser.register_forward_hook(lambda *_: ends.append(counter.get_total_flops())),
    ]
    with counter:
        saved_gib = _saved_gib(model, columns, 1, with_backward=True)
    if not with_encoders:
        with of_encoders:
            model.encode(_batch(model, columns, 1))
    for hook in hooks:
        hook.remove()
    in_all = float(counter.get_total_flops() - of_encoders.get_total_flops())
    return {"flops_per_image": in_all, "forward_flops": float(ends[1] - ends[0])}, saved_gib


def available_gib() -> tuple[float, str]:
    """Return the memory available to this process, GiB, and its name: the GPU's, or what is free on the machine."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(dist.get_local_rank())  # this rank's own; opens no context on GPU 0
        return gpu.total_memory / 2**30, f"this GPU ({gpu.name})"
    return psutil.virtual_memory().available / 2**30, "this machine (free now)"


def room_of_a_rank(ranks_on_device: int) -> str:
    """Describe the available memory, GiB, and how much of it each of the processes that share it can use."""
    available, place = available_gib()
    usable = f"of which {usable_gib(ranks_on_device):.1f} can be used"
    each = f" for each of {ranks_on_device} processes" if ranks_on_device > 1 else ""
    more = f"; a GPU keeps {CUDA_AUTOCAST_FACTOR} times a CPU's activations in bf16 and fp16"
    return f"{place} has {available:.1f}, {usable}{each}{'' if torch.cuda.is_available() else more}"


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
    remedies = [f"device_train_microbatch_size={fits} or less"] if fits >= 1 else []
    remedies += [*savings, "a smaller image_size", "model.preset=tiny", "a larger device"]
    remedies += ["several with sharding=full"] if cost.sharding == "off" and cost.can_be_shared else []
    return (
        f"{microbatch} images a pass need about {need:.1f} GiB ({fixed:.1f} for weights, gradients, optimizer, "
        f"encoders and cast weights, {cost.activation_gib_per_image:.2f} an image); {place} has {available:.1f}{share}. "
        f"Try: {', '.join(remedies)}."
    )


def host_memory_problem(cost: Cost, ranks: int) -> str | None:
    """Return the message that the encoders do not fit into the machine's memory, of which each rank holds them, or None."""
    need, available = ranks * cost.frozen_host_gib, psutil.virtual_memory().available / 2**30
    if need <= USABLE_FRACTION * available:
        return None
    need_text = f"cpu, and the frozen encoders of {ranks} process{'es' * (ranks > 1)} need {need:.1f} GiB there"
    return f"{need_text}; this machine has {available:.1f} free. Use device, or start fewer processes on it."


def has_average_on_device(config: EMAConfig) -> bool:
    """Return whether EMA weights take the device's memory."""
    return config.enabled and (config.device == "model" or not torch.cuda.is_available())


# --- microbatch size ---
#
# Composer's own `auto` is not used: it stays active while speed is measured, synchronizes in every pass, and fails with
# FSDP from torch 2.8 on.

AUTO = "auto"
LAST_REMEDIES = "a smaller image_size, model.preset=tiny, a larger GPU, or several with sharding=full"
TRIED_ABOVE = 1.5  # times the usable memory: the estimate does not know what compilation saves


class OutOfMemory(RuntimeError):
    """A run was out of memory; the message says what to try."""


def sizes_of(device_batch: int) -> list[int]:
    """Return the divisors of a device batch, the largest first: all passes of a run have the same shape."""
    return [size for size in range(device_batch, 0, -1) if device_batch % size == 0]


def estimated(cost: Cost, device_batch: int, ranks_on_device: int, *, ema: bool, factor: float = 1.0) -> int:
    """Return the largest microbatch that fits by the traced estimate, at least 1.

    Args:
        ranks_on_device: processes that share the memory.
        ema: the EMA weights are on the device.
        factor: multiplies the usable memory.
    """
    room = factor * usable_gib(ranks_on_device)
    return next((size for size in sizes_of(device_batch) if cost.memory_gib(size, ema=ema) <= room), 1)


def find(
    model: LatentDiffusion,
    columns: Mapping[str, Column],
    cost: Cost,
    device_batch: int,
    ranks_on_device: int,
    *,
    ema: bool,
    savings: Sequence[str] = (),
) -> int:
    """Return the largest microbatch that fits on every rank, with the model as it will be trained. All ranks call it.

    On a GPU, sizes are tried downwards from the estimate for TRIED_ABOVE times the usable memory: two forward and backward
    passes, while as many bytes are allocated as optimizer, EMA weights and DDP will take. On a CPU, where too much memory
    kills the process, the estimate is used.

    Raises:
        ValueError: not even one image fits.
    """
    size = _least(estimated(cost, device_batch, ranks_on_device, ema=ema), model.device)
    if model.device.type == "cuda":
        largest = _least(estimated(cost, device_batch, ranks_on_device, ema=ema, factor=TRIED_ABOVE), model.device)
        sizes = [size for size in sizes_of(device_batch) if size <= largest]
        kinds = cost.memory_by_kind(0, ema=ema)
        reserved_gib = sum(kinds[kind] for kind in OF_STEP)
        size = next((size for size in sizes if _least(int(_fits(model, columns, size, reserved_gib)), model.device)), 0)
    if not size:
        remedies = [*savings, LAST_REMEDIES]
        raise ValueError(
            f"device_train_microbatch_size: auto, but not one image fits this GPU. Try {', then '.join(remedies)}."
        )
    how = "tried" if model.device.type == "cuda" else "by estimate"
    text = f"auto is {size} of a device batch of {device_batch} ({how}); it stays so for this start"
    log.info(f"device_train_microbatch_size: {text}.")
    return size


def _least(number: int, device: torch.device) -> int:
    """Return the minimum over all ranks: free memory differs between nodes and, on a CPU, from moment to moment."""
    least = torch.tensor([number], device=device)
    dist.all_reduce(least, reduce_operation="MIN")
    return int(least.item())


def _fits(model: LatentDiffusion, columns: Mapping[str, Column], size: int, reserved_gib: float) -> bool:
    """Try two passes of this size with so much memory reserved; frees gradients and memory afterwards."""
    try:
        _two_passes(model, columns, size, int(reserved_gib * 2**30))
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def _two_passes(model: LatentDiffusion, columns: Mapping[str, Column], size: int, num_reserved_bytes: int) -> None:
    """Train without an optimizer step; tensors are freed on return."""
    device = model.device
    reserved = torch.empty(num_reserved_bytes, dtype=torch.uint8, device=device)
    batch = {name: torch.zeros(size, *c.shape, dtype=c.dtype, device=device) for name, c in columns.items()}
    batch = model.draw(batch, torch.Generator(device))
    model.train()
    for _ in range(2):  # the second one with the first one's gradients in memory
        with model.autocast():
            loss = model.loss(model(batch), batch)
        loss.backward()
    assert reserved.numel() == num_reserved_bytes  # keeps it allocated until here


# --- out of memory ---


@contextlib.contextmanager
def explained(microbatch: int, device_batch: int, *, savings: Sequence[str], last_checkpoint: Any) -> Iterator[None]:
    """Explain a failed allocation: the microbatch size, the device's memory, and what to try.

    Args:
        savings: keys that would lower the need, e.g. gradient_checkpointing=1.
        last_checkpoint: returns the newest whole checkpoint's path, or None.

    Raises:
        OutOfMemory: instead of torch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        smaller = next((size for size in sizes_of(device_batch) if size < microbatch), None)
        remedies = [f"device_train_microbatch_size={smaller}"] if smaller else []
        remedies += savings if smaller else [*savings, LAST_REMEDIES]
        checkpoint = last_checkpoint()
        onwards = f"resumes from {checkpoint}" if checkpoint else "starts over: there is no checkpoint yet"
        raise OutOfMemory(
            f"device_train_microbatch_size: out of memory with {microbatch} images a pass of a device batch of "
            f"{device_batch}{_held()}. Try {', then '.join(remedies)}; the same command with it {onwards}."
        ) from error


def _held() -> str:
    if not torch.cuda.is_available():
        return ""
    peak = torch.cuda.max_memory_allocated() / 2**30
    total = torch.cuda.get_device_properties(dist.get_local_rank()).total_memory / 2**30
    return f", at a peak of {peak:.1f} GiB of {total:.1f} on rank {dist.get_global_rank()}"
