"""KVzip: what the model looks at when it reads the context again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy, check_count, few_recent, put_score
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class KVZipPolicy(Policy):
    """Keeps the tokens that the model needs to reproduce the context, once, for many questions.

    KVzip (Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416): the context is fed a second time behind
    itself, and a token is worth the most that any of these queries gave to it. `EquipCache.compress(model)` does that and prunes; until
    then the whole context is kept.

    **Departs from the paper**: the context is fed again as it is, without an instruction to repeat it. Each head keeps as many tokens as
    the others; the paper shares one budget among all heads of all layers. Tokens that come after are kept before anything of the context.

    Args:
        deferred: Tokens that are fed again at a time, and share one softmax.
    """

    name = "kvzip"
    directions = False
    deferred: int = 512

    def __post_init__(self) -> None:
        check_count(self, "deferred", 1)

    def recent(self, budget: int, sinks: int) -> int:
        return few_recent(budget, sinks)

    def score(self, tokens: Tokens) -> torch.Tensor:
        if tokens.attention is not None:
            return tokens.attention
        if tokens.scores is None:
            return tokens.keys.new_full(tokens.keys.shape[:3], torch.inf, dtype=torch.float32)
        return tokens.scores.nan_to_num(nan=torch.inf)

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        return put_score(scores, slots, torch.inf)
