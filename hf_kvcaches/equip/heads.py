"""Budgets per head: the slots of a layer are shared among its heads.

Ada-KV (Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference, arXiv 2407.11550): heads whose attention is
spread over many tokens lose more by the same budget than heads that look at few. So scores are compared across the heads of a layer, and
each head keeps as many tokens as it has of the layer's best. A fifth of its own budget stays a head's own, besides sinks and recent tokens.

**Departs from the paper**: shares are computed for each row of a batch, and anew with each block; a decoding step evicts within each head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_kvcaches.equip.tokens import newest_from
from hf_kvcaches.errors import ConfigError

if TYPE_CHECKING:
    from hf_kvcaches.equip.entries import Entries
    from hf_kvcaches.equip.layer import EquipLayer
    from hf_kvcaches.equip.policies import Policy

HEAD_BUDGETS = ("adakv",)
# Of a head's slots that are neither sinks' nor recent tokens' one in so many is its own: the paper's alpha of 0.2.
_OWN_SHARE = 5


def share_out(layer: EquipLayer, entries: Entries, scores: torch.Tensor, budget: int, recent: int) -> Entries:
    """The entries that stay, each head's first and in order of position; sets how many slots each head has from now on.

    Args:
        entries: In order of position.
        scores: (batch, kv_heads, tokens).
        budget: How many tokens stay, on average over the heads.
        recent: How many of the newest tokens stay in each head.
    """
    heads = entries.keys.shape[1]
    if scores.shape[1] != heads:
        raise scores_alike(layer.policy)
    positions = entries.positions.expand(-1, heads, -1)
    kept = chosen(layer.policy, scores, positions, budget, sinks_end=layer.sinks_end, recent=recent)
    count = kept.sum(-1, keepdim=True)
    order = (~kept).to(torch.int8).argsort(stable=True, dim=-1)[..., : int(count.max())]
    layer.state.shares = shares(count, layer.state.slots)
    picked = entries.pick(order)
    return picked.hide(~kept.gather(-1, order))


def chosen(
    policy: Policy, scores: torch.Tensor, positions: torch.Tensor, budget: int, *, sinks_end: torch.Tensor | int, recent: int
) -> torch.Tensor:
    """True for tokens that stay, (batch, kv_heads, tokens); of equal scores the newer ones.

    Args:
        scores: (batch, kv_heads, tokens).
        positions: (batch, kv_heads, tokens), -1 for empty slots and padding.
        budget: How many stay, on average over the heads.
    """
    start = newest_from(positions, max(recent, policy.always_recent))
    worth = policy.protect(scores, positions, sinks_end=sinks_end, recent_start=start)
    protected = worth.isposinf().sum(-1, keepdim=True)
    free = (budget - protected).clamp(min=0)
    guarded = protected + (free + _OWN_SHARE - 1) // _OWN_SHARE
    ranks = _ranks(worth.flatten(1), positions.flatten(1)).view_as(worth)
    # What is guarded goes before all that is not.
    guarded_first = torch.where(_ranks(-ranks) < guarded, ranks - ranks.shape[1:].numel(), ranks)
    return (_ranks(-guarded_first.flatten(1)).view_as(worth) < budget * worth.shape[1]) & (positions >= 0)


def shares(kept: torch.Tensor, slots: int) -> torch.Tensor | None:
    """How many slots each head gets for the tokens kept, (batch, kv_heads, 1): those that a row has left over go to all heads alike.

    None where each head gets `slots`.
    """
    heads = kept.shape[1]
    left = slots * heads - kept.sum(1, keepdim=True)
    shared = kept + left // heads + (torch.arange(heads, device=kept.device)[:, None] < left % heads)
    return None if bool((shared == slots).all()) else shared


def _ranks(worth: torch.Tensor, newest: torch.Tensor | None = None) -> torch.Tensor:
    """How many numbers of the last dimension are higher, or as high and of a newer token, or as high and before this one."""
    if newest is None:
        return worth.argsort(stable=True, dim=-1, descending=True).argsort(-1)
    order = newest.argsort(stable=True, dim=-1, descending=True)
    return order.gather(-1, worth.gather(-1, order).argsort(stable=True, dim=-1, descending=True)).argsort(-1)


def scores_alike(policy: Policy) -> ConfigError:
    """The error for a policy whose heads all keep the same tokens."""
    name = policy.name or type(policy).__name__
    what = "a policy that scores each head by itself"
    return ConfigError.of("head_budgets", what, name, "Its heads all keep the same tokens: use another policy, or leave head_budgets out.")
