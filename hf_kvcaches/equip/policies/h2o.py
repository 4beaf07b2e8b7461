"""H2O: heavy hitters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class H2OPolicy(Policy, built_in=True):
    """Keeps the tokens that received most attention from all queries since they came.

    H2O (Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048): the running sum of attention
    identifies the few tokens that get most of it. Half of the budget holds the newest tokens.

    **Departs from the paper**: sinks stay, a token is evicted before the new query attends, and heads that share keys are averaged.

    Args:
        average: Divide the sum by the number of queries that could see the token, as kvpress's `ObservedAttentionPress`.
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
        return not self.average and type(self).score is H2OPolicy.score and type(self).rescore is Policy.rescore

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.observed / (tokens.seen - tokens.positions) if self.average else tokens.observed
