"""Attention of one new token over everything before it, where reading keys and values is all the cost."""

from __future__ import annotations

import torch


def decode_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of one query token a row, for CPUs.

    Scores are computed as keys times queries, tokens first: every key is read once for all heads that share it, in the order
    in which it lies in memory. PyTorch's fused kernel is made for many queries and reads half as fast here.

    Args:
        query: (batch, heads, 1, head_dim); consecutive heads share a key head.
        keys: (batch, kv_heads, tokens, head_dim); the tokens may be the first slots of a larger buffer.
        values: (batch, kv_heads, tokens, value_dim), likewise.
        scaling: Of the scores.
        mask: True where a token takes part, (batch, 1, 1, tokens), at least one a row; None for everywhere.

    Returns:
        (batch, 1, heads, value_dim).
    """
    batch, heads, _, dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    grouped = (query * scaling).reshape(batch * kv_heads, heads // kv_heads, dim)
    scores = torch.bmm(keys.flatten(0, 1), grouped.transpose(1, 2)).transpose(1, 2)
    if mask is not None:
        apart = scores.view(batch, kv_heads, heads // kv_heads, tokens)
        scores = apart.masked_fill(~mask, -torch.inf).view(batch * kv_heads, heads // kv_heads, tokens)
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(batch, 1, heads, values.shape[-1])


def decode_attention_reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """What `decode_attention` computes, written down plainly. Arguments and result are the same."""
    shared = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(shared, dim=1) for tensor in (keys, values))
    scores = torch.einsum("bhqd,bhtd->bhqt", query, keys) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("bhqt,bhtd->bqhd", scores.softmax(-1), values)
