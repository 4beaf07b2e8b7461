"""StreamingLLM: the sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.policies.tokens import Tokens


@dataclass(frozen=True)
class StreamingPolicy(Policy, built_in=True):
    """Keeps the sinks and the newest tokens.

    StreamingLLM (Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453): the first tokens of a text take the
    attention that no other token needs, and a model without them fails. With them and a sliding window it reads a text of any length.

    **Departs from the paper**: in nothing. The paper's positions within the cache are `positions="compact"` of the cache.
    """

    name = "streaming"
    interval = None
    order_only = True

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, budget - sinks)

    def score(self, tokens: Tokens) -> torch.Tensor:
        # Counted from the end, because float32 holds integers up to 2^24 only.
        return (tokens.positions - tokens.count).float()
