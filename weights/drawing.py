"""Draw a network's first weights with all of a rank's cores: with one, FLUX.1's 11.9 billion take over a minute."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from common import dist
from common.private_api import require_private_api
from weights.tensors import iterate_tensors

require_private_api("torch.utils._python_dispatch", "TorchDispatchMode", why="other threads draw large tensors")

LARGE = 2**20  # numbers of a tensor that another thread fills
DRAWN = (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default)


class DrawnInThreads(TorchDispatchMode):
    """Within it, other threads fill large tensors with random numbers; an operator that takes such a tensor waits for that.

    Each has a generator of its own, whose seed the usual generator draws: the number of threads changes nothing. Small
    tensors are drawn as without it. Access that is not an operator, such as data_ptr or an existing NumPy view, does
    not wait.
    """

    def __enter__(self) -> DrawnInThreads:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(max(1, cores // dist.get_local_world_size()))
        self._begun: dict[int, Future[None]] = {}
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._pool.shutdown(cancel_futures=error[0] is not None)
        if error[0] is None:
            for future in self._begun.values():
                future.result()

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        for tensor in iterate_tensors([*args, options]):
            if (future := self._begun.pop(_address(tensor), None)) is not None:
                future.result()
        if operator not in DRAWN or options.get("generator") is not None or not _is_large(args[0]):
            return operator(*args, **options)
        seed = int(torch.randint(2**63 - 1, ()))
        self._begun[_address(args[0])] = self._pool.submit(_draw, operator, args, seed)
        return args[0]


def _draw(operator: Any, args: Sequence[Any], seed: int) -> None:
    with torch.no_grad():
        operator(*args, generator=torch.Generator().manual_seed(seed))


def _is_large(tensor: Tensor) -> bool:
    return _address(tensor) != 0 and tensor.numel() >= LARGE


def _address(tensor: Tensor) -> int:
    """Return where a plain tensor's numbers are in the host's memory; 0: they are not, or it is of another kind."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain and tensor.device.type == "cpu" else 0
