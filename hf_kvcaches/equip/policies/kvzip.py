"""KVzip: context reconstruction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import WaitingPolicy, count
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class KVZipPolicy(WaitingPolicy, built_in=True):
    """Keeps the tokens that the model attends to when it reproduces the context, once, for many questions.

    KVzip (Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416): the context is fed a second time behind
    itself, and a token scores the largest attention weight that these queries give it. `EquipCache.compress(model)` does that and prunes;
    until then the whole context is kept.

    **Departs from the paper**: there is no instruction to repeat the context; heads have the same budget unless `head_budgets` shares it;
    later tokens stay.

    Args:
        deferred: Tokens that are fed again at a time, and share one softmax.
    """

    name = "kvzip"
    directions = False
    deferred: int = count(512)

    def score(self, tokens: Tokens) -> torch.Tensor:
        if tokens.attention is not None:
            return tokens.attention
        unscored = torch.full(tokens.keys.shape[:3], torch.inf, device=tokens.keys.device)
        return unscored if tokens.scores is None else tokens.scores.nan_to_num(nan=torch.inf)
