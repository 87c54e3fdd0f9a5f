"""What every score here keeps to: sums in float64, networks in one precision, and no number that is none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from cli.private_api import require_private_api

Precision = Literal["fp32", "fp16"]
"""fp32: full, whatever the run computes in. fp16: under autocast, as MLPerf's reference has its whole validation."""

require_private_api(Metric, "_apply", why="a metric's sums keep their type where the model around them is cast")


class Float64Sums(Metric):
    """A metric whose states are sums and stay in their own type, whoever casts the model around them.

    torchmetrics keeps `half()` and the like away from a metric, but not from one inside a module that is cast with
    `to(dtype)`, and not its own `set_dtype`.
    """

    full_state_update = False
    is_differentiable = False

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, exclude_state)


def require_finite(values: Tensor, what: str, ids: Sequence[int | str] | Tensor | None = None) -> None:
    """Check that a batch has no NaN and no infinity.

    Args:
        values: (B, ...)
        what: the values in words, for the message.
        ids: prompt ids, one a row; None: rows are named by their number in the batch.

    Raises:
        ValueError: naming the prompts.
    """
    assert ids is None or len(ids) == len(values), f"{len(ids)} ids for {len(values)} rows"
    finite = values.isfinite().flatten(1).all(dim=1) if values.ndim > 1 else values.isfinite()
    if finite.all():
        return
    rows = [row for row, is_finite in enumerate(finite.tolist()) if not is_finite]
    names = rows if ids is None else [int(ids[row]) if isinstance(ids, Tensor) else ids[row] for row in rows]
    some = ", ".join(map(str, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    where = "rows of the batch" if ids is None else "prompts"
    raise ValueError(
        f"{what}: NaN or infinite for {len(rows)} of {len(values)} images ({where} {some}). A score is of finite values "
        "only. Look at these images: a model that has diverged makes them."
    )


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute without gradients, autocast and TensorFloat-32, so that a score does not depend on a run's precision."""
    switches = _tf32_switches()
    kept = [getattr(owner, name) for owner, name, _ in switches]
    try:
        for owner, name, off in switches:
            setattr(owner, name, off)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for (owner, name, _), value in zip(switches, kept, strict=True):
            setattr(owner, name, value)


@contextlib.contextmanager
def computing(device: torch.device, precision: Precision) -> Iterator[None]:
    """Compute without gradients in full float32, or under fp16 autocast; on a CPU by its own list of what stays float32."""
    with full_float32(device), torch.autocast(device.type, dtype=torch.float16, enabled=precision == "fp16"):
        yield


def _tf32_switches() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, value for float32) of what allows TensorFloat-32 in this torch.

    From torch 2.9 on `allow_tf32` is a view of `fp32_precision`: it writes "none" where "ieee" or "tf32" may have stood, and
    cannot be read where matmul, conv and rnn were set apart (aten/src/ATen/Context.cpp).
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if not hasattr(matmul, "fp32_precision"):
        return [(matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    return [(owner, "fp32_precision", "ieee") for owner in (matmul, cudnn.conv, cudnn.rnn)]
