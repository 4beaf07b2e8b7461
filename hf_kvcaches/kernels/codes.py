"""Attention over tokens that are kept as codes of fixed widths; `code_format.py` says how they lie.

Paper: Online Subspace Projection for KV Caches, sections 4 and 6. No key is decoded: the query is projected into the basis of the codes and
multiplied with these, and values are summed up as codes and decoded once. For that keys have no rotation but the one from the first token
of their tile to their own position; the query is rotated back by the position of each tile's first token before it is projected.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.kernels.attention import AttentionPart, exponentials, joined
from hf_kvcaches.kernels.code_format import TILE, Counts, unpack
from hf_kvcaches.kernels.launch import Backend, choose
from hf_kvcaches.kernels.rotation import Layout, rotated_back

# Levels of a block: 1 MB in float32, so that they are still in cache when values are summed up.
_BLOCK = 2**18
# Tokens that a block has at least, however many rows there are: matrix products of few columns are slow.
_LEAST = 128


class CodeMap(NamedTuple):
    """What codes stand for: the key of a head is `keys[group, head] @ [levels, 1]`, its value the same."""

    counts: Counts
    keys: Tensor  # (groups, heads of a group, dim, levels + 1)
    values: Tensor


class TileRotation(NamedTuple):
    """By what the query is rotated back: the angles of the position of each tile's first token, with the model's attention scaling."""

    cos: Tensor  # (batch or 1, tiles, pairs), float32 or float64
    sin: Tensor
    layout: Layout


def code_part(
    query: Tensor,
    codes: Tensor,
    code_map: CodeMap,
    scaling: float,
    *,
    rotation: TileRotation | None = None,
    visible: Tensor | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
) -> AttentionPart:
    """Attention of a few queries over codes, (batch, groups, rows, tokens), with `rotation` whole tiles; arguments as in `exact_part`."""
    if choose(backend, query) == "triton":
        from hf_kvcaches.kernels import codes_triton

        return codes_triton.code_part(query, codes, code_map, scaling, rotation, visible, softcap)
    query = query.to(torch.float64 if query.dtype == torch.float64 else torch.float32) * scaling
    keys, values = code_map.keys.to(query.dtype), code_map.values.to(query.dtype)
    (batch, heads, queries, dim), (groups, kv_heads, _, width), tokens = query.shape, keys.shape, codes.shape[-1]
    # What is multiplied with one basis lies together.
    asking = query.reshape(batch, groups, kv_heads, 1, -1, dim).permute(1, 2, 0, 3, 4, 5)  # [G, KV, B, 1, Q, D]
    most, parts = max(_LEAST, _BLOCK // (groups * width * batch) // TILE * TILE), []
    for start in range(0, tokens, most):
        block, turned = slice(start, min(start + most, tokens)), asking
        levels = _levels(codes[..., block], code_map.counts, query.dtype)  # [B, G, levels + 1, T]
        if rotation is not None:
            cos, sin = (table[:, block.start // TILE : block.stop // TILE, None] for table in rotation[:2])
            turned = rotated_back(asking.expand(-1, -1, -1, cos.shape[1], -1, -1), cos, sin, rotation.layout)
        projected = torch.einsum("gkbtqd,gkdw->bgtkqw", turned, keys).flatten(3, 4)  # [B, G, tiles or 1, KV * Q, levels + 1]
        scores = projected @ levels.unflatten(-1, (turned.shape[3], -1)).transpose(2, 3)
        scores = scores.transpose(2, 3).reshape(batch, heads, queries, -1)
        weights, highest = exponentials(scores, None if visible is None else visible[..., block], softcap)
        sums = (weights.view(batch, groups, -1, weights.shape[-1]) @ levels.mT).view(batch, heads, queries, width)
        parts.append(AttentionPart(sums, sums[..., -1:], highest))  # the last sum is that of the exponentials
        del levels  # The next block gets their memory, which is still in cache.
    sums, total, highest = joined(parts)
    decoded = torch.einsum("bgkqw,gkdw->bgkqd", sums.view(batch, groups, kv_heads, -1, width), values)
    return AttentionPart(decoded.reshape(batch, heads, queries, -1), total, highest)


def decode(codes: Tensor, code_map: CodeMap, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys, rotated within their tiles where they were encoded so, and values of codes: (batch, kv_heads, tokens, dim) each."""
    levels = _levels(codes, code_map.counts, torch.promote_types(dtype, torch.float32)).mT[:, :, None]  # [B, G, 1, T, levels + 1]
    keys, values = ((levels @ decode.to(levels.dtype).mT).flatten(1, 2).to(dtype) for decode in (code_map.keys, code_map.values))
    return keys, values


def _levels(codes: Tensor, counts: Counts, dtype: torch.dtype) -> Tensor:
    """The levels of codes, and 1 behind them: (..., groups, levels + 1, tokens)."""
    levels = torch.empty(*codes.shape[:-2], sum(counts) + 1, codes.shape[-1], dtype=dtype, device=codes.device)
    levels[..., :-1, :] = unpack(codes, counts)
    levels[..., -1, :].fill_(1)
    return levels
