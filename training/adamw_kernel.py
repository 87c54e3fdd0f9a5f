"""Low-memory AdamW in one pass over a GPU's memory, in Triton: the steps of training/low_memory_adamw.py, bit for bit.

With weights, gradients and moments in bfloat16 a step moves 14 bytes a number, with moments in 8 bits 10: each is read once
and written once. On an H200 PyTorch's operators take 40 and 16 times as long (reports/results/optimizer_gpu.json).

To be equal bit for bit, each operation rounds by itself: there is no fused multiply-add, and quotients and roots are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK: tl.constexpr = tl.constexpr(256)  # numbers that share a scale, as in training/low_memory_adamw.py
ROWS = 4  # blocks that a program updates: the fastest of 2, 4, 8, 16 and 32 on an H200


@triton.jit
def mix(x):
    """Mix 32 bits; see `random_bits` of training/low_memory_adamw.py."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def write(to, at, mask, values, bits, STOCHASTIC: tl.constexpr):
    """Write float32 numbers, rounded where `to` is bfloat16: by bits, since the cast of Triton's interpreter truncates."""
    if to.dtype.element_ty == tl.float32:
        tl.store(to + at, values, mask)
    else:
        raw = values.to(tl.uint32, bitcast=True)
        rounded = raw + ((bits & 0xFFFF) if STOCHASTIC else 0x7FFF + ((raw >> 16) & 1))
        is_finite = (raw & 0x7F800000) != 0x7F800000
        is_nan = (raw & 0x7FFFFFFF) > 0x7F800000
        raw = tl.where(is_finite, rounded, tl.where(is_nan, raw | 0x400000, raw))
        tl.store(to + at, (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask)


@triton.jit
def read_codes(codes, scales, table, at, row, mask, is_row):
    """Read blocks of a moment in 8 bits."""
    code = tl.load(codes + at, mask, other=0).to(tl.int32)
    return tl.load(table + code) * tl.load(scales + row, is_row, other=0.0)[:, None]


@triton.jit
def write_codes(codes, scales, table, at, row, mask, is_row, values):
    """Write blocks in 8 bits: by their largest number, to the nearest code, which is the number of borders below."""
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12)
    is_bad = tl.max((values != values).to(tl.int32), axis=1) > 0  # max leaves out what is not a number
    largest = tl.where(is_bad, float("nan"), largest)
    scaled = tl.div_rn(values, largest[:, None])
    code = tl.zeros(values.shape, tl.int32)
    for power in tl.static_range(8):
        step = 128 >> power
        code += tl.where(scaled >= tl.load(table + 255 + code + step), step, 0)
    code = tl.where(scaled != scaled, 255, code)  # as bucketize has it
    tl.store(codes + at, code.to(tl.uint8), mask)
    tl.store(scales + row, largest, is_row)


@triton.jit
def step_kernel(
    weights,
    gradients,
    means,
    squares,
    mean_scales,
    square_scales,
    mean_table,
    square_table,
    num,
    key,
    other_key,
    kept,
    of_mean,
    of_square,
    correction,
    eps,
    rate,
    IN_8_BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Update ROWS * BLOCK numbers; see `_update_piece` of training/low_memory_adamw.py."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, is_row = at < num, row * BLOCK < num
    weight = tl.load(weights + at, mask, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + at, mask, other=0.0).to(tl.float32)
    if IN_8_BITS:
        mean = read_codes(means, mean_scales, mean_table, at, row, mask, is_row)
        square = read_codes(squares, square_scales, square_table, at, row, mask, is_row)
    else:
        mean = tl.load(means + at, mask, other=0.0).to(tl.float32)
        square = tl.load(squares + at, mask, other=0.0).to(tl.float32)
    mean += (gradient - mean) * of_mean
    square += (gradient * gradient - square) * of_square
    root = tl.sqrt_rn(square) * correction + eps
    weight = weight * kept + tl.div_rn(mean, root) * rate
    bits = mix(mix(at.to(tl.uint32) ^ tl.cast(key, tl.uint32)) + tl.cast(other_key, tl.uint32))
    if IN_8_BITS:
        write_codes(means, mean_scales, mean_table, at, row, mask, is_row, mean)
        write_codes(squares, square_scales, square_table, at, row, mask, is_row, square)
    else:
        write(means, at, mask, mean, bits, STOCHASTIC)
        write(squares, at, mask, square, bits >> 16, STOCHASTIC)
    write(weights, at, mask, weight, mix(bits + 0x9E3779B9), STOCHASTIC)


def update(
    weights: Tensor,
    gradients: Tensor,
    moments: Mapping[str, Tensor],
    tables: Mapping[str, Tensor],
    factors: Mapping[str, float],
    keys: tuple[int, int] | None,
) -> None:
    """Update a flat tensor, and its moments, in place.

    Args:
        weights: (num,) float32 or bfloat16.
        gradients: the same shape, any floating-point type.
        moments: exp_avg and exp_avg_sq (num,) in float32 or bfloat16; or uint8 codes (num / 256, 256), and their scales.
        tables: of 8-bit moments, by name: 256 values, then 255 borders, float32.
        factors: as `_factors` returns them.
        keys: of the random bits; None: round to the nearest.
    """
    mean, square = moments["exp_avg"], moments["exp_avg_sq"]
    in_8_bits = mean.element_size() == 1
    more: list[Any] = [mean, square, mean, square]  # stand-ins, which are not read
    if in_8_bits:
        names = ("exp_avg", "exp_avg_sq")
        more = [*(moments[f"{name}_scale"] for name in names), *(tables[name] for name in names)]
    num = weights.numel()
    options = {"IN_8_BITS": in_8_bits, "STOCHASTIC": keys is not None, "ROWS": ROWS, "enable_fp_fusion": False}
    grid = (triton.cdiv(num, ROWS * BLOCK.value),)
    step_kernel[grid](weights, gradients, mean, square, *more, num, *(keys or (0, 0)), **factors, **options)
