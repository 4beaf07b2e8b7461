"""The Triton kernel behind `rebuild.py`, with its launcher. Import it inside a function: it needs Triton as soon as it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl

from hf_kvcaches.kernels.arguments import Decoder, RowSpan
from hf_kvcaches.kernels.common_triton import dot, pair_dims, rotate_some, store_clamped
from hf_kvcaches.kernels.launch import padded, strided_or_none
from hf_kvcaches.kernels.rotation import Layout, Tables


@triton.jit
def _product(x, weights, inner, count, dims, mask, sums):
    """Adds x, (tokens, inner), times some columns of the weights, (inner, dims), to the sums."""
    at = weights[0] + inner.to(tl.int64)[:, None] * weights[1] + dims[None, :] * weights[2]
    return dot(x, tl.load(at, mask=(inner < count)[:, None] & mask[None, :], other=0.0), sums)


@triton.jit
def _rows(x, token, inner, mask):
    """Numbers of a block of tokens, (tokens, inner)."""
    return tl.load(x[0] + token[:, None] * x[1] + inner[None, :] * x[2], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def rebuild_kernel(
    side, side_weights, codes, code_weights, bias, key_out, value_out, slots, tables, tokens, width, rank,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Makes the keys or the values of one head for a block of tokens, their dimensions in pairs: so all layouts are one.

    `side`, `side_weights`, `codes`, `code_weights`: (pointer, strides of both dimensions) or None. `bias`: (pointer, stride) or None.
    `key_out`, `value_out`: (pointer, strides). `slots`: row and slot of each token. `tables`: None or contiguous (cos, sin).
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    h = tl.program_id(1)
    is_key = h < KV_HEADS
    head = tl.where(is_key, h, h - KV_HEADS)
    dim, half = tl.where(is_key, KEY_DIM, VALUE_DIM), tl.where(is_key, HALF, 0)
    begin = tl.multiple_of(tl.where(is_key, head * KEY_DIM, KV_HEADS * KEY_DIM + head * VALUE_DIM), ALIGNED)
    pair, rotates, first, has_first, second, has_second = pair_dims(dim, half, PAIRS, INTERLEAVED, ALIGNED)
    one, two = tl.zeros([BLOCK, PAIRS], tl.float32), tl.zeros([BLOCK, PAIRS], tl.float32)
    if side is not None:
        for start in range(0, width, INNER):
            inner = start + tl.arange(0, INNER)
            mask = live[:, None] & (inner < width)[None, :]
            x = _rows(side, token, inner, mask)
            one = _product(x, side_weights, inner, width, begin + first, has_first, one)
            two = _product(x, side_weights, inner, width, begin + second, has_second, two)
    if codes is not None:
        for start in range(0, rank, INNER):
            inner = start + tl.arange(0, INNER)
            mask = live[:, None] & (inner < rank)[None, :]
            x = _rows(codes, token, inner, mask)
            one = _product(x, code_weights, inner, rank, begin + first, has_first, one)
            two = _product(x, code_weights, inner, rank, begin + second, has_second, two)
    if bias is not None:
        one += tl.load(bias[0] + (begin + first) * bias[1], mask=has_first, other=0.0).to(tl.float32)[None, :]
        two += tl.load(bias[0] + (begin + second) * bias[1], mask=has_second, other=0.0).to(tl.float32)[None, :]
    if tables is not None:
        one, two = rotate_some(one, two, tables, token[:, None] * HALF + pair[None, :], live[:, None] & rotates[None, :])
    row = tl.load(slots[0] + token, mask=live, other=0)
    slot = tl.load(slots[1] + token, mask=live, other=0)
    first_mask, second_mask = live[:, None] & has_first[None, :], live[:, None] & has_second[None, :]
    if is_key:
        at = (key_out[0] + row * key_out[1] + head * key_out[2] + slot * key_out[3])[:, None]
        store_clamped(at + first[None, :], one, first_mask, True)
        store_clamped(at + second[None, :], two, second_mask, True)
    else:
        at = (value_out[0] + row * value_out[1] + head * value_out[2] + slot * value_out[3])[:, None]
        store_clamped(at + first[None, :], one, first_mask, True)
        store_clamped(at + second[None, :], two, second_mask, True)


def rebuild(
    side: torch.Tensor | None,
    codes: torch.Tensor | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[RowSpan],
    tables: Tables | None,
    layout: Layout,
) -> None:
    """`rebuild`, whose arguments these are; there are tokens."""
    tokens = sum(span.tokens for span in spans)
    _, heads, _, key_dim = key_out.shape
    value_dim = value_out.shape[3]
    half = 0 if tables is None else tables[0].shape[1]
    interleaved = half > 0 and layout == "interleaved"
    pairs = padded(-(-max(key_dim, value_dim) // 2))
    block = max(16, min(triton.next_power_of_2(tokens), 64, 4096 // pairs))
    rebuild_kernel[(triton.cdiv(tokens, block), 2 * heads)](
        *strided_or_none(side, decoder.side, codes, decoder.codes, decoder.bias),
        *strided_or_none(key_out, value_out),
        _slots_of(tuple(spans), key_out.device),
        None if tables is None else (tables[0].contiguous(), tables[1].contiguous()),
        *(tokens, 0 if side is None else side.shape[1], 0 if codes is None else codes.shape[1]),
        KV_HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PAIRS=pairs,
        HALF=half,
        INTERLEAVED=interleaved,
        # A power of two that divides all sizes at which the dimensions jump.
        ALIGNED=1 if interleaved else gcd(16, key_dim, value_dim, half, (key_dim - 2 * half + 1) // 2, (value_dim + 1) // 2),
        BLOCK=block,
        INNER=32,
        num_warps=4 if block * pairs <= 4096 else 8,
    )


@lru_cache(maxsize=8)
def _slots_of(spans: tuple[RowSpan, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and slot of each token. Kept, as all layers of a prompt ask for the same, and a copy to a GPU takes longer than its kernel."""
    counts = torch.tensor([span.tokens for span in spans])
    rows = torch.tensor([span.row for span in spans]).repeat_interleave(counts)
    slots = torch.cat([torch.arange(first, first + count) for _, first, count in spans])
    return rows.to(device), slots.to(device)
