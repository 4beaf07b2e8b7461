"""Block-wise pruning: the text is pruned block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_kvcaches.equip.policies.base import WrappingPolicy, count
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class BlockPolicy(WrappingPolicy, built_in=True):
    """Prunes to the budget after each block of the text, with the scores of another policy over the kept tokens and the block.

    KeyDiff (arXiv 2504.15364) prunes prompts in this way, and so does kvpress's `BlockPress`: tokens compete with kept tokens only.

    Args:
        size: Tokens of a block.
    """

    name = "block"
    size: int = count(128)

    def score(self, tokens: Tokens) -> torch.Tensor:
        order = tokens.in_order()
        budget = order.shape[-1] if tokens.budget is None else min(tokens.budget, order.shape[-1])
        kept, blocks = order[..., :budget], order[..., budget:].split(self.size, -1)
        scores = torch.zeros(order.shape, device=order.device)
        for number, block in enumerate(blocks):
            slots = torch.cat([kept, block], -1)
            best = self._protected_score(tokens, slots).topk(budget, -1).indices.sort(-1).values
            kept = slots.gather(-1, best)
            # Evicted tokens score below kept ones, those of early blocks lowest.
            scores.scatter_(-1, slots, float(number - len(blocks))).scatter_(-1, kept, 0.0)
        ranks = self._protected_score(tokens, kept).argsort(-1).argsort(-1)
        return scores.scatter_(-1, kept, (ranks + 1.0) / (budget + 1))

    def _protected_score(self, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        """The other policy's scores of the tokens in `slots`, +inf for sinks, -inf for empty slots."""
        subset = replace(tokens.pick(slots), budget=None)
        scores = torch.where(subset.row_index() < tokens.sinks, torch.inf, self.inner_score(subset))
        return torch.where(subset.positions < 0, -torch.inf, scores)
