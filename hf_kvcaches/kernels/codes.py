"""Attention over tokens that are kept as codes of fixed widths; `code_format.py` says how they lie.

Paper: Online Subspace Projection for KV Caches, sections 4 and 6. No key is decoded: the query is projected into the basis of the codes and
multiplied with these, and values are summed up as codes and decoded once. For that keys have no rotation but the one from the first token
of their tile to their own position; the query is rotated back by the position of each tile's first token before it is projected.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.kernels.code_format import TILE, Counts, unpack
from hf_kvcaches.kernels.launch import Backend, choose
from hf_kvcaches.kernels.parts import AttentionPart, exponentials
from hf_kvcaches.kernels.rotation import Layout, rotated_back

# Levels of a block: 1 MB in float32, so that they are still in cache when values are summed up.
_BLOCK = 2**18
# Tokens a block should have at least, if need be by taking fewer rows: matrix products of few columns are slow.
_LONG = 256


class CodeMap(NamedTuple):
    """What codes stand for: the key of a head is `keys[group, head] @ [levels, 1]`, its value likewise.

    Args:
        counts: Of the levels.
        keys: (groups, heads of a group, dim, levels + 1).
        values: Like `keys`, with the dimension of values.
    """

    counts: Counts
    keys: torch.Tensor
    values: torch.Tensor


class TileRotation(NamedTuple):
    """By what the query is rotated back: the angles of the position of each tile's first token, with the model's attention scaling.

    Args:
        cos: (batch or 1, tiles, pairs), float32 or float64; and `sin`.
        layout: Which dimensions form a pair: see `rotation.rotate_`. Those beyond all pairs stay as they are.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout


def code_part(
    query: torch.Tensor,
    codes: torch.Tensor,
    code_map: CodeMap,
    scaling: float,
    *,
    rotation: TileRotation | None = None,
    visible: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
) -> AttentionPart:
    """Attention over codes, to be merged with that over other tokens. Tensors are those of a cache, and are not checked.

    Args:
        query: (batch, heads, queries, dim), as the model rotated it; a few queries at a time. Consecutive heads share a key head.
        codes: (batch, groups, rows, tokens), uint8, the last dimension contiguous; with `rotation` whole tiles.
        visible: Which tokens a query sees, (batch or 1, queries or 1, tokens), or None for all.
        softcap: If given, scores are softcap * tanh(scores * scaling / softcap).
        backend: "torch", "triton" (CUDA, no gradients), or "auto": Triton for CUDA tensors.
    """
    if choose(backend, query) == "triton":
        from hf_kvcaches.kernels import codes_triton

        return codes_triton.code_part(query, codes, code_map, scaling, rotation, visible, softcap)
    (batch, heads, queries, dim), (groups, kv_heads, _, width) = query.shape, code_map.keys.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # [G, KV, B, 1, Q, D]: what is multiplied with one basis lies together.
    asking = (query.to(dtype) * scaling).reshape(batch, groups, kv_heads, 1, -1, dim).permute(1, 2, 0, 3, 4, 5)
    keys, found = code_map.keys.to(dtype), []
    row_blocks, blocks = _blocks(codes, width)
    for rows in row_blocks:
        parts = []
        for tokens in blocks:
            levels = _levels(codes[rows, :, :, tokens], code_map.counts, dtype)  # [B, G, levels + 1, T]
            projected = _projected(asking[:, :, rows], keys, rotation, rows, tokens)  # [B, G, tiles or 1, KV * Q, levels + 1]
            if rotation is None:
                scores = projected[:, :, 0] @ levels
            else:
                scores = (projected @ levels.unflatten(-1, (-1, TILE)).permute(0, 1, 3, 2, 4)).transpose(2, 3).flatten(3)
            seen = None if visible is None else visible[rows if len(visible) == batch else slice(None), :, tokens]
            weights, highest = exponentials(scores.reshape(len(scores), heads, queries, -1), seen, softcap)
            parts.append((weights.view_as(scores) @ levels.mT, highest))  # The last sum is that of the exponentials.
            del levels  # The next block gets their memory, which is still in cache.
        found.append(_decoded(parts, code_map.values.to(dtype), queries))
    return found[0] if len(found) == 1 else AttentionPart(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))


