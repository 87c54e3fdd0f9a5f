"""Numerics of all scores: sums in float64, networks in one fixed precision, finite values only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from cli.private_api import require_private_api

Precision = Literal["fp32", "fp16"]
"""fp32: full, whatever the run's precision. fp16: under autocast, as in all validation of MLPerf's reference."""

require_private_api(Metric, "_apply", why="a metric's sums keep their type where the model around them is cast")


class ScoringNetwork:
    """A frozen network that scores images, and where it is computed.

    Attributes:
        name: of the network; contains `random` if its weights are random.
        fingerprint: of its weights: of the file, or of the tensors where they are random.
        num_features: of an image.
        precision: of the features; initially fp32.
    """

    def __init__(self, network: nn.Module, name: str, fingerprint: str, num_features: int):
        self.network: Any = network.eval().requires_grad_(False)
        self.name, self.fingerprint, self.num_features = name, fingerprint, num_features
        self.device = torch.device("cpu")
        self.precision: Precision = "fp32"

    def to(self, device: torch.device | str) -> Self:
        self.device = torch.device(device)
        self.network.to(self.device)
        return self

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return computing(self.device, self.precision)


class Extractor(ScoringNetwork):
    """The interface of FID's image network. The miniature has its own instead of Inception.

    Attributes:
        resize: how images are resized for it.
    """

    resize: str

    def __call__(self, images: Tensor) -> Tensor:  # (B, 3, H, W) in [0, 1] -> (B, D)
        raise NotImplementedError


class Float64Sums(Metric):
    """A metric whose states are sums. They keep their type when the module around them is cast.

    torchmetrics ignores `half()` and the like on a metric. It does not ignore `to(dtype)` on a module that contains one, nor
    its own `set_dtype`.
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
        what: the values' name in the message.
        ids: prompt ids, one per row; None: rows are named by their index in the batch.

    Raises:
        ValueError: a value is not finite; names the prompts.
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
    """Compute without gradients in full float32, or under fp16 autocast (on a CPU with torch's CPU list of float32 ops)."""
    with full_float32(device), torch.autocast(device.type, dtype=torch.float16, enabled=precision == "fp16"):
        yield


def _tf32_switches() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, value for float32) of every switch for TensorFloat-32 in this torch.

    From torch 2.9 on, `allow_tf32` is a view of `fp32_precision`. Writing it replaces "ieee" or "tf32" by "none", and
    reading it fails if matmul, conv and rnn have different values (aten/src/ATen/Context.cpp).
    """
    matmul = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn  # conv and rnn are set while torch is imported
    if not hasattr(matmul, "fp32_precision"):
        return [(matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    return [(owner, "fp32_precision", "ieee") for owner in (matmul, cudnn.conv, cudnn.rnn)]
