"""Muon: the matrices inside the network's blocks step along orthogonal matrices, everything else by AdamW.

For a weight W (A, B) with the gradient G and the momentum M, both float32, and mu = 0.95:

    M <- mu M + (1 - mu) G
    U  = mu M + (1 - mu) G                           Nesterov's momentum
    O  = orthogonalize(U)                            in float16; on a CPU in float32
    W <- (1 - lr decay) W - 0.2 lr sqrt(max(A, B)) O

Jordan et al. 2024 (kellerjordan.github.io/posts/muon). The factor 0.2 sqrt(max(A, B)) is Moonlight's (Liu et al. 2025,
arXiv:2502.16982, equation 4): a step is then as large as one of AdamW, so that both take the same rate and weight decay.

A convolution's kernel (A, I, h, w) is the matrix (A, I h w), as in Jordan's code: most weights of a UNet are kernels. First
and last layers, embeddings, norms and biases are AdamW's, as there: all outside the blocks, and in them what is not the
weight of a linear layer or a convolution.

torch.optim.Muon takes neither kernels nor AdamW's parameters, and on a sharded tensor each of its 15 products communicates.
On plain matrices this class makes the same steps, to the accuracy of torch's bfloat16 (tests/test_muon.py). Matrices of
one shape are multiplied at once. Sharded weights (FSDP2): the momentum is sharded like its weight; U is gathered once, in
bfloat16, and every rank orthogonalizes all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from training.low_memory_adamw import UPDATE, compute_loss
from training.speed import blocks_of
from weights.tensors import from_local_shard, gather_tensor, local_shard, shard_like

if TYPE_CHECKING:
    from training.optimizer import OptimizerConfig

MOMENTUM = 0.95
UPDATE_RMS = 0.2  # of AdamW's steps (Moonlight, section 2.2)
STEPS, COEFFICIENTS, EPS = 5, (3.4445, -4.7750, 2.0315), 1e-7  # Jordan's
MOST_STACKED = 2**24
"""Elements of the matrices that are multiplied at once; a larger matrix is alone."""
BYTES_OF_MOMENTUM = 4
BYTES_OF_UPDATE = 16
"""For each element of the largest stack, in a step: U in float32, and what `orthogonalize` has at once."""


def problems(config: OptimizerConfig, precision: str | None, *, has_adapter: bool) -> list[tuple[str, str]]:
    """(key, message) for keys that Muon does not go with."""
    messages: list[tuple[str, str]] = []
    if config.name != "muon":
        return messages
    adamw = "or set optimizer.name=adamw"
    if precision == "bf16_params":
        text = "bf16_params, but muon updates float32 weights"
        messages.append(("precision", f"{text}. Set precision=bf16, {adamw}."))
    if has_adapter:
        text = "given, but muon is for the network's own matrices, and an adapter's are products of two"
        messages.append(("lora.rank", f"{text}. Leave it out, {adamw}."))
    return messages


def hidden_weights(denoiser: nn.Module) -> list[Tensor]:
    """Return the weights of all linear layers and convolutions inside a denoiser's blocks."""
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    modules = (module for block in blocks_of(denoiser) for module in block.modules())
    return [module.weight for module in modules if isinstance(module, layers)]


def stacks_of(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield all weights, in lists whose matrices have one shape and together at most MOST_STACKED elements."""
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    for weight in weights:
        by_shape.setdefault((weight.shape[0], weight.shape[1:].numel()), []).append(weight)
    for (rows, columns), same in by_shape.items():
        num = max(1, MOST_STACKED // (rows * columns))
        yield from (same[start : start + num] for start in range(0, len(same), num))


def largest_stack(weights: Iterable[Tensor]) -> int:
    """Count the elements of the largest of `stacks_of`."""
    return max((sum(weight.numel() for weight in stack) for stack in stacks_of(weights)), default=0)


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the type of `orthogonalize`: float16 is as fast as bfloat16 and has 3 bits more; CPUs are slow in both."""
    return torch.float32 if device.type == "cpu" else torch.float16


@torch.no_grad()
def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices (N, A, B) with the same singular vectors, and singular values of about 1, in 0.7 to 1.2.

    Five steps of a Newton-Schulz iteration, X <- (a + b X X^T + c (X X^T)^2) X, in the shape with fewer rows. A matrix more
    than 1.5 times as wide as high takes two and then three of them on X X^T alone, which needs fewer products: Zhang, Amsel,
    Chen and Dao 2026 (dao-lab.ai/blog/2026/gram-newton-schulz). All five at once would be inexact in float16.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (x / norm.clamp(min=EPS)).to(dtype)
    for steps in _division(*x.shape[1:]):
        x = _factor(x @ x.mT, steps) @ x
    return x.mT if is_tall else x


def _division(rows: int, columns: int) -> tuple[int, ...]:
    """Return how the steps are divided: by 8 A A B + 28 A A A FLOPs, or by 20 A A B + 10 A A A."""
    return (2, 3) if 2 * columns > 3 * rows else (1,) * STEPS


def _factor(gram: Tensor, steps: int) -> Tensor:
    """Return Q, (N, A, A), such that Q X is X after these steps. gram: X X^T, with which Q and later X X^T commute."""
    a, b, c = COEFFICIENTS
    factor: Tensor | None = None
    for step in range(steps):
        of_step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        of_step.diagonal(dim1=1, dim2=2).add_(a)
        factor = of_step if factor is None else of_step @ factor
        if step + 1 < steps:
            gram = of_step @ gram @ of_step
    assert factor is not None
    return factor


def step_flops(weights: Iterable[Tensor]) -> float:
    """Count the FLOPs of orthogonalizing these weights' updates."""
    flops = 0
    for weight in weights:
        rows, columns = sorted((weight.shape[0], weight.shape[1:].numel()))
        is_divided = len(_division(rows, columns)) < STEPS
        flops += rows * rows * (8 * columns + 28 * rows if is_divided else 20 * columns + 10 * rows)
    return float(flops)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the groups with `muon: True`, torch's fused AdamW for the others.

    Args:
        groups: as torch.optim.AdamW takes them, each with `muon`.
        betas, eps: AdamW's.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        others = [group for group in self.param_groups if not group["muon"]]
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. With sharded weights, all ranks call it."""
        loss = compute_loss(closure)
        with torch.profiler.record_function(UPDATE):
            for group in self.param_groups:
                if group["muon"]:
                    for stack in stacks_of(weight for weight in group["params"] if weight.grad is not None):
                        self._update(stack, group)
            # One optimizer for schedule and checkpoint: torch's has this one's groups and states.
            self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _update(self, parameters: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        updates = torch.stack([self._direction(parameter).flatten(1) for parameter in parameters])
        rate = group["lr"] * UPDATE_RMS * math.sqrt(max(updates.shape[1:]))
        updates = orthogonalize(updates, iteration_dtype(updates.device))
        for parameter, update in zip(parameters, updates, strict=True):
            like = parameter.detach()
            weights = local_shard(like)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(shard_like(update.reshape(like.shape), like), alpha=-rate)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Update a weight's momentum, and return U, whole."""
        assert parameter.grad is not None
        state, like = self.state[parameter], parameter.detach()
        if not state:
            state["momentum_buffer"] = torch.zeros_like(like)
        momentum, gradient = map(local_shard, (state["momentum_buffer"], parameter.grad))
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = gradient.lerp(momentum, MOMENTUM)
        if direction.device.type != "cpu":
            direction = direction.bfloat16()  # has float32's range; float16 has it after the division by the norm
        return gather_tensor(from_local_shard(direction, like))