def decode(codes: torch.Tensor, code_map: CodeMap, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, rotated within their tiles where they were encoded so, and values of codes: (batch, kv_heads, tokens, dim) each."""
    levels = _levels(codes, code_map.counts, torch.promote_types(dtype, torch.float32)).mT[:, :, None]  # [B, G, 1, T, levels + 1]
    keys, values = ((levels @ decode.to(levels.dtype).mT).flatten(1, 2).to(dtype) for decode in (code_map.keys, code_map.values))
    return keys, values


def _blocks(codes: torch.Tensor, width: int) -> tuple[list[slice], list[slice]]:
    """Some rows at a time, and the blocks of tokens of each: whole tiles, but for the last one."""
    batch, groups, _, tokens = codes.shape
    one = groups * width
    rows = min(batch, max(1, _BLOCK // (one * min(tokens, _LONG))))
    most = max(TILE, _BLOCK // (one * rows) // TILE * TILE)
    blocks = [slice(start, min(start + most, tokens)) for start in range(0, tokens, most)]
    return [slice(row, min(row + rows, batch)) for row in range(0, batch, rows)], blocks


def _levels(codes: torch.Tensor, counts: Counts, dtype: torch.dtype) -> torch.Tensor:
    """The levels of codes, and 1 behind them: (batch, groups, levels + 1, tokens)."""
    batch, groups, _, tokens = codes.shape
    levels = torch.empty(batch, groups, sum(counts) + 1, tokens, dtype=dtype, device=codes.device)
    levels[:, :, :-1] = unpack(codes, counts)
    levels[:, :, -1] = 1
    return levels


def _projected(asking: torch.Tensor, keys: torch.Tensor, rotation: TileRotation | None, rows: slice, tokens: slice) -> torch.Tensor:
    """The query in the basis of the codes, rotated back for each tile, (batch, groups, tiles or 1, kv_heads * queries, levels + 1)."""
    if rotation is not None:
        tiles = slice(tokens.start // TILE, tokens.stop // TILE)
        rows = rows if len(rotation.cos) > 1 else slice(None)
        cos, sin = rotation.cos[rows, tiles, None], rotation.sin[rows, tiles, None]
        asking = rotated_back(asking.expand(-1, -1, -1, cos.shape[1], -1, -1), cos, sin, rotation.layout)
    projected = asking.flatten(2, 4) @ keys
    return projected.unflatten(2, asking.shape[2:5]).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)


def _decoded(parts: list[tuple[torch.Tensor, torch.Tensor]], values: torch.Tensor, queries: int) -> AttentionPart:
    """The part of sums of levels over blocks of tokens, (batch, groups, kv_heads * queries, levels + 1), each with its highest score."""
    if len(parts) == 1:
        [(sums, highest)] = parts
    else:
        each = torch.stack([highest for _, highest in parts])
        highest = each.amax(0)
        shares = (each - highest).exp_()
        sums = sum(own * share.view(*own.shape[:3], 1) for (own, _), share in zip(parts, shares, strict=True))
    batch, groups, _, width = sums.shape
    total = sums[..., -1:].reshape(batch, -1, queries, 1)
    by_head = sums.reshape(batch, groups, values.shape[1], -1, width).permute(1, 2, 0, 3, 4)
    decoded = by_head.flatten(2, 3) @ values.mT  # [G, KV, B * Q, dim]
    decoded = decoded.unflatten(2, (batch, -1)).permute(2, 0, 1, 3, 4)
    return AttentionPart(decoded.reshape(batch, -1, queries, values.shape[2]), total, highest)
