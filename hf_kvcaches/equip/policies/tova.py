"""TOVA: the attention of the last query."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.policies.tokens import Tokens


@dataclass(frozen=True)
class TOVAPolicy(Policy, built_in=True):
    """Keeps the tokens that the last query attends to most, the same for all heads of a layer.

    TOVA (Transformers are Multi-State RNNs, arXiv 2401.06104) evicts the token with the lowest attention of the current query.

    **Departs from the paper**: a token is evicted before the new query attends; sinks and the newest token stay.
    """

    name = "tova"
    interval = None
    observes = 1
    by_head = False
    asks_all_heads = True

    def recent(self, budget: int, sinks: int) -> int:
        return 1

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.of_all_heads(tokens.observed).mean(1, keepdim=True)

    def watch(self, scores: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor) -> None:
        scores.copy_(torch.where(scores.isinf(), scores, weights.mean(1, keepdim=True)))
