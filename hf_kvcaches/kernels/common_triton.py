"""What the Triton kernels have in common. It needs Triton as soon as it is imported: only their files import it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvcaches.kernels.launch import padded

# Triton's interpreter multiplies matrices of bfloat16 by their bits.
WIDE = tl.constexpr(triton.knobs.runtime.interpret)
# Of float16, which float32 numbers can exceed.
LARGEST = tl.constexpr(65504.0)


@triton.jit
def dot(one, other, sums=None):
    """sums + one @ other, in float32: of float32 numbers by three products of what tensor cores take, which loses nothing."""
    if WIDE or one.dtype != other.dtype or one.dtype == tl.float64:
        one, other = one.to(tl.float32), other.to(tl.float32)
    return tl.dot(one, other, sums, input_precision="tf32x3")


@triton.jit
def rotate_pairs(one, two, cos, sin):
    """The first and the second dimensions of pairs, rotated."""
    return one * cos - two * sin, two * cos + one * sin


@triton.jit
def rotate_some(one, two, tables, table_at, mask):
    """`rotate_pairs` where the mask says so, by (cos, sin) from tables."""
    cos = tl.load(tables[0] + table_at, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(tables[1] + table_at, mask=mask, other=0.0).to(tl.float32)
    # Elsewhere not even 0 times the partner may be added: it can be infinite.
    rotated_one, rotated_two = rotate_pairs(one, two, cos, sin)
    return tl.where(mask, rotated_one, one), tl.where(mask, rotated_two, two)


@triton.jit
def pair_dims(dim, half, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, ALIGNED: tl.constexpr):
    """The dimensions of a head in pairs: those that rotate together, `half` of them, and then what is left.

    ALIGNED: how many dimensions at a time are known to lie side by side, for wide loads.

    Returns:
        The pairs, and whether each rotates; the first dimension of each, and whether there is one; the second likewise.
    """
    pair = tl.arange(0, PAIRS)
    rotates, rest = pair < half, (dim - 2 * half + 1) // 2
    if INTERLEAVED:
        first, second = tl.where(rotates, 2 * pair, half + pair), tl.where(rotates, 2 * pair + 1, half + pair + rest)
    else:
        first, second = tl.where(rotates, pair, half + pair), half + pair + tl.where(rotates, 0, rest)
    first = tl.max_contiguous(tl.multiple_of(first, ALIGNED), ALIGNED)
    second = tl.max_contiguous(tl.multiple_of(second, ALIGNED), ALIGNED)
    has_first = pair < tl.multiple_of(half + rest, ALIGNED)
    return pair, rotates, first, has_first, second, has_first & (second < dim)


@triton.jit
def dequantized(at, index, scale_at, zero_at, mask, BITS: tl.constexpr):
    """Numbers from pointers to them, or to their bytes; `index` says which half of a byte. BITS 0: plain numbers."""
    if BITS == 4:
        numbers = ((tl.load(at, mask=mask, other=0).to(tl.int32) >> (index % 2 * 4).to(tl.int32)) & 15).to(tl.float32)
    else:
        numbers = tl.load(at, mask=mask, other=0)
        if BITS == 8:
            numbers = numbers.to(tl.float32) + 127
    if BITS != 0:
        scale, zero = tl.load(scale_at, mask=mask, other=0.0), tl.load(zero_at, mask=mask, other=0.0)
        numbers = numbers * scale.to(tl.float32) + zero.to(tl.float32)
    return numbers


@triton.jit
def store_clamped(at, numbers, mask, CLAMP: tl.constexpr):
    """Casts and stores; with CLAMP, what is too large for float16 becomes its largest number."""
    if CLAMP and at.dtype.element_ty == tl.float16:
        numbers = tl.where(numbers > LARGEST, LARGEST, tl.where(numbers < -LARGEST, -LARGEST, numbers))
    tl.store(at, numbers.to(at.dtype.element_ty), mask=mask)


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
def load_option(s, live, b, h, option):
    """An optional tensor's numbers for slots, tokens or tiles."""
    return tl.load(option[0] + b * option[1] + h * option[2] + s * option[3], mask=live, other=0)


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


def combine(parts: torch.Tensor, stats: torch.Tensor, output: torch.Tensor, splits: int, dtype: torch.dtype) -> torch.Tensor:
    """Writes the output, (..., GROUP, width), and returns log sum exp, (..., GROUP)."""
    group, width = output.shape[-2:]
    lse, dims = output.new_empty(output.shape[:-1], dtype=dtype), min(64, padded(width))
    combine_kernel[(lse.numel() // group, triton.cdiv(width, dims))](
        parts, stats, output, lse, splits, width, GROUP=group, HEADS=padded(group), DIMS=dims
    )
    return lse
