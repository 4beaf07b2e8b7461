"""Key norms: small keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class KeyNormPolicy(Policy, built_in=True):
    """Keeps the tokens with the smallest keys.

    A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv 2406.11430): small keys tend to receive much
    attention. The cheapest score; it does not depend on the question.

    **Departs from the paper**: prunes all layers; the paper skips the first ones, for which the cache takes a budget per layer.
    """

    name = "knorm"
    directions = False
    alone = True

    def score(self, tokens: Tokens) -> torch.Tensor:
        scores = -torch.linalg.vector_norm(tokens.keys.detach(), dim=-1, dtype=torch.float32)
        # Rotating a key changes the last bit of its norm, which must not decide between equal keys.
        return scores if tokens.scores is None else torch.where(tokens.scores.isnan(), scores, tokens.scores)
