"""What `rebuild.py` does, written down plainly, with loops and in float64. Arguments are its."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvcaches.kernels.arguments import Decoder, RowSpan
from hf_kvcaches.kernels.rotation import Layout, rotate_


def rebuild(
    side: torch.Tensor | None,
    codes: torch.Tensor | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[RowSpan],
    *,
    side_rows: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: Layout = "half",
) -> None:
    """Makes and writes one token of one head at a time."""
    side = side if side is None or side_rows is None else side[side_rows]
    heads, key_dim, value_dim = key_out.shape[1], key_out.shape[3], value_out.shape[3]
    largest = torch.finfo(key_out.dtype).max
    places = [(row, first + offset) for row, first, tokens in spans for offset in range(tokens)]
    for token, (row, slot) in enumerate(places):
        numbers = torch.zeros(heads * (key_dim + value_dim), dtype=torch.float64, device=key_out.device)
        if decoder.bias is not None:
            numbers += decoder.bias.double()
        if side is not None and decoder.side is not None:
            numbers += side[token].double() @ decoder.side.double()
        if codes is not None and decoder.codes is not None:
            numbers += codes[token].double() @ decoder.codes.double()
        for head in range(heads):
            key = numbers[head * key_dim : (head + 1) * key_dim]
            value = numbers[heads * key_dim + head * value_dim : heads * key_dim + (head + 1) * value_dim]
            if cos is not None and sin is not None:
                rotate_(key, cos[token], sin[token], layout)
            if key_out.dtype == torch.float16:
                key, value = key.clamp(-largest, largest), value.clamp(-largest, largest)
            key_out[row, head, slot] = key.to(key_out.dtype)
            value_out[row, head, slot] = value.to(value_out.dtype)
