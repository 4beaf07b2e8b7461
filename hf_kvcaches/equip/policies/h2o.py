"""H2O: what received most attention from all queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class H2OPolicy(Policy):
    """Keeps the tokens that received most attention from all queries since they came.

    H2O (Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048): a small set of tokens gets
    most of the attention and can be told by its running sum. Half of the budget holds the newest tokens.

    **Departs from the paper**: heads that share keys are averaged. `average=True` is kvpress' ObservedAttentionPress and no longer
    favours tokens for their age.

    Args:
        average: Divide the sum by the number of queries that could see the token.
    """

    name = "h2o"
    directions = False
    in_graphs = True
    observes = None
    average: bool = False

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, min(budget // 2, budget - sinks))

    @property
    def scores_are_sums(self) -> bool:  # type: ignore[override]
        return not self.average and type(self).score is H2OPolicy.score and type(self).rescore is H2OPolicy.rescore

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.observed / (tokens.seen - tokens.positions) if self.average else tokens.observed

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        return self.score(tokens)
