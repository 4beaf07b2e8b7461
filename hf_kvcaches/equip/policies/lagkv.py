"""LagKV: tokens that differ from the tokens that follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import WaitingPolicy, count
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class LagKVPolicy(WaitingPolicy, built_in=True):
    """Keeps the tokens with keys and values that spread most in the range of the next lag of tokens.

    LagKV (Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, arXiv 2504.04704): tokens are cut into lags, each
    channel is scaled by its range in the next lag, and a token scores its deviation over the channels. No attention is needed.

    **Departs from the paper**: the budget is a number of tokens and not a share of each lag, so scores are ranks within a lag, as in
    kvpress. A channel that is constant in the next lag counts as 0. A lag is scored when the next one is complete; until then its tokens
    stay. It is never scored if a token of either is missing by then: the budget is smaller than two lags, or padding lies within.

    Args:
        lag_size: Tokens in a lag.
    """

    name = "lagkv"
    lag_size: int = count(128, least=2)

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, min(2 * self.lag_size, (budget - sinks) // 2))

    def score(self, tokens: Tokens) -> torch.Tensor:
        ranks = lag_ranks(tokens.keys.detach(), tokens.values.detach(), tokens.row_index() - tokens.sinks, self.lag_size)
        return ranks if tokens.scores is None else torch.where(tokens.scores.isfinite(), tokens.scores, ranks)

    def due(self, seen: int | torch.Tensor, sinks: int, complete: bool | torch.Tensor) -> bool | torch.Tensor:
        return (seen - sinks) % self.lag_size == 0


def lag_ranks(keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """The rank of each token within its lag, in [0, 1), (batch, kv_heads, slots); +inf where a token of the lag or the next is missing.

    Args:
        keys: (batch, kv_heads, slots, head_dim).
        values: (batch, kv_heads, slots, value_dim).
        index: (batch, 1 or kv_heads, slots): index // size is a token's lag, all differ in a row; below 0: in no lag.
    """
    ranks = torch.full(keys.shape[:3], torch.inf, device=keys.device)
    index, order = index.long().expand(ranks.shape).sort(-1)
    first = index[..., : max(0, index.shape[-1] - 2 * size + 1)]
    complete = (first >= 0) & (first % size == 0) & (index[..., 2 * size - 1 :] - first == 2 * size - 1)
    row, head, start = (where[:, None] for where in complete.nonzero(as_tuple=True))
    if not row.numel():
        return ranks
    slots = order[row, head, start + torch.arange(2 * size, device=keys.device)]  # (lags, 2 * size)
    scores = torch.zeros(slots.shape[0], size, device=keys.device)
    for states in (keys, values):
        lag, following = states[row, head, slots].float().split(size, 1)
        low, high = following.aminmax(dim=1, keepdim=True)
        # A division by infinity gives 0.
        scores += ((lag - low) / torch.where(high > low, high - low, torch.inf)).std(-1).softmax(-1)
    ranks[row, head, slots[:, :size]] = scores.argsort(-1).argsort(-1) / size
    return ranks
