"""TOVA: what the last query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class TOVAPolicy(Policy):
    """Keeps the tokens that the last query attends to most, the same for all heads of a layer.

    TOVA (Transformers are Multi-State RNNs, arXiv 2401.06104) drops the token with the lowest attention of the current query.

    **Departs from the paper**: sinks and recent tokens are protected where the cache says so; the last token of a block always stays.
    """

    name = "tova"
    directions = False
    in_graphs = True
    mixes_heads = True
    observes = 1
    always_recent = 1

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.observed.mean(1, keepdim=True)

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        return self.score(tokens)
