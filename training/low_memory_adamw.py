"""AdamW in less memory: moments in bfloat16 or in 8 bits, and weights in bfloat16 without a float32 copy.

    optimizer.states=bf16         both moments in bfloat16                            4 bytes a parameter instead of 8
    optimizer.states=8bit         both as 8-bit codes, a scale for each 256 of them   2 bytes (Dettmers et al. 2022,
                                  arXiv:2110.02861)
    precision=bf16_params         weights and gradients in bfloat16                   4 bytes instead of 8

Each step is computed in float32. What is written to bfloat16 is rounded stochastically: with x between the neighbors a < b,
to b with probability (x - a) / (b - a). So the mean over many steps is right, and a change far below the distance of two
neighbors is not lost (Zamirai et al. 2020, arXiv:2010.06192). 8-bit codes are rounded to the nearest one.

The random bits of a number come from (seed, step, tensor, part, its place) alone: the same seed gives the same weights, and
a stopped run resumes bit for bit. Ranks that hold the same part of a tensor draw the same. Torchao's AdamW draws from torch's
generator, whose state differs from rank to rank, so that copies of a weight would drift apart: it is not used.

On a GPU a Triton kernel does this (training/adamw_kernel.py); a CPU takes PyTorch's operators. They are equal bit for bit.

A tensor of fewer than SMALL numbers keeps float32 moments, as in torchao and bitsandbytes. Parameters may be DTensors
(FSDP2): each rank updates its own part, and the moments are DTensors of the same placement; 8-bit ones are never shared out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weights.tensors import is_sharded_tensor, local_shard, shard_index

if TYPE_CHECKING:
    from training.optimizer import OptimizerConfig

UPDATE = "optimizer.update"  # range of a profile
SMALL = 4096  # numbers of a tensor; as torchao 0.16.0 has it, optim/adam.py
BLOCK = 256  # numbers that share a scale; the same
PIECE = {"cpu": 2**18, "cuda": 2**23}
"""Numbers that the operators update at once: what a piece takes stays in a processor's cache, or fills a GPU."""
CODES = 256
SMALLEST_SCALE = 1e-12  # of a block of zeros
GOLDEN = 0x9E3779B9 - 2**32  # 2^32 over the golden ratio, so that weights get other bits than moments
BYTES_OF_STATES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 * (1 + 4 / BLOCK)}
"""Of both moments, a number of a tensor that is not small."""
NAMES = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the moments, as torch has them, and whether they can be negative."""


def problems(config: OptimizerConfig, precision: str | None) -> list[tuple[str, str]]:
    """(key, message) for keys of small states that are not possible here, or contradict each other."""
    messages = []
    if config.rounding is not None and config.states != "bf16" and precision != "bf16_params":
        problem = f"{config.rounding}, but nothing is rounded to bf16: precision={precision or 'null'}"
        problem += f", optimizer.states={config.states}"
        advice = "Set optimizer.states=bf16 or precision=bf16_params, or leave it out"
        messages.append(("optimizer.rounding", f"{problem}. {advice}."))
    return messages


def has_triton() -> bool:
    """Return whether Triton can build a kernel: torch brings it on Linux, and it needs a C compiler."""
    has_compiler = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    return has_compiler and importlib.util.find_spec("triton") is not None


def compute_loss(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of an optimizer's closure, which computes the gradients; None: there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class SmallAdamW(torch.optim.Optimizer):
    """AdamW of any of these kinds, on any device, tensor by tensor.

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
        self.has_kernel = has_triton()
        self._tables: dict[torch.device, dict[str, Tensor]] = {}

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
        moments = {key: local_shard(value) for key, value in state.items() if key != "step"}
        factors = _factors(int(state["step"]), group)
        keys = self._keys(parameter, index, int(state["step"])) if self.stochastic else None
        if flat.is_cuda and self.has_kernel:
            from training import adamw_kernel

            adamw_kernel.update(flat, gradients, moments, self._tables_on(flat.device), factors, keys)
        else:
            size = PIECE[flat.device.type]
            for start in range(0, flat.numel(), size):
                piece = slice(start, min(start + size, flat.numel()))
                self._update_piece(flat[piece], gradients[piece].float(), moments, piece, factors, keys)
        if not weights.is_contiguous():
            weights.copy_(flat.view(weights.shape))

    def _update_piece(
        self,
        weights: Tensor,
        gradient: Tensor,
        moments: Mapping[str, Tensor],
        piece: slice,
        factors: Mapping[str, float],
        keys: tuple[int, int] | None,
    ) -> None:
        """Loshchilov & Hutter 2019 (arXiv:1711.05101), algorithm 2. Each operator rounds once, as in the kernel."""
        weight = weights.float()
        mean, square = (self._read(moments, name, piece) for name in NAMES)
        mean.add_((gradient - mean).mul_(factors["of_mean"]))
        square.add_(gradient.square().sub_(square).mul_(factors["of_square"]))
        root = square.sqrt().mul_(factors["correction"]).add_(factors["eps"])
        weight.mul_(factors["kept"]).add_(torch.div(mean, root, out=root).mul_(factors["rate"]))
        del gradient, root
        is_rounded = torch.bfloat16 in (weights.dtype, moments["exp_avg"].dtype)
        bits = random_bits(piece, keys, weights.device) if keys and is_rounded else None
        self._write(moments, "exp_avg", piece, mean, bits)
        self._write(moments, "exp_avg_sq", piece, square, None if bits is None else bits >> 16)
        write(weights, weight, None if bits is None else mix(bits.add_(GOLDEN)))

    # --- states ---

    def kind_of(self, parameter: Tensor) -> str:
        """Return how a parameter's moments are kept: in 8 bits they are whole blocks (as torchao has it)."""
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

    def _tables_on(self, device: torch.device) -> dict[str, Tensor]:
        """Moment -> the numbers of its 8-bit codes and the borders between them, on a device."""
        if self.states == "8bit" and device not in self._tables:
            self._tables[device] = {name: code_table(signed).to(device) for name, signed in NAMES.items()}
        return self._tables.get(device, {})

    def _read(self, moments: Mapping[str, Tensor], name: str, piece: slice) -> Tensor:
        """Return a part of a moment as float32; the part itself if it is stored so."""
        stored = moments[name]
        if stored.dtype != torch.uint8:
            return stored.view(-1)[piece].float()
        rows = slice(piece.start // BLOCK, piece.stop // BLOCK)
        values = self._tables_on(stored.device)[name][stored[rows].int()]
        return values.mul_(moments[scale_of(name)][rows, None]).view(-1)

    def _write(
        self, moments: Mapping[str, Tensor], name: str, piece: slice, values: Tensor, bits: Tensor | None
    ) -> None:
        stored = moments[name]
        if stored.dtype != torch.uint8:
            write(stored.view(-1)[piece], values, bits)
            return
        rows = slice(piece.start // BLOCK, piece.stop // BLOCK)
        blocks = values.view(-1, BLOCK)
        largest = blocks.abs().amax(1).clamp_(min=SMALLEST_SCALE)
        borders = self._tables_on(stored.device)[name][CODES:]
        stored[rows] = torch.bucketize(blocks.div_(largest[:, None]), borders, right=True, out_int32=True)
        moments[scale_of(name)][rows] = largest

    def _keys(self, parameter: Tensor, index: int, step: int) -> tuple[int, int]:
        text = f"{self.seed} {step} {index} {shard_index(parameter)}".encode()
        return struct.unpack("<ii", hashlib.blake2b(text, digest_size=8).digest())

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


def _factors(step: int, group: Mapping[str, Any]) -> dict[str, float]:
    """Return the factors of step number `step`, from 1."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    return {
        "kept": 1 - lr * group["weight_decay"],
        "of_mean": 1 - beta1,
        "of_square": 1 - beta2,
        "correction": 1 / math.sqrt(1 - beta2**step),
        "eps": group["eps"],
        "rate": -lr / (1 - beta1**step),
    }


# --- 8 bits ---


def code_table(signed: bool) -> Tensor:
    """Return what 8-bit codes stand for, ascending, and then the borders between them: (256 + 255,) float32.

    Dettmers et al. 2022, section 2.1 and appendix F: in each decade from 1e-6 to 1 lie the middles of equal parts, of twice
    as many as in the decade below; 0 and 1 have codes of their own.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, (1 if signed else 2) * 2**decade + 1)
        middles = ((edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - 6)).tolist()
        numbers += [*middles, *(-number for number in middles)] if signed else middles
    values = torch.tensor(sorted(numbers))
    return torch.cat([values, (values[:-1] + values[1:]) / 2.0])


def scale_of(name: str) -> str:
    """Return the name of the scales of a moment in 8 bits."""
    return f"{name}_scale"


# --- rounding ---


def mix(bits: Tensor) -> Tensor:
    """Mix each int32 in place, so that a bit depends on all: Wellons' lowbias32 (hash-prospector, public domain)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def random_bits(piece: slice, keys: tuple[int, int], device: torch.device | str) -> Tensor:
    """Return 32 random bits for each number of a part of a tensor, int32: they depend on its place and the two keys alone."""
    start = (piece.start + 2**31) % 2**32 - 2**31
    places = torch.arange(piece.stop - piece.start, dtype=torch.int32, device=device).add_(start)
    return mix(mix(places.bitwise_xor_(keys[0])).add_(keys[1]))


def write(to: Tensor, values: Tensor, bits: Tensor | None) -> None:
    """Write float32 values: unchanged to float32, else rounded to bfloat16, stochastically if there are random bits."""
    if to.dtype == torch.float32:
        if to.data_ptr() != values.data_ptr():
            to.copy_(values)
    else:
        to.copy_(values if bits is None else rounded(values, bits))


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Return float32 values with the last 16 of their bits zero: those of bfloat16, chosen stochastically.

    A bfloat16 is a float32 without these bits. A uniform number below 2^16, the last bits of `bits`, is added to them: it
    carries with the probability that they are of the distance to the next one, away from zero for both signs.
    """
    sums = (bits & 0xFFFF).add_(values.contiguous().view(torch.int32)).bitwise_and_(-(2**16))
    return torch.where(values.isfinite(), sums.view(torch.float32), values)  # a carry makes a number of nan


def has_small_weights(parameters: Iterable[nn.Parameter]) -> bool:
    """True if any of them is bfloat16."""
    return any(parameter.dtype == torch.bfloat16 for parameter in parameters)
