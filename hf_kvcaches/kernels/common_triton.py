"""What the Triton kernels have in common. It needs Triton as soon as it is imported: only their files import it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_kvcaches.kernels.launch import padded

# Triton's interpreter multiplies matrices of bfloat16 by their bits.
WIDE = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(one, other, sums=None):
    """sums + one @ other, in float32: of float32 numbers by three products of what tensor cores take, which loses nothing."""
    if WIDE or one.dtype != other.dtype or one.dtype == tl.float64:
        one, other = one.to(tl.float32), other.to(tl.float32)
    return tl.dot(one, other, sums, input_precision="tf32x3")


@triton.jit
def partners(dims, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The dimension with which each of the first 2 * HALF dimensions rotates."""
    return dims ^ 1 if INTERLEAVED else tl.where(dims < HALF, dims + HALF, dims - HALF)


@triton.jit
def rotated(numbers, others, dims, tables, table_at, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Numbers, (rows, dims), rotated where the mask says so, by the angles at `table_at`, (rows,), of two tables.

    `others`: the numbers of `partners`, 0 where the mask says no: not even 0 times the partner may be added, which can be infinite.
    """
    pair, is_first = dims // 2 if INTERLEAVED else dims % HALF, dims % 2 == 0 if INTERLEAVED else dims < HALF
    at = table_at[:, None] + pair[None, :]
    cos = tl.load(tables[0] + at, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(tables[1] + at, mask=mask, other=0.0).to(tl.float32)
    return numbers.to(tl.float32) * cos + others.to(tl.float32) * tl.where(is_first[None, :], -sin, sin)


@triton.jit
def finite(highest):
    """The running maximum, or 0 where nothing was valid: minus infinity must not be subtracted from itself."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def capped(scores, softcap):
    if softcap is not None:
        # The hyperbolic tangent, by an exponential that can't overflow.
        decay = tl.exp(-2 * tl.abs(scores / softcap))
        size = softcap * (1 - decay) / (1 + decay)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def store_part(row, heads, sums, dims, highest, total, parts, stats, GROUP: tl.constexpr, width, count):
    """Stores what one program found for some of the GROUP heads of a row, for `combine_kernel`, and returns where.

    The number of programs of a row is the grid's second size. `sums`: (heads, dims), of which there are `count`; `width` are stored.
    """
    part = (row * tl.num_programs(1) + tl.program_id(1)) * GROUP + heads
    tl.store(parts + part[:, None] * width + dims[None, :], sums, mask=(heads < GROUP)[:, None] & (dims < count)[None, :])
    tl.store(stats + part * 2, highest, mask=heads < GROUP)
    tl.store(stats + part * 2 + 1, total, mask=heads < GROUP)
    return part


@triton.jit
def combine_kernel(parts, stats, output, lse, splits, width, GROUP: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    """Merges what `splits` programs stored for the GROUP heads of one row, for DIMS of `width` sums.

    `parts`: (rows, splits, GROUP, width). `stats`: (rows, splits, GROUP, 2). `output`: (rows, GROUP, width). `lse`: (rows, GROUP).
    """
    row = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS), tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    mask = (heads < GROUP)[:, None] & (dims < width)[None, :]
    highest, total = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, DIMS], tl.float32)
    for split in range(splits):
        part = (row * splits + split) * GROUP + heads
        high = tl.load(stats + part * 2, mask=heads < GROUP, other=float("-inf"))
        higher = tl.maximum(highest, high)
        shrink, share = tl.exp(highest - finite(higher)), tl.exp(high - finite(higher))
        total = total * shrink + tl.load(stats + part * 2 + 1, mask=heads < GROUP, other=0.0) * share
        part_sums = tl.load(parts + part[:, None] * width + dims[None, :], mask=mask, other=0.0)
        sums, highest = sums * shrink[:, None] + part_sums * share[:, None], higher
    any_valid = total > 0
    sums = sums / tl.where(any_valid, total, 1.0)[:, None]
    tl.store(output + (row * GROUP + heads)[:, None] * width + dims[None, :], sums, mask=mask)
    log_sum = highest.to(tl.float64) + tl.log(tl.where(any_valid, total, 1.0).to(tl.float64))
    tl.store(lse + row * GROUP + heads, tl.where(any_valid, log_sum, float("-inf")), mask=heads < GROUP)


def combine(parts: Tensor, stats: Tensor, output: Tensor, splits: int, dtype: torch.dtype) -> Tensor:
    """Writes the output, (..., GROUP, width), and returns log sum exp, (..., GROUP)."""
    group, width = output.shape[-2:]
    lse, dims = output.new_empty(output.shape[:-1], dtype=dtype), min(64, padded(width))
    combine_kernel[(lse.numel() // group, triton.cdiv(width, dims))](
        parts, stats, output, lse, splits, width, GROUP=group, HEADS=padded(group), DIMS=dims
    )
    return lse
