"""LagKV: what stands out against the tokens that follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_kvcaches.equip.policies.base import Policy, check_count, put_score
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class LagKVPolicy(Policy):
    """Keeps the tokens whose keys and values stand out against those of the lag of tokens after theirs.

    LagKV (Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, arXiv 2504.04704): tokens are cut into lags. Each
    channel is scaled by its range in the following lag, and what spreads most over the channels is worth most. No attention is needed.

    **Departs from the paper**: the budget is a number of tokens and not a share of each lag; scores are ranks within a lag, so that lags
    can be compared, as in kvpress. A channel that is constant in the following lag says nothing. A lag is scored once, when the following
    one is complete; until then its tokens stay, and the oldest goes if there is nothing else. Where a token of either lag is gone by then
    (the budget is smaller than two lags, or padding lies within), the lag's tokens are never scored.

    Args:
        lag_size: Tokens in a lag.
    """

    name = "lagkv"
    lag_size: int = 128

    def __post_init__(self) -> None:
        check_count(self, "lag_size", 2)

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, min(2 * self.lag_size, (budget - sinks) // 2))

    def score(self, tokens: Tokens) -> torch.Tensor:
        ranks = lag_ranks(tokens.keys, tokens.values, tokens.row_index() - tokens.sinks, self.lag_size)
        return ranks if tokens.scores is None else torch.where(tokens.scores.isfinite(), tokens.scores, ranks)

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        scores = put_score(scores, slots, torch.inf)
        due = self.looks(tokens.seen, tokens.first, tokens.sinks)
        return self.score(dataclasses.replace(tokens, scores=scores)) if due else scores

    def looks(self, seen: int, first: torch.Tensor | int, sinks: int) -> bool:
        over = (seen - first - sinks) % self.lag_size
        return bool((over == 0).any()) if isinstance(over, torch.Tensor) else over == 0


def lag_ranks(keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """How each token ranks within its lag, in [0, 1), by how much it spreads in the range of the next lag: (batch, kv_heads, slots).

    +inf for tokens of a lag that lacks a token, or whose next lag does.

    Args:
        keys: (batch, kv_heads, slots, head_dim).
        values: (batch, kv_heads, slots, value_dim).
        index: (batch, 1 or kv_heads, slots): index // size is a token's lag, no two are equal in a row; below 0: in no lag.
    """
    lags = keys.shape[2] // size
    if lags < 2:
        return torch.full(keys.shape[:3], torch.inf, device=keys.device)
    source, place, numbers = _whole_lags(index.long().expand(keys.shape[:3]), size, lags)
    worth = _information(keys, source, size) + _information(values, source, size)
    ranks = worth.argsort(-1).argsort(-1) / size
    follows = (numbers[..., :-1] >= 0) & (numbers[..., 1:] == numbers[..., :-1] + 1)
    ranks = torch.where(follows[..., None], ranks, torch.inf).flatten(2)
    # The last lag has no next one, and one place behind it is for the tokens of no whole lag.
    return functional.pad(ranks, (0, size + 1), value=torch.inf).gather(-1, place)


def _whole_lags(index: torch.Tensor, size: int, lags: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lags of which every token is there, put one after the other.

    Returns:
        The slots of their tokens, (batch, kv_heads, lags * size).
        For each slot its place among these, or one behind them, (batch, kv_heads, slots).
        The lags' numbers, (batch, kv_heads, lags), below 0 where there are fewer.
    """
    slots = index.shape[-1]
    index, order = index.sort(-1)
    inside = index.remainder(size)
    begin = torch.arange(slots, device=index.device) - inside
    end = begin + size - 1
    whole = (index >= 0) & (begin >= 0) & (end < slots)
    # No two are equal, so what begins and ends where it should lacks nothing between.
    whole &= index.gather(-1, begin.clamp(min=0)) == index - inside
    whole &= index.gather(-1, end.clamp(max=slots - 1)) == index - inside + size - 1
    nth = (whole & (inside == 0)).cumsum(-1) - 1
    place = torch.where(whole, nth * size + inside, lags * size)
    blank = index.new_zeros(*index.shape[:-1], lags * size + 1)
    source = blank.scatter(-1, place, order)[..., :-1]
    numbers = (blank - size).scatter(-1, place, index)[..., :-1:size].div(size, rounding_mode="floor")
    return source, torch.empty_like(place).scatter_(-1, order, place), numbers


def _information(states: torch.Tensor, source: torch.Tensor, size: int) -> torch.Tensor:
    """How much the channels of each token differ, scaled by their ranges in the next lag: shares of a lag, (.., lags - 1, size)."""
    batch, heads, slots, width = states.shape
    # Whole tokens are taken from a list of all: several times faster than gather, which looks up each number.
    base = torch.arange(0, batch * heads * slots, slots, device=source.device).view(batch, heads, 1)
    picked = states.detach().reshape(-1, width).index_select(0, (source + base).flatten()).float()
    picked = picked.view(batch, heads, -1, size, width)
    this, following = picked[:, :, :-1], picked[:, :, 1:]
    low, high = following.amin(-2, keepdim=True), following.amax(-2, keepdim=True)
    # What is divided by infinity says nothing.
    return ((this - low) / torch.where(high > low, high - low, torch.inf)).std(-1).softmax(-1)
