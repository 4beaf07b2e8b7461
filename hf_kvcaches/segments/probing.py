"""How much a segment's keys would differ if they were computed where they now stand."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Looked(NamedTuple):
    """A probe."""

    start: int
    stop: int
    score: float


def agreement(query: torch.Tensor, cached: torch.Tensor, fresh: torch.Tensor) -> float:
    """The cosine between the scores that queries give cached keys, and those that they give fresh ones: the mean over queries and heads.

    Args:
        query: (heads, queries, head_dim).
        cached: (kv_heads, keys, head_dim).
    """
    grouped = query.float().reshape(cached.shape[0], -1, query.shape[-1])
    first, second = (grouped @ keys.float().mT for keys in (cached, fresh))
    return float(torch.nn.functional.cosine_similarity(first, second, dim=-1).mean())
