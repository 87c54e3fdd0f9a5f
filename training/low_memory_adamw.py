"""AdamW in less memory: moments in bfloat16 or in 8 bits, and weights in bfloat16 without a float32 copy.

    optimizer.states=bf16         both moments in bfloat16                            4 bytes a parameter instead of 8
    optimizer.states=8bit         both as 8-bit codes, a scale for each 256 of them   2 bytes (Dettmers et al. 2022,
                                  arXiv:2110.02861; torchao's tables and code)
    precision=bf16_params         weights and gradients in bfloat16                   4 bytes instead of 8

Each step is computed in float32. What is written to bfloat16 is rounded stochastically: with x between the neighbours a < b,
to b with probability (x - a) / (b - a). So the mean over many steps is right, and a change far below the distance of two
neighbours is not lost (Zamirai et al. 2020, arXiv:2010.06192). Torchao's 8-bit codes are rounded to the nearest one.

The random bits of a tensor come from (seed, its step, its index, its part) alone: the same seed gives the same weights, and
a stopped run resumes bit for bit. Ranks that hold the same part of a tensor draw the same.

A tensor of fewer than SMALL numbers keeps float32 moments, as in torchao and bitsandbytes. Parameters may be DTensors
(FSDP2): each rank updates its own part, and the moments are DTensors of the same placement; 8-bit ones are never shared out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weights.tensors import is_sharded_tensor, local_shard, shard_index

if TYPE_CHECKING:
    from training.optimizer import OptimizerConfig

UPDATE = "optimizer.update"  # range of a profile
SMALL = 4096  # numbers of a tensor; torchao 0.16.0, optim/adam.py
BLOCK = 256  # numbers that share a scale; the same
PIECE = 2**23  # numbers that are updated at once: it bounds the memory that a step takes in addition to the states
BYTES_OF_A_PIECE = {"fp32": 25, "bf16": 25, "8bit": 56}
"""For each number of a piece, by the kind of states: copies in float32, bits, codes."""
BYTES_OF_STATES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 * (1 + 4 / BLOCK)}
"""Of both moments, a number of a tensor that is not small."""
RELEASES = {"2.10": "0.16.0", "2.11": "0.17.0", "2.15": "0.18.0"}
"""torch -> the torchao with which tests/test_low_memory_adamw_8bit.py has passed."""
NAMES = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the moments, as torch has them, and whether they can be negative."""


def torchao_problem() -> str | None:
    """Say that torchao is missing, or None."""
    if importlib.util.find_spec("torchao") is not None:
        return None
    release = RELEASES.get(torch.__version__.rpartition(".")[0], "in the release for this torch")
    todo = f"pip install --no-deps torchao=={release}, or use optimizer.states=bf16"
    return f"needs torchao, which is not installed. {todo}."


def problems(config: OptimizerConfig, precision: str | None) -> list[tuple[str, str]]:
    """(key, message) for keys of small states that are not possible here, or contradict each other."""
    messages = []
    if config.states == "8bit" and (text := torchao_problem()):
        messages.append(("optimizer.states", f"8bit {text}"))
    if config.rounding is not None and config.states != "bf16" and precision != "bf16_params":
        problem = f"{config.rounding}, but nothing is rounded to bf16: precision={precision or 'null'}"
        problem += f", optimizer.states={config.states}"
        advice = "Say optimizer.states=bf16 or precision=bf16_params, or leave it out"
        messages.append(("optimizer.rounding", f"{problem}. {advice}."))
    return messages


