"""Attention over parts of the tokens, each with its sum of exponentials, and the exact softmax over all of them.

Paper: Online Subspace Projection for KV Caches, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionPart(NamedTuple):
    """Attention over some tokens before it is normalized; numbers are float32, or float64 where the query is.

    Args:
        sums: Of values by their exponentials, (batch, heads, queries, value_dim).
        total: Of the exponentials, (batch, heads, queries, 1).
        highest: The score that was subtracted before, of the same shape; the least number where a query sees no token.
    """

    sums: Tensor
    total: Tensor
    highest: Tensor


def exact_part(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, visible: Tensor | None = None, softcap: float | None = None
) -> AttentionPart:
    """Attention over tokens that are kept as they are.

    Args:
        query: (batch, heads, queries, dim); consecutive heads share a key head.
        keys: (batch, kv_heads, tokens, dim); and `values`, finite also where they are not visible.
        visible: Which tokens a query sees, (batch or 1, queries or 1, tokens), or None for all.
        softcap: If given, scores are softcap * tanh(scores * scaling / softcap).
    """
    (batch, heads, queries, dim), kv_heads = query.shape, keys.shape[1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(dtype).reshape(batch, kv_heads, -1, dim) * scaling
    weights, highest = exponentials((grouped @ keys.to(dtype).mT).view(batch, heads, queries, -1), visible, softcap)
    sums = weights.view(batch, kv_heads, -1, weights.shape[-1]) @ values.to(dtype)
    return AttentionPart(sums.view(batch, heads, queries, -1), weights.sum(-1, keepdim=True), highest)


def exponentials(scores: Tensor, visible: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Exponentials of scores, (batch, heads, queries, tokens), and the score that was subtracted; overwrites the scores."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is None:
        highest = scores.amax(-1, keepdim=True)
        return scores.sub_(highest).exp_(), highest
    scores = scores.masked_fill_(~visible.unsqueeze(1), -torch.inf)
    highest = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    return scores.sub_(highest).exp_(), highest


def joined(parts: Sequence[AttentionPart]) -> AttentionPart:
    """Attention over the tokens of all parts."""
    (sums, total, highest), *others = parts
    for part in others:
        highest = torch.maximum(highest, part.highest)
    if others:
        share = (parts[0].highest - highest).exp_()
        sums, total = sums * share, total * share
    for part in others:
        share = (part.highest - highest).exp_()
        sums, total = torch.addcmul(sums, part.sums, share), torch.addcmul(total, part.total, share)
    return AttentionPart(sums, total, highest)


def merged(parts: Sequence[AttentionPart]) -> Tensor:
    """Attention over the tokens of all parts, (batch, queries, heads, value_dim); 0 where a query sees none."""
    sums, total, _ = joined(parts)
    return (sums / total.clamp_min(torch.finfo(total.dtype).tiny)).transpose(1, 2)
