"""Writing stored keys and values into a running cache at new positions: dequantized, rotated and written in one go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from hf_kvcaches.kernels.launch import Backend, choose
from hf_kvcaches.kernels.quantization import Packed, dequantize
from hf_kvcaches.kernels.rotation import Layout, Tables, rotate_

# Numbers that are dequantized at a time: 1 MB in float32 and at most twice as much besides. A quarter or four times as many take a seventh
# longer or more, for 32 layers of 8 heads of 128 on a CPU with 2 MB of second-level cache.
BLOCK = 2**18


@torch.no_grad()
def splice(
    packed: Packed,
    outs: Sequence[Tensor],
    slots: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: Layout = "half",
    backend: Backend = "auto",
) -> None:
    """Dequantizes tokens, rotates them, and writes them in place: `outs[l][h, slots[t]]` from `packed.data[l, h, t]`, and nothing else.

    Computed in float32, or in float64 for float64 `outs`, and cast once. Plain data that are not rotated are copied bit for bit where
    dtypes agree. Dequantized numbers beyond the range of float16 `outs` become the largest that these hold. Arguments are not checked.

    Args:
        outs: One (heads, capacity, dim) a layer, of one dtype, the last dimension contiguous: one row of the buffers.
        slots: (tokens,), int64, none of them twice.
        cos: Of the angle by which each token is rotated, (tokens, rotary_dim / 2); None for values, and for keys that stay where they were.
    """
    if not outs or not slots.numel():
        return None
    tables = None if cos is None or sin is None else (cos, sin)
    if choose(backend, outs[0]) == "torch":
        return _splice_torch(packed, outs, slots, tables, layout)
    from hf_kvcaches.kernels import splice_triton

    return splice_triton.splice(packed, outs, slots, tables, layout)


def _splice_torch(packed: Packed, outs: Sequence[Tensor], slots: Tensor, tables: Tables | None, layout: Layout) -> None:
    data, scale, zero, group = packed
    layers, heads, tokens, _ = data.shape
    dim, dtype = outs[0].shape[2], outs[0].dtype
    exact = torch.promote_types(dtype, torch.float32)
    # Consecutive slots are written faster. On a GPU this would have to be waited for.
    start = int(slots[0]) if slots.device.type == "cpu" and torch.equal(slots, slots[0] + torch.arange(tokens)) else None
    token_step = max(1, min(tokens, BLOCK // max(1, heads * dim)))
    layer_step = max(1, BLOCK // max(1, heads * dim * token_step))
    for layer, token in product(range(0, layers, layer_step), range(0, tokens, token_step)):
        here = slice(token, token + token_step)
        block = (slice(layer, layer + layer_step), slice(None), here)
        numbers = data[block]
        if scale is not None and zero is not None:
            numbers = dequantize(numbers, scale[block], zero[block], dim, group, exact)
        elif tables is not None:
            numbers = numbers.to(exact, copy=True)  # what is stored must stay as it is
        if tables is not None:
            rotate_(numbers, tables[0][here], tables[1][here], layout)
        if scale is not None and dtype == torch.float16:
            numbers.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        for out, new in zip(outs[layer : layer + layer_step], numbers, strict=True):
            if start is None:
                out.index_copy_(1, slots[here], new.to(dtype))
            else:
                out[:, start + token : start + token + new.shape[1]] = new
