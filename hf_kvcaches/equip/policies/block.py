"""Blocks: a text is pruned as it comes, block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_kvcaches.equip.policies.base import check_count
from hf_kvcaches.equip.policies.wrapping import WrappingPolicy
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class BlockPolicy(WrappingPolicy):
    """Prunes to the budget after each block of the text, by another policy that sees what is left and the block.

    As kvpress's `BlockPress`, and as the paper of KeyDiff prunes: what is kept competes with what comes, and not with what was evicted.

    Args:
        size: Tokens of a block.
    """

    name = "block"
    size: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "size", 1)

    def score(self, tokens: Tokens) -> torch.Tensor:
        order = tokens.in_order()
        count = order.shape[-1]
        budget = count if tokens.budget is None else min(tokens.budget, count)
        kept, blocks = order[..., :budget], order[..., budget:].split(self.size, -1)
        scores = torch.zeros(order.shape, device=order.device)
        for number, block in enumerate(blocks):
            slots = torch.cat([kept, block], -1)
            chosen = self._worth(tokens, slots).topk(budget, -1).indices.sort(-1).values
            kept = slots.gather(-1, chosen)
            # Evicted tokens are worth less than any that was left, those of early blocks least.
            scores.scatter_(-1, slots, float(number - len(blocks))).scatter_(-1, kept, 0.0)
        ranks = self._worth(tokens, kept).argsort(-1).argsort(-1)
        return scores.scatter_(-1, kept, (ranks + 1.0) / (budget + 1))

    def _worth(self, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        """The other policy's scores of some tokens, with +inf for sinks and -inf for empty slots."""
        part = replace(tokens.pick(slots), budget=None)
        worth = torch.where(part.row_index() < tokens.sinks, torch.inf, self.inner_score(part))
        return torch.where(part.positions < 0, -torch.inf, worth)
