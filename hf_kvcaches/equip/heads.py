"""Budgets per head: heads of a layer keep different numbers of tokens.

Ada-KV (Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference, arXiv 2407.11550): heads whose attention is
spread over many tokens lose more by the same budget than heads that look at few. So scores are compared across the heads of a layer, and
each head keeps as many tokens as it has of the layer's best. A fifth of its own budget stays a head's own, besides sinks and recent tokens.

**Departs from the paper**: shares are computed for each row of a batch, and anew with each block; a decoding step evicts within each head.

With `RetrievalHeads` (DuoAttention) some heads keep all tokens, in buffers that grow, and the others as many as the budget says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.equip.retrieval_heads import RetrievalHeads
from hf_kvcaches.equip.tokens import newest_from
from hf_kvcaches.errors import ConfigError

if TYPE_CHECKING:
    from hf_kvcaches.equip.entries import Entries
    from hf_kvcaches.equip.layer import EquipLayer
    from hf_kvcaches.equip.policies import Policy

# Of a head's slots that are neither sinks' nor recent tokens' one in so many is its own: the paper's alpha of 0.2.
_OWN_SHARE = 5


def plain_head_budgets(head_budgets: Any) -> Any:
    """As JSON values: "adakv", None, or for each layer which heads keep all tokens."""
    if head_budgets is None or head_budgets == "adakv":
        return head_budgets
    if isinstance(head_budgets, RetrievalHeads):
        return {str(index): heads for index, heads in head_budgets.whole().items()}
    if isinstance(head_budgets, Mapping) and all(isinstance(heads, list) for heads in head_budgets.values()):
        return {str(index): heads for index, heads in head_budgets.items()}  # from a file
    hint = "For 'duo', pass the heads themselves: RetrievalHeads.calibrate(model, tokenizer, texts)." if head_budgets == "duo" else ""
    raise ConfigError.of("head_budgets", "'adakv', RetrievalHeads, or None", head_budgets, hint)


def of_layer(head_budgets: Any, index: int, shard: HeadShard | None = None) -> str | tuple[bool, ...] | None:
    """What one layer gets of `plain_head_budgets`: which heads keep all tokens, as a tuple.

    Args:
        shard: Which heads the layer has, under tensor parallelism.
    """
    if isinstance(head_budgets, dict):
        heads = head_budgets.get(str(index), ())
        return tuple(heads if shard is None else shard.own(heads))
    return None if head_budgets is None else str(head_budgets)


def best_by_head(layer: EquipLayer, entries: Entries, scores: torch.Tensor, budget: int, recent: int) -> Entries:
    """The entries that stay, each head's first and in order of position; sets how many slots each head has from now on.

    Args:
        entries: In order of position.
        scores: (batch, 1 or kv_heads, tokens).
        budget: How many tokens stay, on average over the heads, or in each head that does not keep all.
        recent: How many of the newest tokens stay in each head.
    """
    heads, whole = entries.keys.shape[1], layer.settings.head_budgets
    if scores.shape[1] != heads and not layer.policy.order_only:
        raise scores_alike(layer.policy)
    positions = entries.positions.expand(-1, heads, -1)
    if not isinstance(whole, tuple):
        kept, head_shares = _shared(layer, scores, positions, budget, recent)
    else:
        if len(whole) != heads:
            raise ConfigError.of("head_budgets", "RetrievalHeads of this model", whole, "Calibrate them with this model.")
        real = positions >= 0
        best = layer.policy.keep(scores.expand(-1, heads, -1), positions, budget, sinks_end=layer.sinks_end, recent=recent)
        kept = real & torch.zeros_like(real).scatter(-1, best, True).logical_or(_keeping_all(whole, real.device))
        head_shares = _with_room(layer, whole, kept.sum(-1, keepdim=True))
    most = int(kept.sum(-1).max())
    order = (~kept).to(torch.int8).argsort(stable=True, dim=-1)[..., :most]
    layer.state.shares = head_shares
    picked = entries.pick(order)
    return picked.hide(~kept.gather(-1, order))


def _shared(
    layer: EquipLayer, scores: torch.Tensor, positions: torch.Tensor, budget: int, recent: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chosen` and `shares` of a layer's heads, which share slots with those of the other processes.

    Args:
        scores: (batch, kv_heads, tokens); and `positions`.
    """
    shard, tokens = layer.shard, positions.shape[-1]
    if shard is not None:
        # Heads that keep more tokens have more entries.
        padding = (0, shard.most(tokens, positions.device) - tokens)
        scores = shard.gather(torch.nn.functional.pad(scores, padding))
        positions = shard.gather(torch.nn.functional.pad(positions, padding, value=-1))
    kept = chosen(layer.policy, scores, positions, budget, sinks_end=layer.sinks_end, recent=recent)
    head_shares = shares(kept.sum(-1, keepdim=True), layer.state.slots)
    if shard is None:
        return kept, head_shares
    heads = shard.span(positions.shape[1])
    return kept[:, heads, :tokens], None if head_shares is None else head_shares[:, heads].contiguous()


def reserve_for_whole_heads(layer: EquipLayer) -> None:
    """Makes room for one more token in heads that keep all."""
    state, store, whole = layer.state, layer.store, layer.settings.head_budgets
    if state.shares is None or not isinstance(whole, tuple):
        return
    kept = state.kept_rows()
    if bool(((kept >= state.shares) & _keeping_all(whole, kept.device)).any()):
        state.shares = _with_room(layer, whole, kept)
        store.install(*store.read(store.capacity), kept, state.most())


def _with_room(layer: EquipLayer, whole: tuple[bool, ...], kept: torch.Tensor) -> torch.Tensor:
    """How many slots each head has where some keep all tokens, with room for more, (batch, kv_heads, 1).

    Args:
        kept: How many tokens each head keeps, (batch, kv_heads, 1).
    """
    keeping_all = _keeping_all(whole, kept.device)
    most = int(torch.where(keeping_all, kept, 0).max())
    return torch.where(keeping_all, most + max(64, most // 8), layer.state.slots).expand_as(kept).contiguous()


def _keeping_all(whole: tuple[bool, ...], device: torch.device) -> torch.Tensor:
    """True for heads that keep all tokens, (kv_heads, 1)."""
    return torch.tensor(whole, device=device)[:, None]


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
    # What is guarded ranks before all that is not.
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
