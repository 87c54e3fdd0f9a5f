"""Names, shapes and digests of tensors. Stored tensors are matched by name, never by position.

Also recognises torch's out-of-memory errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor, nn

from weights.parts import joined

Built = TypeVar("Built")

# Besides torch.OutOfMemoryError: from the CPU's allocator, CUDA, and a library's workspace. All are plain RuntimeErrors.
OF_MEMORY = ("DefaultCPUAllocator: can't allocate", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def canonical_name(name: str) -> str:
    """Return a tensor's name without the parts that DDP, torch.compile, FSDP and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def on_meta(build: Callable[[], Built]) -> Built:
    """Build modules on the meta device: with names and shapes, without memory."""
    import torch._dynamo

    with torch.device("meta"):
        return build()


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> parameter, for all trained floating-point parameters."""
    named = ((canonical_name(name), parameter) for name, parameter in model.named_parameters())
    return {name: p for name, p in named if p.requires_grad and p.is_floating_point()}


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> type and shape as text, e.g. "float32 (320, 4, 3, 3)"."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for name, tensor in tensors.items()
    }


def fingerprint(module: nn.Module) -> str:
    """Return 32 hex digits (xxh3, 128 bits) over the names, types, shapes and bytes of a module's weights.

    Where ranks have parts of them, all ranks call it.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(module.state_dict().items()):
        tensor = joined(tensor)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def difference(expected: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Describe how two tables name -> spec differ, with three names of each kind; empty if they agree."""

    def some(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    missing = [name for name in expected if name not in given]
    extra = [name for name in given if name not in expected]
    other = [f"{n} is {given[n]}, not {expected[n]}" for n in expected if n in given and given[n] != expected[n]]
    kinds = (("missing", missing), ("left over", extra), ("of another form", other))
    return "; ".join(f"{len(names)} {kind} ({some(names)})" for kind, names in kinds if names)


def is_out_of_memory(error: RuntimeError) -> bool:
    """True for out-of-memory errors of torch on a GPU, of CUDA and its libraries, and of torch's allocator on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OF_MEMORY)
