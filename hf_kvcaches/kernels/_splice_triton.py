"""The Triton kernel behind `splice.py`, with its launcher. Import it inside a function: it needs Triton as soon as it is imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_kvcaches.kernels._launch import padded, strided
from hf_kvcaches.kernels._shared import Layout
from hf_kvcaches.kernels.splice import Packed, Tables

# Of float16, which float32 numbers can exceed.
LARGEST = tl.constexpr(65504.0)


@triton.jit
def _numbers(at, scale_at, zero_at, dims, mask, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The numbers of a block of tokens at some of their dimensions. (tokens, dims), float32."""
    if BITS == 4:
        byte = tl.load(at[:, None] + (dims // 2)[None, :], mask=mask, other=0).to(tl.int32)
        level = ((byte >> (dims % 2 * 4)[None, :]) & 15).to(tl.float32)
    else:
        level = tl.load(at[:, None] + dims[None, :], mask=mask, other=0).to(tl.float32)
        if BITS == 8:
            level += 127
    if BITS != 0:
        scale = tl.load(scale_at[:, None] + (dims // GROUP)[None, :], mask=mask, other=0).to(tl.float32)
        level = level * scale + tl.load(zero_at[:, None] + (dims // GROUP)[None, :], mask=mask, other=0).to(tl.float32)
    return level


@triton.jit(do_not_specialize=["layer"])
def splice_kernel(
    data, scale, zero, out, slots, turn, layer, tokens, capacity,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a block of tokens of one layer and head.

    `data`, `scale`, `zero`: (pointer, strides of the first three dimensions); the last two None for plain data, whose BITS are 0.
    `out`: (pointer, strides). `slots`: (pointer, stride). `turn`: None or contiguous (cos, sin).
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h, layer = tl.program_id(1).to(tl.int64), layer.to(tl.int64)
    dims = tl.arange(0, DIM_PAD)
    slot = tl.load(slots[0] + token * slots[1], mask=token < tokens, other=-1)
    # Beyond the buffer lies another row's: better to lose a token than to spoil it.
    live = (slot >= 0) & (slot < capacity)
    mask = live[:, None] & (dims < DIM)[None, :]
    at = data[0] + layer * data[1] + h * data[2] + token * data[3]
    scale_at, zero_at = token, token
    if BITS != 0:
        scale_at = scale[0] + layer * scale[1] + h * scale[2] + token * scale[3]
        zero_at = zero[0] + layer * zero[1] + h * zero[2] + token * zero[3]
    if BITS == 0 and turn is None:
        numbers = tl.load(at[:, None] + dims[None, :], mask=mask, other=0)
    else:
        numbers = _numbers(at, scale_at, zero_at, dims, mask, BITS, GROUP)
    if turn is not None:
        # Each dimension's partner is loaded a second time, from where the first load has put it: in the cache.
        if INTERLEAVED:
            partner, pair, is_first = dims ^ 1, dims // 2, dims % 2 == 0
        else:
            partner, pair, is_first = tl.where(dims < HALF, dims + HALF, dims - HALF), dims % HALF, dims < HALF
        turns = live[:, None] & (dims < 2 * HALF)[None, :]
        other = _numbers(at, scale_at, zero_at, partner, turns, BITS, GROUP)
        table_at = token[:, None] * HALF + pair[None, :]
        cos = tl.load(turn[0] + table_at, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(turn[1] + table_at, mask=turns, other=0.0).to(tl.float32)
        numbers = numbers * cos + other * tl.where(is_first[None, :], -sin, sin)
    if BITS != 0 and out[0].dtype.element_ty == tl.float16:
        numbers = tl.where(numbers > LARGEST, LARGEST, tl.where(numbers < -LARGEST, -LARGEST, numbers))
    tl.store(out[0] + h * out[1] + slot[:, None] * out[2] + dims[None, :], numbers.to(out[0].dtype.element_ty), mask=mask)


def splice(packed: Packed, outs: Sequence[torch.Tensor], slots: torch.Tensor, tables: Tables | None, layout: Layout) -> None:
    """`splice`. Arguments are its, checked; there are tokens and layers."""
    data, group = packed.data, packed.group
    (_, heads, tokens, _), dim = data.shape, outs[0].shape[2]
    stored = [None if part is None else strided(part) for part in packed[:3]]
    turn = None if tables is None else (tables[0].contiguous(), tables[1].contiguous())
    # As many tokens as take at most 96 registers, as compiled for sm_80 and sm_90; twice as many leave room for few programs at a time.
    block = min(triton.next_power_of_2(tokens), max(1, 1024 // padded(dim)))
    for layer, out in enumerate(outs):
        splice_kernel[(triton.cdiv(tokens, block), heads)](
            *stored,
            strided(out),
            (slots, slots.stride(0)),
            turn,
            *(layer, tokens, out.shape[1]),
            DIM=dim,
            DIM_PAD=padded(dim),
            BITS={torch.int8: 8, torch.uint8: 4}.get(data.dtype, 0),
            GROUP=min(group or dim, dim),
            HALF=0 if tables is None else tables[0].shape[1],
            INTERLEAVED=layout == "interleaved",
            BLOCK=block,
        )