def compute_loss(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of an optimizer's closure, which computes the gradients; None: there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class SmallAdamW(torch.optim.Optimizer):
    """AdamW of any of these kinds, on any device; without `fused` and `foreach`, tensor by tensor.

    Args:
        groups: as torch.optim.AdamW takes them.
        states: fp32, bf16 or 8bit.
        stochastic: round to bfloat16 stochastically, else to the nearest.
        seed: of the random bits.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        states: str,
        stochastic: bool = True,
        seed: int = 0,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.states, self.stochastic, self.seed = states, stochastic, seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._codes = _Codes() if states == "8bit" else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = compute_loss(closure)
        index = 0
        with torch.profiler.record_function(UPDATE):  # not around the closure, in which Composer computes the gradients
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, index, group)
                    index += 1
        return loss

    def _update(self, parameter: Tensor, index: int, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state.update(self.begin_state(parameter))
        state["step"] += 1
        weights, gradients = local_shard(parameter.detach()), local_shard(parameter.grad).reshape(-1)
        flat = weights.reshape(-1)  # a view, or a copy of weights in another memory format
        generator = self._generator(parameter, index, int(state["step"])) if self.stochastic else None
        for start in range(0, flat.numel(), PIECE):
            piece = slice(start, min(start + PIECE, flat.numel()))
            self._update_piece(flat[piece], gradients[piece].float(), state, piece, group, generator)
        if not weights.is_contiguous():
            weights.copy_(flat.view(weights.shape))

    def _update_piece(
        self,
        weights: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        piece: slice,
        group: Mapping[str, Any],
        generator: torch.Generator | None,
    ) -> None:
        """Loshchilov & Hutter 2019 (arXiv:1711.05101), algorithm 2, as torch computes it."""
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], group["lr"]
        weight = weights.float()
        mean, square = (self._read(state, name, piece) for name in NAMES)
        weight.mul_(1 - lr * group["weight_decay"])
        mean.lerp_(gradient, 1 - beta1)
        square.lerp_(gradient.square(), 1 - beta2)
        root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        weight.addcdiv_(mean, root, value=-lr / (1 - beta1**step))
        del gradient, root
        self._write(state, "exp_avg", piece, mean, generator)
        self._write(state, "exp_avg_sq", piece, square, generator)
        write(weights, weight, generator)

    # --- states ---

    def kind_of(self, parameter: Tensor) -> str:
        """Return how a parameter's moments are kept: in 8 bits they are whole blocks (torchao's rule)."""
        is_uneven = self.states == "8bit" and parameter.numel() % BLOCK != 0
        return "fp32" if parameter.numel() < SMALL or is_uneven else self.states

    def empty_state(self, parameter: Tensor, device: torch.device | str) -> dict[str, Tensor]:
        """Return a parameter's whole state before its first step, zeros: `meta` gives its names, types and shapes."""
        kind, shape = self.kind_of(parameter), tuple(parameter.shape)
        state = {"step": torch.zeros((), dtype=torch.float32, device="meta" if str(device) == "meta" else "cpu")}
        for name in NAMES:
            if kind == "8bit":
                blocks = parameter.numel() // BLOCK
                state[name] = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=device)
                state[scale_of(name)] = torch.zeros(blocks, dtype=torch.float32, device=device)
            else:
                dtype = torch.bfloat16 if kind == "bf16" else torch.float32
                state[name] = torch.zeros(shape, dtype=dtype, device=device)
        return state

    def begin_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state before its first step; of a DTensor, DTensors with this rank's part."""
        if not is_sharded_tensor(parameter):
            return self.empty_state(parameter, parameter.device)
        whole, like = self.empty_state(parameter, "meta"), parameter.detach()
        moments = {name: torch.zeros_like(like, dtype=of.dtype) for name, of in whole.items() if name != "step"}
        return {"step": torch.zeros((), dtype=torch.float32), **moments}

    def _read(self, state: Mapping[str, Tensor], name: str, piece: slice) -> Tensor:
        """Return a part of a moment as float32; the part itself if it is stored so."""
        stored = local_shard(state[name])
        if stored.dtype == torch.uint8:
            assert self._codes is not None
            return self._codes.read(state, name, piece)
        return stored.view(-1)[piece].float()

    def _write(
        self, state: Mapping[str, Tensor], name: str, piece: slice, values: Tensor, generator: torch.Generator | None
    ) -> None:
        stored = local_shard(state[name])
        if stored.dtype == torch.uint8:
            assert self._codes is not None
            self._codes.write(state, name, piece, values)
        elif stored.dtype != torch.float32:
            write(stored.view(-1)[piece], values, generator)

    def _generator(self, parameter: Tensor, index: int, step: int) -> torch.Generator:
        device = parameter.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        text = f"{self.seed} {step} {index} {shard_index(parameter)}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return self._generators[device].manual_seed(int.from_bytes(digest, "big") >> 1)

    # --- in checkpoints ---

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state as `state_dict` gives it. torch's own would cast each moment to the type of its parameter."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, moments in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = {
                name: value.clone() if name == "step" else value.to(parameter.device).contiguous()
                for name, value in moments.items()
            }


class _Codes:
    """Torchao's 8-bit numbers, in plain tensors of a checkpoint: codes (blocks, BLOCK) and scales (blocks)."""

    def __init__(self) -> None:
        from torchao.optim import quant_utils

        self._torchao = quant_utils
        self._tables = {signed: torch.tensor(quant_utils.create_dynamic_map(signed)) for signed in NAMES.values()}

    def _at(self, state: Mapping[str, Tensor], name: str, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return a part's codes and scales, and what a code stands for."""
        rows = slice(piece.start // BLOCK, piece.stop // BLOCK)
        codes, scale = local_shard(state[name])[rows], local_shard(state[scale_of(name)])[rows]
        signed = NAMES[name]
        self._tables[signed] = self._tables[signed].to(codes.device)
        return codes, scale, self._tables[signed]

    def read(self, state: Mapping[str, Tensor], name: str, piece: slice) -> Tensor:
        """Return a part of a moment as float32."""
        codes, scale, table = self._at(state, name, piece)
        return self._torchao.dequant_with_qmap(codes, table, scale).view(-1)

    def write(self, state: Mapping[str, Tensor], name: str, piece: slice, values: Tensor) -> None:
        """Write a part of a moment: by its largest number, to the nearest code."""
        codes, scale, table = self._at(state, name, piece)
        scaled, largest = self._torchao.scale_tensor(values.view(-1, BLOCK), BLOCK)
        codes.copy_(self._torchao.quantize_8bit_with_qmap(scaled, table))
        scale.copy_(largest)


def scale_of(name: str) -> str:
    """Return the name of the scales of a moment in 8 bits."""
    return f"{name}_scale"


# --- rounding ---


def write(to: Tensor, values: Tensor, generator: torch.Generator | None) -> None:
    """Write float32 values: unchanged to float32, else rounded to bfloat16, stochastically if there is a generator."""
    if to.dtype == torch.float32:
        if to.data_ptr() != values.data_ptr():
            to.copy_(values)
    else:
        to.copy_(values if generator is None else rounded(values, generator))


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 values with the last 16 of their bits zero: those of bfloat16, chosen stochastically.

    A bfloat16 is a float32 without these bits. A uniform number below 2^16 is added to them: it carries with the
    probability that they are of the distance to the next one, away from zero for both signs.
    """
    bits = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits.add_(values.contiguous().view(torch.int32)).bitwise_and_(-(2**16))
    return torch.where(values.isfinite(), bits.view(torch.float32), values)  # a carry makes a number of nan


def has_small_weights(parameters: Iterable[nn.Parameter]) -> bool:
    """True if any of them is bfloat16."""
    return any(parameter.dtype == torch.bfloat16 for parameter in parameters)
