"""Key norms: small keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy, put_score
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class KeyNormPolicy(Policy):
    """Keeps the tokens with the smallest keys.

    A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv 2406.11430): small keys tend to receive much
    attention. The cheapest score; it does not depend on the question.

    **Departs from the paper**: prunes all layers; the paper skips the first ones, for which the cache takes a budget per layer.
    """

    name = "knorm"
    directions = False

    def score(self, tokens: Tokens) -> torch.Tensor:
        scores = -torch.linalg.vector_norm(tokens.keys.detach(), dim=-1, dtype=torch.float32)
        # Rotating a key changes the last bit of its norm, which must not decide between equal keys.
        return scores if tokens.scores is None else torch.where(tokens.scores.isnan(), scores, tokens.scores)

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        keys = tokens.keys.detach().take_along_dim(slots[..., None], 2)
        return put_score(scores, slots, -torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32))
