"""KVzip: context reconstruction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy, count
from hf_kvcaches.equip.policies.tokens import NOTHING, UNSCORED, Tokens


def even_chunks(tokens: int, most: int) -> list[slice]:
    """So many tokens in chunks of about one length, `most` at most: in a short one each token would get much of the attention."""
    count = -(-tokens // most)
    return [slice(tokens * number // count, tokens * (number + 1) // count) for number in range(count)]


def most_received(
    queries: torch.Tensor, keys: torch.Tensor, repeated: torch.Tensor, softcap: float | None, real: torch.Tensor | None = None
) -> torch.Tensor:
    """The largest weight that a query of a repetition gives to each token of what it repeats, (batch, kv_heads, tokens).

    A query shares its attention among these and the repetition up to itself, so that a head that looks nearby gives little to each.

    Args:
        queries: Of the repetition, scaled, (batch, heads, queries, head_dim).
        keys: (batch, kv_heads, tokens, head_dim).
        repeated: The keys of the repetition, (batch, kv_heads, queries, head_dim).
        softcap: What the model's attention caps scores at, or None.
        real: False for tokens and, behind these, for queries that are padding, (batch, 1, tokens + queries).
    """
    grouped, tokens, count = queries.unflatten(1, (keys.shape[1], -1)), keys.shape[2], queries.shape[2]
    scores = (grouped @ torch.cat([keys, repeated], 2)[:, :, None].mT).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores[..., tokens:].masked_fill_(torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1), NOTHING)
    if real is not None:
        scores.masked_fill_(~real[:, :, None, None], NOTHING)
    weights = scores.softmax(-1)[..., :tokens]
    if real is not None:
        weights = weights * real[:, :, None, tokens:, None] * real[:, :, None, None, :tokens]
    return weights.amax((2, 3))


@dataclass(frozen=True)
class KVZipPolicy(Policy, built_in=True):
    """Keeps the tokens that the model attends to when it reproduces the context, once, for many questions.

    KVzip (Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416): the context is fed a second time behind
    itself, and a token scores the largest attention weight that these queries give it. `EquipCache.compress(model)` does that and prunes;
    until then the whole context is kept.

    **Departs from the paper**: there is no instruction to repeat the context; sinks and recent tokens stay, and some of the best of each
    head; later tokens stay.

    Args:
        deferred: Tokens that are fed again at a time, and scored by it alone.
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
