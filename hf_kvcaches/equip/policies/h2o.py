"""H2O: heavy hitters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.policies.tokens import Tokens


@dataclass(frozen=True)
class H2OPolicy(Policy, built_in=True):
    """Keeps the tokens that received most attention from all queries since they came.

    H2O (Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048): the running sum of attention
    identifies the few tokens that get most of it. Half of the budget holds the newest tokens.

    **Departs from the paper**: sinks stay, a token is evicted before the new query attends, and heads that share keys are averaged.
    """

    name = "h2o"
    interval = None
    observes = None
    first_score = 0.0
    comparable = True

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, min(budget // 2, budget - sinks))

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.observed

    def watch(self, scores: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor) -> None:
        scores.add_(weights)
