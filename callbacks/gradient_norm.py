"""The norm of all gradients, with optional clipping, and its mean over a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from composer import Callback, Logger, State
from torch import Tensor

from weights.tensors import gather_tensor


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all gradients and, of DTensors, over all their parts; of bfloat16 ones in float32."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    else:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    return gather_tensor(norm)


class GradientNorm(Callback):
    """Computes the norm of all gradients in one foreach call, clips if configured, and keeps the norm on the device.

    `mean()` waits for the device, but is called only once per window. Checkpoints save an unfinished window's norms.
    """

    saved_as = "GradientNorm"  # in checkpoints

    def __init__(self, clip_norm: float | None):
        self.clip_norm = clip_norm
        self._sum: Tensor | None = None
        self._num = 0

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # Composer has already unscaled fp16 gradients, and the optimizer has not stepped yet.
        parameters = [p for p in state.model.parameters() if p.grad is not None]
        norm = total_norm([p.grad for p in parameters])
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm, foreach=True)
        self._sum = norm if self._sum is None else self._sum + norm
        self._num += 1

    def mean(self) -> float | None:
        """Return the mean norm before clipping since `restart`, or None; waits for the device."""
        return None if self._sum is None else float(self._sum) / self._num

    def restart(self) -> None:
        """Begin a window."""
        self._sum, self._num = None, 0

    def state_dict(self) -> dict[str, Any]:
        return {} if self._sum is None else {"sum": self._sum, "num": self._num}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sum, self._num = state["sum"].clone(), state["num"]
