"""What `codes.py` and `parts.py` do, written down plainly, with loops and in float64: every token's key is decoded and rotated."""

import math
from itertools import product

import torch

from hf_kvcaches.kernels.code_format import PLANES, TILE, Counts
from hf_kvcaches.kernels.codes import CodeMap, TileRotation
from hf_kvcaches.kernels.rotation import rotate_


def levels_of(codes: torch.Tensor, counts: Counts) -> torch.Tensor:
    """The levels, and 1 behind them, (batch, groups, levels + 1, tokens)."""
    levels, row = [], 0
    for bits, count in zip(PLANES, counts, strict=True):
        rows = count * bits // 8
        for part in range(count):
            byte = codes[:, :, row + part % rows].long()
            levels.append((byte >> bits * (part // rows)) % 2**bits - 2 ** (bits - 1))
        row += rows
    return torch.stack([*levels, torch.ones(codes.shape[:2] + codes.shape[3:], dtype=torch.long)], 2).double()


def decoded(codes: torch.Tensor, code_map: CodeMap, rotation: TileRotation | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, rotated by the angles of their tiles, and values, (batch, kv_heads, tokens, dim) each."""
    (batch, groups, _, tokens), heads = codes.shape, code_map.keys.shape[1]
    levels = levels_of(codes, code_map.counts)
    keys = torch.zeros(batch, groups * heads, tokens, code_map.keys.shape[2], dtype=torch.float64)
    values = torch.zeros(batch, groups * heads, tokens, code_map.values.shape[2], dtype=torch.float64)
    for b, g, h, token in product(range(batch), range(groups), range(heads), range(tokens)):
        key = code_map.keys[g, h].double() @ levels[b, g, :, token]
        if rotation is not None:
            row = b if len(rotation.cos) > 1 else 0
            rotate_(key, rotation.cos[row, token // TILE], rotation.sin[row, token // TILE], rotation.layout)
        keys[b, g * heads + h, token] = key
        values[b, g * heads + h, token] = code_map.values[g, h].double() @ levels[b, g, :, token]
    return keys, values


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    visible: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, one query at a time: the output, (batch, queries, heads, value_dim), and log sum exp, (batch, heads, queries)."""
    (batch, heads, queries, _), (kv_heads, tokens) = query.shape, keys.shape[1:3]
    shown = torch.ones(batch, queries, tokens, dtype=torch.bool) if visible is None else visible.expand(batch, queries, tokens)
    output = torch.zeros(batch, queries, heads, values.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    for b, head, q in product(range(batch), range(heads), range(queries)):
        h = head // (heads // kv_heads)
        seen = [token for token in range(tokens) if shown[b, q, token]]
        if seen:
            scores = keys[b, h, seen].double() @ query[b, head, q].double() * scaling
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            output[b, q, head] = scores.softmax(0) @ values[b, h, seen].double()
            lse[b, head, q] = scores.logsumexp(0)
    return output, lse
