"""The smallest keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy, put_score
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class KeyNormPolicy(Policy):
    """Keeps the tokens with the smallest keys.

    A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv 2406.11430): small keys tend to receive much
    attention. The cheapest score, known before any query; it does not look at what is asked.

    **Departs from the paper**: prunes all layers; the paper leaves the first ones whole, for which the cache takes a budget per layer.
    """

    name = "knorm"
    directions = False

    def score(self, tokens: Tokens) -> torch.Tensor:
        lengths = -torch.linalg.vector_norm(tokens.keys.detach(), dim=-1, dtype=torch.float32)
        # Turning a key changes the last bit of its length, which is not to decide between equals.
        return lengths if tokens.scores is None else torch.where(tokens.scores.isnan(), lengths, tokens.scores)

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = tokens.keys.shape
        new = tokens.keys.detach().gather(2, slots[..., None].expand(batch, heads, 1, width))
        return put_score(scores, slots, -torch.linalg.vector_norm(new, dim=-1, dtype=torch.float32))
