"""Names, shapes and digests of tensors. Stored tensors are matched by name, never by position.

It also recognizes torch's out-of-memory errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor, nn

from common.value_types import join_first

Built = TypeVar("Built")

# Besides torch.OutOfMemoryError: of the CPU's allocator, CUDA, and a library's workspace. All are plain RuntimeErrors.
OUT_OF_MEMORY_MESSAGES = ("DefaultCPUAllocator: can't allocate", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def canonical_name(name: str) -> str:
    """Return a tensor's name without the parts that DDP, torch.compile, FSDP and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def build_on_meta(build: Callable[[], Built]) -> Built:
    """Build modules on the meta device: with names and shapes, without memory."""
    import torch._dynamo  # diffusers imports it, and its first import fails under another default device

    with torch.device("meta"):
        return build()


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU without the host waiting for queued work, which it does unless the memory is pinned."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> parameter, for all trained floating-point parameters."""
    named = ((canonical_name(name), parameter) for name, parameter in model.named_parameters())
    return {name: p for name, p in named if p.requires_grad and p.is_floating_point()}


def iterate_tensors(content: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, Mapping | list | tuple):
        for value in content.values() if isinstance(content, Mapping) else content:
            yield from iterate_tensors(value)


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> type and shape as text, e.g. "float32 (320, 4, 3, 3)"."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for name, tensor in tensors.items()
    }


def fingerprint(module: nn.Module) -> str:
    """Return 32 hex digits (xxh3, 128 bits) over the names, types, shapes and bytes of a module's weights.

    If the weights are sharded, all ranks call it.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(module.state_dict().items()):
        tensor = gather_tensor(tensor)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def format_difference(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Describe how two tables name -> spec differ, with three names of each kind; empty if they agree."""
    missing = [name for name in expected if name not in actual]
    extra = [name for name in actual if name not in expected]
    changed = [f"{n} is {actual[n]}, not {expected[n]}" for n in expected if n in actual and actual[n] != expected[n]]
    kinds = (("missing", missing), ("left over", extra), ("of another form", changed))
    return "; ".join(f"{len(names)} {kind} ({join_first(names, 3)})" for kind, names in kinds if names)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch on a GPU, CUDA and its libraries, or torch's allocator on a CPU ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY_MESSAGES)


# --- sharded tensors, of which each rank holds one shard ---
#
# A tensor is split along its first dimension over the ranks of a mesh, as evenly as can be; a rank's part may be empty.
# All functions take plain tensors too, whose only part is the whole.


def is_sharded_tensor(tensor: Tensor) -> bool:
    """Return whether this rank holds only a shard of the tensor."""
    return hasattr(tensor, "to_local")


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard, without a copy."""
    local: Any = tensor
    return local.to_local() if is_sharded_tensor(tensor) else tensor


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on every rank. All ranks of its mesh call it."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded_tensor(tensor) else tensor


def from_local_shard(local: Tensor, like: Tensor) -> Tensor:
    """Return a tensor sharded as `like`, of which `local` is this rank's shard; nothing is copied or sent."""
    if not is_sharded_tensor(like):
        return local
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    shape: dict[str, Any] = dict(shape=sharded.shape, stride=sharded.stride())
    return DTensor.from_local(local, sharded.device_mesh, sharded.placements, run_check=False, **shape)


@torch.no_grad()
def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return the shard of a whole tensor that matches this rank's shard of `like`; a view. `whole`: on any device."""
    if not is_sharded_tensor(like):
        return whole
    sharded: Any = like
    sizes = [size for size, of in zip(sharded.device_mesh.shape, sharded.placements, strict=True) if of.is_shard(0)]
    length = -(-len(whole) // math.prod(sizes))  # as torch.chunk
    start = min(shard_index(like) * length, len(whole))
    return whole[start : start + length]


def shard_index(tensor: Tensor) -> int:
    """Return the number of the shard that this rank holds, from 0; ranks that hold the same shard have the same number."""
    sharded: Any = tensor
    index = 0
    if is_sharded_tensor(tensor):
        mesh = sharded.device_mesh
        for coordinate, size, placement in zip(mesh.get_coordinate(), mesh.shape, sharded.placements, strict=True):
            index = index * size + coordinate if placement.is_shard() else index
    return index
