"""Rebuilding a layer's keys and values from another model's codes: multiplied, rotated and written into the cache, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.kernels.rotation import Layout, rotate_

# Numbers that are made at a time before they are written: 32 MB in float32. Matrix products of fewer tokens take longer for each, as the
# weights are read again.
BLOCK = 2**23


class Decoder(NamedTuple):
    """The affine map to C numbers a token, floating point: [keys of head 0, keys of head 1, ..., values of head 0, ...]."""

    side: Tensor  # (d, C)
    codes: Tensor | None  # (rank, C); None where nothing is sent
    bias: Tensor  # (C,)


class RowSpan(NamedTuple):
    """Consecutive tokens and the consecutive slots of a row that they go to."""

    row: int
    first: int
    tokens: int


def product_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which type to multiply for buffers of a type: float16 does not have the range, and many CPUs multiply bfloat16 more slowly."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        found = torch.cpu.get_capabilities()
        return dtype if found.get("avx512_bf16") or found.get("amx_bf16") else torch.float32
    return torch.float32 if dtype == torch.float16 else dtype


@torch.no_grad()
def rebuild(
    side: Tensor,
    codes: Tensor | None,
    decoder: Decoder,
    key_out: Tensor,
    value_out: Tensor,
    spans: Sequence[RowSpan],
    product: torch.dtype,
    *,
    side_rows: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: Layout = "half",
) -> None:
    """Writes `side @ decoder.side + codes @ decoder.codes + decoder.bias`, keys rotated, to the slots of `spans`. Nothing else is written.

    Summed up in float32, or in float64 for float64 buffers, and cast once. Numbers beyond the range of float16 buffers become the largest
    that these hold. Arguments are not checked.

    Args:
        side: What is known of each of the N tokens beside its codes, (N, d); or of fewer, where `side_rows`, (N,), says which row each has.
        codes: What was sent of each token, (N, rank); or None.
        key_out: The cache's buffer, (batch, kv_heads, capacity, key_dim).
        spans: Where the N tokens go, in their order. No slot twice.
        product: The type in which to multiply; each of the two products is rounded to it.
        cos: Of the angle by which each key is rotated, times what the model scales it with, (N, rotary_dim / 2).
    """
    exact, heads = torch.promote_types(key_out.dtype, torch.float32), key_out.shape[1]
    widths = [heads * key_out.shape[3], heads * value_out.shape[3]]
    bias, weights = decoder.bias.to(exact)[None], decoder.side.to(product)
    sent = None if decoder.codes is None else decoder.codes.to(product)
    known = None if side_rows is None else _add_product(bias.repeat(len(side), 1), side, weights)
    for here, row, slots in _pieces(spans, max(1, BLOCK // sum(widths))):
        if known is None or side_rows is None:
            numbers = _add_product(bias.repeat(here.stop - here.start, 1), side[here], weights)
        else:
            numbers = known[side_rows[here]]
        if codes is not None and sent is not None:
            _add_product(numbers, codes[here], sent)
        keys, values = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in numbers.split(widths, 1))
        if cos is not None and sin is not None:
            rotate_(keys, cos[here], sin[here], layout)
        if key_out.dtype == torch.float16:
            numbers.clamp_(-torch.finfo(torch.float16).max, torch.finfo(torch.float16).max)
        key_out[row, :, slots], value_out[row, :, slots] = keys, values


def _add_product(total: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """Add `x @ weights`, in the type of the weights, in place."""
    return total.addmm_(x.to(total), weights) if weights.dtype == total.dtype else total.add_(x.to(weights) @ weights)


def _pieces(spans: Sequence[RowSpan], most: int) -> Iterator[tuple[slice, int, slice]]:
    """Spans in pieces of at most so many tokens: which of all tokens, their row, and their slots."""
    begin = 0
    for row, first, count in spans:
        for done in range(0, count, most):
            some = min(most, count - done)
            yield slice(begin + done, begin + done + some), row, slice(first + done, first + done + some)
        begin += count
