"""What the Triton kernels of slots and of coefficients have in common. It needs Triton as soon as it is imported: only their files do."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter multiplies matrices of bfloat16 by their bits.
WIDE = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def finite(highest):
    """The running maximum, or 0 where nothing was valid: minus infinity must not be taken from itself."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def capped(scores, softcap):
    if softcap is not None:
        # The hyperbolic tangent, by an exponential that can't overflow.
        falling = tl.exp(-2 * tl.abs(scores / softcap))
        size = softcap * (1 - falling) / (1 + falling)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def option(s, live, b, h, given):
    """What an optional tensor says of slots, tokens or tiles."""
    return tl.load(given[0] + b * given[1] + h * given[2] + s * given[3], mask=live, other=0)


@triton.jit
def together(
    parts, stats, row, splits, heads, widths, GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTHS: tl.constexpr
):  # fmt: skip
    """Maximum, total and sums of one row and KV head, over all programs that shared it.

    `parts`: (batch * kv_heads, splits, GROUP, WIDTH), of which `widths`, WIDTHS of them, are wanted. `stats`: (..., 2).
    """
    told = (heads < GROUP)[:, None] & (widths < WIDTH)[None, :]
    highest, total = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, WIDTHS], tl.float32)
    for split in range(splits):
        part = (row * splits + split) * GROUP + heads
        high = tl.load(stats + part * 2, mask=heads < GROUP, other=float("-inf"))
        higher = tl.maximum(highest, high)
        shrink, share = tl.exp(highest - finite(higher)), tl.exp(high - finite(higher))
        total = total * shrink + tl.load(stats + part * 2 + 1, mask=heads < GROUP, other=0.0) * share
        sums = sums * shrink[:, None]
        sums += tl.load(parts + part[:, None] * WIDTH + widths[None, :], mask=told, other=0.0) * share[:, None]
        highest = higher
    return highest, total, sums
