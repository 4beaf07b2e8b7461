"""The Triton kernel behind `splice.py`, with its launcher. Import it inside a function: it needs Triton as soon as it is imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_kvcaches.kernels.common_triton import partners, rotated
from hf_kvcaches.kernels.launch import padded, strided
from hf_kvcaches.kernels.quantization import Packed
from hf_kvcaches.kernels.rotation import Layout, Tables

# Of float16, which float32 numbers can exceed.
LARGEST = tl.constexpr(65504.0)


@triton.jit
def _numbers(data, scale, zero, layer, h, token, dims, mask, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The numbers of a block of tokens at some of their dimensions, (tokens, dims)."""
    at = (data[0] + layer * data[1] + h * data[2] + token * data[3])[:, None]
    if BITS == 0:
        numbers = tl.load(at + dims[None, :], mask=mask, other=0.0)
        if numbers.dtype == tl.float64:  # which Triton's interpreter does not cast to bfloat16
            numbers = numbers.to(tl.float32)
    else:
        if BITS == 4:
            levels = (tl.load(at + dims[None, :] // 2, mask=mask, other=0).to(tl.int32) >> (dims % 2 * 4)[None, :]) & 15
        else:
            levels = tl.load(at + dims[None, :], mask=mask, other=0).to(tl.int32) + 127
        scale_at = (scale[0] + layer * scale[1] + h * scale[2] + token * scale[3])[:, None] + dims[None, :] // GROUP
        zero_at = (zero[0] + layer * zero[1] + h * zero[2] + token * zero[3])[:, None] + dims[None, :] // GROUP
        steps = tl.load(scale_at, mask=mask, other=0.0).to(tl.float32)
        numbers = levels.to(tl.float32) * steps + tl.load(zero_at, mask=mask, other=0.0).to(tl.float32)
    return numbers


@triton.jit(do_not_specialize=["layer"])
def splice_kernel(
    data, scale, zero, out, slots, tables, layer, tokens, capacity,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a block of tokens of one layer and head.

    `data`, `scale`, `zero`: (pointer, strides of the first three dimensions); the last two None for plain data, whose BITS are 0.
    `out`: (pointer, strides). `slots`: (pointer, stride). `tables`: None or contiguous (cos, sin).
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h, layer, dims = tl.program_id(1).to(tl.int64), layer.to(tl.int64), tl.arange(0, DIM_PAD)
    slot = tl.load(slots[0] + token * slots[1], mask=token < tokens, other=-1)
    # Beyond the buffer lies another row's: better to lose a token than to spoil it.
    live = (slot >= 0) & (slot < capacity)
    mask = live[:, None] & (dims < DIM)[None, :]
    numbers = _numbers(data, scale, zero, layer, h, token, dims, mask, BITS, GROUP)
    if tables is not None:
        rotates = live[:, None] & (dims < 2 * HALF)[None, :]
        others = _numbers(data, scale, zero, layer, h, token, partners(dims, HALF, INTERLEAVED), rotates, BITS, GROUP)
        numbers = rotated(numbers, others, dims, tables, token * HALF, rotates, HALF, INTERLEAVED)
    if BITS != 0 and out[0].dtype.element_ty == tl.float16:
        numbers = tl.where(numbers > LARGEST, LARGEST, tl.where(numbers < -LARGEST, -LARGEST, numbers))
    at = (out[0] + h * out[1] + slot * out[2])[:, None] + dims[None, :]
    tl.store(at, numbers.to(out[0].dtype.element_ty), mask=mask)


def splice(packed: Packed, outs: Sequence[Tensor], slots: Tensor, tables: Tables | None, layout: Layout) -> None:
    """`splice`, whose arguments these are; there are tokens and layers."""
    data, scale, zero, group = packed
    (_, heads, tokens, _), dim = data.shape, outs[0].shape[2]
    # As many tokens as take at most 96 registers, as compiled for sm_80 and sm_90; twice as many leave room for few programs at a time.
    block = min(triton.next_power_of_2(tokens), max(1, 1024 // padded(dim)))
    for layer, out in enumerate(outs):
        splice_kernel[(triton.cdiv(tokens, block), heads)](
            *(strided(data), strided(scale), strided(zero), strided(out), (slots, slots.stride(0))),
            None if tables is None else (tables[0].contiguous(), tables[1].contiguous()),
            *(layer, tokens, out.shape[1]),
            DIM=dim,
            DIM_PAD=padded(dim),
            BITS={torch.int8: 8, torch.uint8: 4}.get(data.dtype, 0),
            GROUP=min(group or dim, dim),
            HALF=0 if tables is None else tables[0].shape[1],
            INTERLEAVED=layout == "interleaved",
            BLOCK=block,
        )
