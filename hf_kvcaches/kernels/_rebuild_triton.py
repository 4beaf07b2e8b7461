"""The Triton kernel behind `rebuild.py`, with its launcher. Import it inside a function: it needs Triton as soon as it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl

from hf_kvcaches.kernels._common_triton import WIDE
from hf_kvcaches.kernels._launch import padded, strided
from hf_kvcaches.kernels._shared import Layout
from hf_kvcaches.kernels.rebuild import Codes, Decoder, Span, Tables

# Of float16, which float32 numbers can exceed.
LARGEST = tl.constexpr(65504.0)


@triton.jit
def _product(x, weights, inner, count, dims, mask, sums):
    """Adds x, (tokens, inner), times some columns of the weights, (inner, dims), to the sums."""
    at = weights[0] + inner.to(tl.int64)[:, None] * weights[1] + dims[None, :] * weights[2]
    part = tl.load(at, mask=(inner < count)[:, None] & mask[None, :], other=0.0)
    if WIDE or x.dtype != part.dtype or x.dtype == tl.float64:
        x, part = x.to(tl.float32), part.to(tl.float32)
    # Of float32 numbers, three products of what tensor cores take: as exact as one of float32, and several times as fast.
    return tl.dot(x, part, sums, input_precision="tf32x3")


@triton.jit
def _decoded(token, inner, codes, scale, zero, mask, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Codes of a block of tokens, (tokens, inner)."""
    ranks = inner.to(tl.int64)[None, :]
    if BITS == 4:
        byte = tl.load(codes[0] + (token // 2)[:, None] * codes[1] + ranks * codes[2], mask=mask, other=0).to(tl.int32)
        numbers = ((byte >> (token % 2 * 4).to(tl.int32)[:, None]) & 15).to(tl.float32)
    else:
        numbers = tl.load(codes[0] + token[:, None] * codes[1] + ranks * codes[2], mask=mask, other=0)
        if BITS == 8:
            numbers = numbers.to(tl.float32) + 127
    if BITS != 0:
        group = (token // GROUP if GROUP != 0 else token * 0)[:, None]
        steps = tl.load(scale[0] + ranks * scale[1] + group * scale[2], mask=mask, other=0.0).to(tl.float32)
        numbers = numbers * steps + tl.load(zero[0] + ranks * zero[1] + group * zero[2], mask=mask, other=0.0).to(tl.float32)
    return numbers


@triton.jit
def _store(numbers, at, dims, mask):
    kind = at.dtype.element_ty
    if kind == tl.float16:
        numbers = tl.where(numbers > LARGEST, LARGEST, tl.where(numbers < -LARGEST, -LARGEST, numbers))
    tl.store(at[:, None] + dims[None, :], numbers.to(kind), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def rebuild_kernel(
    side, side_weights, codes, scale, zero, code_weights, bias, key_out, value_out, places, turn, tokens, width, rank,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Makes the keys or the values of one head for a block of tokens.

    Dimensions are taken in pairs, those that turn together and then what is left, and the sums of a pair's first and second lie in the
    same place of two blocks: so all layouts are one.

    `side`, `side_weights`, `codes`, `code_weights`: (pointer, strides of both dimensions) or None. `codes` are tokens by rank, those in 4
    bits by two tokens. `scale`, `zero`: likewise, rank by groups; None for plain codes, whose BITS are 0. `bias`: (pointer, stride) or
    None. `key_out`, `value_out`: (pointer, strides). `places`: row and slot of each token. `turn`: None or contiguous (cos, sin).
    GROUP 0: all tokens share a scale. EVEN: how many dimensions at a time are known to lie side by side, for wide loads.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    h = tl.program_id(1)
    is_key = h < KV_HEADS
    head = tl.where(is_key, h, h - KV_HEADS)
    dim, half = tl.where(is_key, KEY_DIM, VALUE_DIM), tl.where(is_key, HALF, 0)
    begin = tl.where(is_key, head * KEY_DIM, KV_HEADS * KEY_DIM + head * VALUE_DIM)
    pair = tl.arange(0, PAIRS)
    turns, rest = pair < half, (dim - 2 * half + 1) // 2
    if INTERLEAVED:
        first, second = tl.where(turns, 2 * pair, half + pair), tl.where(turns, 2 * pair + 1, half + pair + rest)
    else:
        first, second = tl.where(turns, pair, half + pair), half + pair + tl.where(turns, 0, rest)
    begin = tl.multiple_of(begin, EVEN)
    first, second = tl.max_contiguous(tl.multiple_of(first, EVEN), EVEN), tl.max_contiguous(tl.multiple_of(second, EVEN), EVEN)
    has_first = pair < tl.multiple_of(half + rest, EVEN)
    has_second = has_first & (second < dim)
    one, two = tl.zeros([BLOCK, PAIRS], tl.float32), tl.zeros([BLOCK, PAIRS], tl.float32)
    if side is not None:
        for start in range(0, width, INNER):
            inner = start + tl.arange(0, INNER)
            mask = live[:, None] & (inner < width)[None, :]
            x = tl.load(side[0] + token[:, None] * side[1] + inner[None, :] * side[2], mask=mask, other=0.0)
            one = _product(x, side_weights, inner, width, begin + first, has_first, one)
            two = _product(x, side_weights, inner, width, begin + second, has_second, two)
    if codes is not None:
        for start in range(0, rank, INNER):
            inner = start + tl.arange(0, INNER)
            mask = live[:, None] & (inner < rank)[None, :]
            x = _decoded(token, inner, codes, scale, zero, mask, BITS, GROUP)
            one = _product(x, code_weights, inner, rank, begin + first, has_first, one)
            two = _product(x, code_weights, inner, rank, begin + second, has_second, two)
    if bias is not None:
        one += tl.load(bias[0] + (begin + first) * bias[1], mask=has_first, other=0.0).to(tl.float32)[None, :]
        two += tl.load(bias[0] + (begin + second) * bias[1], mask=has_second, other=0.0).to(tl.float32)[None, :]
    if turn is not None:
        table_at, mask = token[:, None] * HALF + pair[None, :], live[:, None] & turns[None, :]
        cos = tl.load(turn[0] + table_at, mask=mask, other=1.0).to(tl.float32)
        sin = tl.load(turn[1] + table_at, mask=mask, other=0.0).to(tl.float32)
        # Where nothing turns, not even 0 times the partner may be added: it can be infinite.
        one, two = tl.where(mask, one * cos - two * sin, one), tl.where(mask, two * cos + one * sin, two)
    row = tl.load(places[0] + token, mask=live, other=0)
    slot = tl.load(places[1] + token, mask=live, other=0)
    if is_key:
        at = key_out[0] + row * key_out[1] + head * key_out[2] + slot * key_out[3]
        _store(one, at, first, live[:, None] & has_first[None, :])
        _store(two, at, second, live[:, None] & has_second[None, :])
    else:
        at = value_out[0] + row * value_out[1] + head * value_out[2] + slot * value_out[3]
        _store(one, at, first, live[:, None] & has_first[None, :])
        _store(two, at, second, live[:, None] & has_second[None, :])


def rebuild(
    side: torch.Tensor | None,
    codes: Codes | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[Span],
    tables: Tables | None,
    layout: Layout,
) -> None:
    """`rebuild`. Arguments are its, checked; there are tokens."""
    tokens = sum(span.tokens for span in spans)
    _, heads, _, key_dim = key_out.shape
    value_dim = value_out.shape[3]
    bits = 0 if codes is None else {torch.int8: 8, torch.uint8: 4}.get(codes.data.dtype, 0)
    group = None if codes is None else codes.group
    pairs = padded(-(-max(key_dim, value_dim) // 2))
    block = max(16, min(triton.next_power_of_2(tokens), 64, 4096 // pairs))
    rebuild_kernel[(triton.cdiv(tokens, block), 2 * heads)](
        *(None if part is None else strided(part) for part in (side, decoder.side)),
        None if codes is None else strided(codes.data.t() if bits else codes.data),
        *(None if part is None else strided(part) for part in (codes or (None,) * 3)[1:3]),
        *(None if part is None else strided(part) for part in (decoder.codes, decoder.bias)),
        strided(key_out),
        strided(value_out),
        _placed(tuple(spans), key_out.device),
        None if tables is None else (tables[0].contiguous(), tables[1].contiguous()),
        *(tokens, 0 if side is None else side.shape[1], 0 if codes is None else codes.rank),
        KV_HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PAIRS=pairs,
        HALF=0 if tables is None else tables[0].shape[1],
        INTERLEAVED=layout == "interleaved",
        EVEN=_even(key_dim, value_dim, tables, layout),
        BITS=bits,
        GROUP=group if group and group < tokens else 0,
        BLOCK=block,
        INNER=32,
        num_warps=4 if block * pairs <= 4096 else 8,
    )


def _even(key_dim: int, value_dim: int, tables: Tables | None, layout: Layout) -> int:
    """A power of two that divides all sizes at which the dimensions of `rebuild_kernel` jump."""
    half = 0 if tables is None else tables[0].shape[1]
    if half and layout == "interleaved":
        return 1
    return gcd(16, key_dim, value_dim, half, (key_dim - 2 * half + 1) // 2, (value_dim + 1) // 2)


@lru_cache(maxsize=8)
def _placed(spans: tuple[Span, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and slot of each token. Kept, as all layers of a prompt ask for the same, and a copy to a GPU takes longer than its kernel."""
    counts = torch.tensor([span.tokens for span in spans])
    rows = torch.tensor([span.row for span in spans]).repeat_interleave(counts)
    slots = torch.cat([torch.arange(first, first + count) for _, first, count in spans])
    return rows.to(device), slots.to(device)
