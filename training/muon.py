"""Muon: the matrices inside the network's blocks step along orthogonal matrices, everything else by AdamW.

For a weight W (A, B) with the gradient G and the momentum M, both float32, and mu = 0.95:

    M <- mu M + (1 - mu) G
    U  = mu M + (1 - mu) G                           Nesterov's momentum
    O  = orthogonalize(U)                            in bfloat16; on a CPU in float32
    W <- (1 - lr decay) W - 0.2 lr sqrt(max(A, B)) O

Jordan et al. 2024 (kellerjordan.github.io/posts/muon). The factor 0.2 sqrt(max(A, B)) is Moonlight's (Liu et al. 2025,
arXiv:2502.16982, equation 4): a step is then as large as one of AdamW, so that both take the same rate and weight decay.

A convolution's kernel (A, I, h, w) is the matrix (A, I h w), as in Jordan's code: most weights of a UNet are kernels. First
and last layers, embeddings, norms and biases are AdamW's, as there: all outside the blocks, and in them what is not the
weight of a linear layer or a convolution.

torch.optim.Muon takes neither kernels nor AdamW's parameters, and on a sharded tensor each of its 15 products communicates.
On plain matrices this class gives the same weights (tests/test_muon.py). Sharded weights (FSDP2): the momentum is sharded
like its weight; U is gathered once, in the iteration's type, and every rank orthogonalizes all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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
BYTES_OF_MOMENTUM = 4
BYTES_OF_UPDATE = 16
"""For each number of the largest matrix, in a step: U in float32, and what `orthogonalize` has at once."""


def problems(config: OptimizerConfig, precision: str | None, *, has_adapter: bool) -> list[tuple[str, str]]:
    """(key, message) for keys that Muon does not go with."""
    messages: list[tuple[str, str]] = []
    if config.name != "muon":
        return messages
    adamw = "or say optimizer.name=adamw"
    if precision == "bf16_params":
        text = "bf16_params, but muon updates float32 weights"
        messages.append(("precision", f"{text}. Say precision=bf16, {adamw}."))
    if has_adapter:
        text = "given, but muon is for the network's own matrices, and an adapter's are products of two"
        messages.append(("lora.rank", f"{text}. Leave it out, {adamw}."))
    return messages


def hidden_weights(denoiser: nn.Module) -> list[Tensor]:
    """Return the weights of all linear layers and convolutions inside a denoiser's blocks."""
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    modules = (module for block in blocks_of(denoiser) for module in block.modules())
    return [module.weight for module in modules if isinstance(module, layers)]


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the type of `orthogonalize`: a CPU without bfloat16 units multiplies small matrices 12 times slower in it."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@torch.no_grad()
def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix (A, B) with the same singular vectors and singular values of about 1, in 0.7 to 1.2.

    Five steps of a Newton-Schulz iteration, X <- a X + b (X X^T) X + c (X X^T)^2 X, in the shape with fewer rows and in the
    matrix's type.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def step_flops(weights: Iterable[Tensor]) -> float:
    """Count the FLOPs of orthogonalizing these weights' updates: three products of A x B, A the shorter side, five times."""
    sides = [sorted((weight.shape[0], weight[0].numel())) for weight in weights]
    return float(sum(STEPS * (4 * a * a * b + 2 * a**3) for a, b in sides))


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
                for parameter in group["params"] if group["muon"] else ():
                    if parameter.grad is not None:
                        self._update(parameter, group)
            # One optimizer for schedule and checkpoint: torch's has this one's groups and states.
            self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        state, like = self.state[parameter], parameter.detach()
        if not state:
            state["momentum_buffer"] = torch.zeros_like(like)
        momentum, gradient, weights = map(local_shard, (state["momentum_buffer"], parameter.grad, like))
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = gradient.lerp(momentum, MOMENTUM).to(iteration_dtype(like.device))
        update = gather_tensor(from_local_shard(direction, like))
        matrix = update.reshape(len(update), -1)
        rate = group["lr"] * UPDATE_RMS * math.sqrt(max(matrix.shape))
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.add_(shard_like(orthogonalize(matrix).reshape(update.shape), like), alpha=-rate)
