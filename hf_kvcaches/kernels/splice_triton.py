"""The Triton kernel behind `splice.py`, with its launcher. Import it inside a function: it needs Triton as soon as it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.common_triton import dequantized, pair_dims, rotate_some, store_clamped
from hf_kvcaches.kernels.launch import padded, strided, strided_or_none
from hf_kvcaches.kernels.rotation import Layout, Tables


@triton.jit
def _numbers(data, scale, zero, layer, h, token, dims, mask, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The numbers of a block of tokens at some of their dimensions, (tokens, dims)."""
    dims = dims[None, :]
    at = (data[0] + layer * data[1] + h * data[2] + token * data[3])[:, None] + (dims // 2 if BITS == 4 else dims)
    scale_at, zero_at = at, at
    if BITS != 0:
        scale_at = (scale[0] + layer * scale[1] + h * scale[2] + token * scale[3])[:, None] + dims // GROUP
        zero_at = (zero[0] + layer * zero[1] + h * zero[2] + token * zero[3])[:, None] + dims // GROUP
    return dequantized(at, dims, scale_at, zero_at, mask, BITS)


@triton.jit(do_not_specialize=["layer"])
def splice_kernel(
    data, scale, zero, out, slots, tables, layer, tokens, capacity,
    DIM: tl.constexpr, PAIRS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a block of tokens of one layer and head, their dimensions in pairs.

    `data`, `scale`, `zero`: (pointer, strides of the first three dimensions); the last two None for plain data, whose BITS are 0.
    `out`: (pointer, strides). `slots`: (pointer, stride). `tables`: None or contiguous (cos, sin).
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h, layer = tl.program_id(1).to(tl.int64), layer.to(tl.int64)
    slot = tl.load(slots[0] + token * slots[1], mask=token < tokens, other=-1)
    # Beyond the buffer lies another row's: better to lose a token than to spoil it.
    live = (slot >= 0) & (slot < capacity)
    pair, rotates, first, has_first, second, has_second = pair_dims(DIM, HALF, PAIRS, INTERLEAVED, ALIGNED)
    first_mask, second_mask = live[:, None] & has_first[None, :], live[:, None] & has_second[None, :]
    one = _numbers(data, scale, zero, layer, h, token, first, first_mask, BITS, GROUP)
    two = _numbers(data, scale, zero, layer, h, token, second, second_mask, BITS, GROUP)
    if tables is not None:
        table_at, mask = token[:, None] * HALF + pair[None, :], live[:, None] & rotates[None, :]
        one, two = rotate_some(one.to(tl.float32), two.to(tl.float32), tables, table_at, mask)
    at = (out[0] + h * out[1] + slot * out[2])[:, None]
    store_clamped(at + first[None, :], one, first_mask, BITS != 0)
    store_clamped(at + second[None, :], two, second_mask, BITS != 0)


def splice(packed: Packed, outs: Sequence[torch.Tensor], slots: torch.Tensor, tables: Tables | None, layout: Layout) -> None:
    """`splice`, whose arguments these are; there are tokens and layers."""
    data, group = packed.data, packed.group
    (_, heads, tokens, _), dim = data.shape, outs[0].shape[2]
    half = 0 if tables is None else tables[0].shape[1]
    interleaved = half > 0 and layout == "interleaved"
    # As many tokens as take at most 96 registers, as compiled for sm_80 and sm_90; twice as many leave room for few programs at a time.
    block = min(triton.next_power_of_2(tokens), max(1, 1024 // padded(dim)))
    for layer, out in enumerate(outs):
        splice_kernel[(triton.cdiv(tokens, block), heads)](
            *strided_or_none(*packed[:3]),
            strided(out),
            (slots, slots.stride(0)),
            None if tables is None else (tables[0].contiguous(), tables[1].contiguous()),
            *(layer, tokens, out.shape[1]),
            DIM=dim,
            PAIRS=padded(-(-dim // 2)),
            BITS={torch.int8: 8, torch.uint8: 4}.get(data.dtype, 0),
            GROUP=min(group or dim, dim),
            HALF=half,
            INTERLEAVED=interleaved,
            ALIGNED=1 if interleaved else gcd(16, half, (dim - 2 * half + 1) // 2),
            BLOCK=block,
        )
