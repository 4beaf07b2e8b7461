"""KVzip: context reconstruction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy, count
from hf_kvcaches.equip.policies.tokens import UNSCORED, Tokens


def even_chunks(tokens: int, most: int) -> list[slice]:
    """So many tokens in chunks of about one length, `most` at most: in a short one each token would get much of the attention."""
    count = -(-tokens // most)
    return [slice(tokens * number // count, tokens * (number + 1) // count) for number in range(count)]


@dataclass(frozen=True)
class KVZipPolicy(Policy, built_in=True):
    """Keeps the tokens that the model attends to when it reproduces the context, once, for many questions.

    KVzip (Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416): the context is fed a second time behind
    itself, and a token scores the largest attention weight that these queries give it. `EquipCache.compress(model)` does that and prunes;
    until then the whole context is kept.

    **Departs from the paper**: there is no instruction to repeat the context, and weights are shared among the repeated chunk's tokens
    alone; sinks and recent tokens stay, and each head its best fifth; later tokens stay.

    Args:
        deferred: Tokens that are fed again at a time, and share one softmax.
    """

    name = "kvzip"
    interval = None
    comparable = True
    head_budgets = "global"
    deferred: int = count(512)

    def score(self, tokens: Tokens) -> torch.Tensor:
        if tokens.attention is not None:
            return tokens.attention
        if tokens.scores is None:
            return torch.full(tokens.positions.shape, torch.inf, device=tokens.keys.device)
        return torch.where(tokens.scores.abs() < UNSCORED, tokens.scores, torch.inf)  # later tokens stay
