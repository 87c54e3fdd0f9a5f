"""Microbatch size: find the largest that fits, once before training; and explain an out-of-memory error.

Composer's own `auto` is not used: it stays active while speed is measured, synchronises in every pass, and fails with FSDP
from torch 2.8 on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from composer.utils import dist

from cli.log import log
from model import LatentDiffusion
from training.cost import OF_STEP, Cost, usable_gib
from weights.tensors import is_out_of_memory
from zoo.spec import Column

AUTO = "auto"
LAST_WAYS = "a smaller image_size, model.preset=tiny, a larger GPU, or several with sharding=full"
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
        beside_gib = sum(kinds[kind] for kind in OF_STEP)
        size = next((size for size in sizes if _least(int(_fits(model, columns, size, beside_gib)), model.device)), 0)
    if not size:
        ways = [*savings, LAST_WAYS]
        raise ValueError(
            f"device_train_microbatch_size: auto, but not one image fits this GPU. Try {', then '.join(ways)}."
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


def _fits(model: LatentDiffusion, columns: Mapping[str, Column], size: int, beside_gib: float) -> bool:
    """Try two passes with this size, beside so much; frees gradients and memory afterwards."""
    try:
        _two_passes(model, columns, size, int(beside_gib * 2**30))
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def _two_passes(model: LatentDiffusion, columns: Mapping[str, Column], size: int, num_bytes_beside: int) -> None:
    """Train without an optimizer step; tensors are freed on return."""
    device = model.device
    beside = torch.empty(num_bytes_beside, dtype=torch.uint8, device=device)
    batch = {name: torch.zeros(size, *c.shape, dtype=c.dtype, device=device) for name, c in columns.items()}
    batch = model.draw(batch, torch.Generator(device))
    model.train()
    for _ in range(2):  # the second one with the first one's gradients in memory
        with model.autocast():
            loss = model.loss(model(batch), batch)
        loss.backward()
    assert beside.numel() == num_bytes_beside  # keeps it allocated until here


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
        ways = [f"device_train_microbatch_size={smaller}"] if smaller else []
        ways += savings if smaller else [*savings, LAST_WAYS]
        checkpoint = last_checkpoint()
        onwards = f"resumes from {checkpoint}" if checkpoint else "begins anew: there is no checkpoint yet"
        raise OutOfMemory(
            f"device_train_microbatch_size: out of memory with {microbatch} images a pass of a device batch of "
            f"{device_batch}{_held()}. Try {', then '.join(ways)}; the same command with it {onwards}."
        ) from error


def _held() -> str:
    if not torch.cuda.is_available():
        return ""
    peak, total = (
        torch.cuda.max_memory_allocated() / 2**30,
        torch.cuda.get_device_properties(dist.get_local_rank()).total_memory / 2**30,
    )
    return f", at a peak of {peak:.1f} GiB of {total:.1f} on rank {dist.get_global_rank()}"
