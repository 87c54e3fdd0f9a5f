"""Tensors of which each rank holds a part: torch's DTensor, as FSDP2 makes parameters.

A tensor is split along its first dimension over the ranks of a mesh, as evenly as can be; a rank's part may be empty. All
functions take plain tensors too, whose only part is the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cli.private_api import require_private_api

require_private_api(
    "torch.distributed.tensor._utils",
    "compute_local_shape_and_global_offset",
    why="which part of a tensor a rank holds",
)


def is_part(tensor: Tensor) -> bool:
    """True where this rank holds a part of the tensor."""
    return hasattr(tensor, "to_local")


def part(tensor: Tensor) -> Tensor:
    """Return this rank's part, without a copy."""
    local: Any = tensor
    return local.to_local() if is_part(tensor) else tensor


def joined(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on every rank. All ranks of its mesh call it."""
    whole: Any = tensor
    return whole.full_tensor() if is_part(tensor) else tensor


def of_part(local: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of which this is the part that `like` has here; nothing is copied or sent."""
    if not is_part(like):
        return local
    from torch.distributed.tensor import DTensor

    of: Any = like
    ways: dict[str, Any] = dict(run_check=False, shape=of.shape, stride=of.stride())
    return DTensor.from_local(local, of.device_mesh, of.placements, **ways)


@torch.no_grad()
def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return that part of a whole tensor that `like` has here; a view. `whole`: of its shape, on any device."""
    if not is_part(like):
        return whole
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    of: Any = like
    shape, begin = compute_local_shape_and_global_offset(of.shape, of.device_mesh, of.placements)
    for side, (length, first) in enumerate(zip(shape, begin, strict=True)):
        whole = whole.narrow(side, min(first, whole.shape[side]), length)
    return whole


def number_of_part(tensor: Tensor) -> int:
    """Return the number of the part that this rank holds, from 0; ranks that hold the same part have the same."""
    of: Any = tensor
    number = 0
    if is_part(tensor):
        places = zip(of.device_mesh.get_coordinate(), of.device_mesh.shape, of.placements, strict=True)
        for place, size, placement in places:
            number = number * size + place if placement.is_shard() else number
    return number
