"""What the functions of `coefficients.py` compute, written down plainly, with loops and in float64. Arguments and results are theirs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import torch

from hf_kvcaches.kernels._coefficients_checks import TILE, Coefficients, Options, Part, Rotation, computing, nothing


def coefficient_attention_reference(query: torch.Tensor, keys: Coefficients, values: Coefficients, scaling: float, **options: Any) -> Part:
    """What `coefficient_attention` computes, written down plainly: all tokens are decoded."""
    valid, rotation, key_basis_of, value_basis_of, softcap = Options(**options)
    batch, kv_heads, tokens, _ = keys.data.shape
    plain = []
    for side, basis_of in ((keys, key_basis_of), (values, value_basis_of)):
        decoded = torch.zeros(batch, kv_heads, tokens, side.decode.shape[-2], dtype=torch.float64, device=query.device)
        for b, h, t in product(range(batch), range(kv_heads), range(tokens)):
            tile = t // TILE
            coefficients = side.data[b, h, t].double()
            if side.scale is not None:
                coefficients = coefficients * side.scale[b, h, tile].double()
            decode = side.decode[h] if side.decode.ndim == 3 else side.decode[b, h, 0 if basis_of is None else int(basis_of[b, h, tile])]
            decoded[b, h, t] = decode.double() @ coefficients
        plain.append(decoded)
    if rotation is not None:
        shown = torch.ones(batch, kv_heads, tokens, dtype=torch.bool) if valid is None else valid.expand(batch, kv_heads, tokens)
        for b, t in product(range(batch), range(tokens)):
            if shown[b, :, t].any():
                plain[0][b, :, t] = _rotated_reference(plain[0][b, :, t], rotation, b, t)
    return exact_attention_reference(query, plain[0], plain[1], scaling, valid, softcap)


def _rotated_reference(keys: torch.Tensor, rotation: Rotation, row: int, token: int) -> torch.Tensor:
    if rotation.positions is not None:
        position = int(rotation.positions[row % len(rotation.positions), token])
    else:
        position = token + int(rotation.start if isinstance(rotation.start, int) else rotation.start[row])
    keys, pairs = keys.clone(), len(rotation.inv_freq)
    for i in range(pairs):
        first, second = (i, i + pairs) if rotation.layout == "half" else (2 * i, 2 * i + 1)
        angle = rotation.inv_freq[i].double() * position
        one, two = keys[..., first].clone(), keys[..., second].clone()
        keys[..., first] = (one * angle.cos() - two * angle.sin()) * rotation.attention_scaling
        keys[..., second] = (two * angle.cos() + one * angle.sin()) * rotation.attention_scaling
    return keys


def exact_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Part:
    """What `exact_attention` computes, written down plainly."""
    batch, kv_heads, tokens, _ = keys.shape
    heads = query.shape[1]
    shown = torch.ones(batch, kv_heads, tokens, dtype=torch.bool) if valid is None else valid.expand(batch, kv_heads, tokens)
    output, lse = nothing(query.double(), values.shape[-1])
    for b, head in product(range(batch), range(heads)):
        h = head // (heads // kv_heads)
        chosen = shown[b, h].nonzero().flatten()
        if not len(chosen):
            continue
        scores = keys[b, h, chosen].double() @ query[b, head, 0].double() * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        output[b, 0, head] = scores.softmax(0) @ values[b, h, chosen].double()
        lse[b, head] = scores.logsumexp(0)
    return output.to(query.dtype), lse


def merge_attention_reference(parts: Iterable[Part]) -> Part:
    """What `merge_attention` computes, written down plainly: the sums of all parts, brought to one maximum."""
    given = list(parts)
    highest = torch.stack([lse.double() for _, lse in given]).amax(0).clamp(min=torch.finfo(torch.float64).min)
    total = sum((lse.double() - highest).exp() for _, lse in given)
    sums = sum((lse.double() - highest).exp()[:, None, :, None] * output.double() for output, lse in given)
    assert isinstance(total, torch.Tensor)
    output = sums / total.masked_fill(total == 0, 1)[:, None, :, None]
    return output.to(given[0][0].dtype), total.log() + highest


def quantize_tiles_reference(coefficients: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> Part:
    """What `quantize_tiles` computes, written down plainly."""
    batch, kv_heads, tokens, _ = coefficients.shape
    data = torch.zeros_like(coefficients, dtype=torch.int8)
    scale = torch.zeros(batch, kv_heads, tokens // TILE, dtype=scale_dtype, device=coefficients.device)
    for b, h, tile in product(range(batch), range(kv_heads), range(tokens // TILE)):
        here = slice(tile * TILE, (tile + 1) * TILE)
        part = coefficients[b, h, here].to(computing(coefficients))
        scale[b, h, tile] = (part.abs().max() / 127).to(scale_dtype)
        if scale[b, h, tile] > 0:
            data[b, h, here] = (part / scale[b, h, tile].to(part.dtype)).round().clamp(-127, 127).to(torch.int8)
    return data, scale
