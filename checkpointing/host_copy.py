"""A copy of a run's state in host memory, from which a checkpoint is written while the run continues.

There is one copy, as large as the checkpoint, in memory that is kept for the next one. On a GPU it is page-locked where the
driver allows it: the device then copies at the full speed of its bus, alongside the step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from common.host_memory import read_host_bytes
from weights.tensors import iterate_tensors

ALIGNED = 64  # bytes, where a tensor begins
MAX_FRAC = 0.95  # of free memory that a copy may take


class HostCopy:
    """Host memory for one copy of a state, made when it is first asked for."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._locked: int | None = None  # its address, for the driver
        self._end = 0

    def has_room(self, content: Any) -> bool:
        """True if a copy of all tensors in nested containers fits into the memory that is free now."""
        need = sum(_aligned_bytes(tensor) for tensor in iterate_tensors(content))
        have = 0 if self._memory is None else len(self._memory)
        return need <= have or need <= MAX_FRAC * read_host_bytes()[1] + have

    def of(self, content: Any) -> tuple[Any, Callable[[], None]]:
        """Copy nested containers with all of their tensors; the copy before is overwritten.

        Returns:
            the copy, and what waits until the device has made it: it has to be called before the copy is read.
        """
        tensors = list(iterate_tensors(content))
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if on_gpu:
            torch.cuda.synchronize()  # copies to the CPU may still be in flight
        self._make(sum(map(_aligned_bytes, tensors)), on_gpu)
        self._end = 0
        copied = self._copied(content, {})
        if not on_gpu:
            return copied, lambda: None
        made = torch.cuda.Event()
        made.record()  # the step's later changes are queued after it, on the same stream
        return copied, made.synchronize

    def close(self) -> None:
        """Release the memory; no copy in it may be used afterwards."""
        if self._locked is not None:
            torch.cuda.cudart().cudaHostUnregister(self._locked)
        self._memory, self._locked = None, None

    def _make(self, num_bytes: int, on_gpu: bool) -> None:
        if self._memory is not None and len(self._memory) >= num_bytes:
            return
        self.close()
        # Shared with loader workers that are forked later: what is written here would be copied for them otherwise.
        self._memory = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE))
        if on_gpu:
            address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
            if int(torch.cuda.cudart().cudaHostRegister(address, len(self._memory), 0)) == 0:
                self._locked = address

    def _copied(self, value: Any, known: dict[Any, Tensor]) -> Any:
        """Return a copy. `known`: copies by what they are of, since one tensor may be there under several names."""
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if not value.numel() or key not in known:
                known[key] = self._copy_of(value)
            return known[key]
        if isinstance(value, Mapping):
            return {name: self._copied(item, known) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(item, known) for item in value)
        return value

    def _copy_of(self, tensor: Tensor) -> Tensor:
        num_bytes = tensor.nbytes
        if not num_bytes or not _is_plain(tensor):
            return tensor.detach().to("cpu", copy=True)
        assert self._memory is not None
        memory = torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=self._end)
        self._end += _aligned_bytes(tensor)
        like = torch.empty_like(tensor, device="meta")  # the strides that a copy has: channels last stay so
        copy = memory.view(tensor.dtype).as_strided(like.shape, like.stride())
        return copy.copy_(tensor.detach(), non_blocking=self._locked is not None)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def _aligned_bytes(tensor: Tensor) -> int:
    return tensor.nbytes + -tensor.nbytes % ALIGNED if _is_plain(tensor) else 0
