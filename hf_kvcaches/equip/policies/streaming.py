"""StreamingLLM: the sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class StreamingPolicy(Policy):
    """Keeps the sinks and the newest tokens.

    StreamingLLM (Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453): the first tokens of a text soak up
    attention that has nowhere else to go, and a model that loses them breaks down. A text of any length can be read with them and a
    sliding window.

    **Departs from the paper**: in nothing. Its positions within the cache are `positions="compact"` of the cache.
    """

    name = "streaming"
    directions = False
    in_graphs = True
    order_only = True

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, budget - sinks)

    def score(self, tokens: Tokens) -> torch.Tensor:
        # Counted from the end, because float32 holds integers up to 2^24 only.
        return (tokens.positions - tokens.seen).float()
