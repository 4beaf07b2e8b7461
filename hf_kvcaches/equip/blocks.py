"""A block of new tokens: all attend to what is kept and to each other, then the layer is pruned to its budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.equip.budgets import Limit
from hf_kvcaches.equip.entries import Entries
from hf_kvcaches.equip.frames import keys_for_queries, offset, target_of
from hf_kvcaches.equip.heads import best_by_head
from hf_kvcaches.equip.scoring import bias_columns, mask_of_slots, score, shown_queries
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.blocks import Visibility, block_attention, observers

if TYPE_CHECKING:
    from hf_kvcaches.core.call import Call
    from hf_kvcaches.equip.layer import EquipLayer
    from hf_kvcaches.equip.rotation import RotatingPass


def take_block(
    layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: RotatingPass, limit: Limit
) -> torch.Tensor:
    """Attends with a block of new tokens, then prunes: (batch, tokens, heads, head_dim).

    Args:
        query: (batch, heads, tokens, head_dim), as the model rotated them.
        keys: (batch, kv_heads, tokens, head_dim), as the model rotated them.
    """
    output, observed = _attend(layer, query, keys, values, call, running)
    prune_block(layer, keys, values, running, limit, observed, LastQueries(query, call.scaling), call.module)
    return output


def prune_block(
    layer: EquipLayer,
    keys: torch.Tensor,
    values: torch.Tensor,
    running: RotatingPass,
    limit: Limit,
    observed: torch.Tensor | None = None,
    queries: LastQueries | None = None,
    module: nn.Module | None = None,
) -> None:
    """Takes a block of new tokens and prunes.

    Args:
        keys: New ones, (batch, kv_heads, tokens, head_dim), as the model rotated them.
        observed: What slots and new tokens got from the observed queries, (batch, kv_heads, slots + tokens), or None.
        queries: Of the new tokens, or the last of them.
        module: The model's attention, where it is asked.
    """
    state = layer.state
    if state.deferring:
        state.slots = state.seen + running.tokens
        limit = layer.limit
    shown = shown_queries(layer, queries, running)
    entries = arriving(layer, keys, values, running, observed)
    install(layer, pruned(layer, replace(entries, queries=shown), limit, module))


def arriving(layer: EquipLayer, keys: torch.Tensor, values: torch.Tensor, running: RotatingPass, observed: torch.Tensor | None) -> Entries:
    """Kept and new tokens, in order of position; the layer counts the new ones as seen."""
    state, tokens, batch = layer.state, keys.shape[2], keys.shape[0]
    rotation, index = layer.rotation, block_index(layer, running)
    target = None
    if rotation.unrotated:
        assert rotation.geometry is not None
        back = running.rotation(rotation.geometry, 0, still=True)
        keys = keys if back is None else back(keys)
    elif rotation.kept_rotated:
        assert rotation.geometry is not None
        to = running.rotation(rotation.geometry, index)
        keys = keys if to is None else to(keys)
        target = torch.arange(tokens, device=keys.device)[None, None] + index if isinstance(index, int) else index
        target = target.expand(batch, -1, -1)
    old = Entries.of(layer) if state.used() else None
    if running.valid is None:
        positions = torch.arange(state.seen, state.seen + tokens, device=keys.device).expand(batch, 1, -1)
    else:
        positions = state.pass_over(running.valid, tokens)
        old = None if old is None else replace(old, positions=layer.positions)  # padding has moved them
    entries = Entries(keys, values, positions.to(torch.int32), target)
    if old is not None:
        entries = entries.behind(old)
    real = keys.new_full((batch, 1, 1), tokens, dtype=torch.long) if running.valid is None else running.valid.sum(-1)[:, None, None]
    entries = remember(layer, entries, observed, real)
    state.advance(tokens)
    return entries if running.valid is None and old is None else entries.in_order()


def block_index(layer: EquipLayer, running: RotatingPass) -> int | torch.Tensor:
    """To which position the queries of a block are rotated, and under `"frames"` the keys: the first one's, or (batch or 1, 1, tokens)."""
    state = layer.state
    start = state.kept() if state.used() else 0
    if layer.rotation.kept_rotated:
        start = start + offset(layer)
    if running.valid is None and isinstance(start, int):
        return start
    steps = torch.arange(running.tokens, device=running.device)[None] if running.valid is None else running.valid.cumsum(-1) - 1
    return (steps.clamp(min=0)[:, None] + start).long()


def remember(layer: EquipLayer, entries: Entries, observed: torch.Tensor | None, real: torch.Tensor) -> Entries:
    """Adds a block's attention to what the policy observes.

    Args:
        observed: What entries got, (batch, kv_heads, slots + tokens), or None.
        real: How many of the new tokens are, (batch, 1, 1).
    """
    window, state = layer.policy.observes, layer.state
    if observed is None:
        return entries
    if window is None:
        return replace(entries, attention=observed if entries.attention is None else entries.attention + observed)
    if entries.attention is None or entries.gathering is None or state.gathered is None:
        if window == 1:
            return replace(entries, attention=observed)
        state.gathered = torch.zeros_like(real)
        return replace(entries, attention=observed, gathering=torch.zeros_like(observed))
    # Of a long block its last queries are a window, and those of a short one go into the window that is not yet complete.
    whole, gathering, count = real >= window, entries.gathering + observed, state.gathered + real
    complete = whole | (count >= window)
    state.gathered = torch.where(complete, 0, count)
    attention = torch.where(whole, observed, torch.where(complete, gathering, entries.attention))
    return replace(entries, attention=attention, gathering=torch.where(complete, 0.0, gathering))


def pruned(layer: EquipLayer, entries: Entries, limit: Limit, module: nn.Module | None = None) -> Entries:
    """What stays of entries in order, with the policy's scores of it."""
    scores = score(layer, entries, limit.slots, module)
    return best_of(layer, replace(entries, scores=None if layer.policy.order_only else scores), scores, limit)


def best_of(layer: EquipLayer, entries: Entries, scores: torch.Tensor, limit: Limit) -> Entries:
    """The entries that stay."""
    if layer.settings.head_budgets is not None:
        return best_by_head(layer, entries, scores, limit.slots, limit.recent)
    count = int(entries.kept().max())
    if count <= limit.slots:
        return entries.first(count)
    return entries.pick(layer.policy.keep(scores, entries.positions, limit.slots, sinks_end=layer.sinks_end, recent=limit.recent))


def install(layer: EquipLayer, entries: Entries) -> None:
    """Makes entries in order the content of the slots."""
    state, scores = layer.state, entries.scores
    heads = max(entries.positions.shape[1], 1 if scores is None else scores.shape[1])
    positions, kept = entries.positions.expand(-1, heads, -1), entries.kept().expand(-1, heads, -1)
    used, keys, device = positions.shape[2], entries.keys, entries.keys.device
    state.filled, state.positions = state.common(kept), positions.to(torch.int32).contiguous()
    ranks = torch.arange(used, device=device)
    if entries.rotated_to is not None:
        target = target_of(layer, ranks, offset(layer))
        delta = torch.where(positions < 0, 0, target - entries.rotated_to)
        keys = layer.rotation.by(delta)(keys) if bool(delta.any()) else keys
    layer.store.install(keys, entries.values, kept, state.most(), entries.source)
    state.ranks = ranks.to(torch.int32).expand_as(positions).contiguous() if layer.rotation.unrotated else None
    state.attention, state.gathering = entries.attention, entries.gathering
    state.scores = None if layer.policy.scores_are_sums or scores is None else scores.contiguous()
    state.reserve(layer.store.capacity)


def forget_last(layer: EquipLayer, tokens: int) -> None:
    """Empties the slots of the last tokens of a layer that still holds every token, in order."""
    state = layer.state
    assert state.positions is not None
    assert state.filled is not None
    state.filled -= tokens
    state.positions[..., state.filled :] = -1
    state.advance(-tokens)


def compress(layer: EquipLayer, limit: Limit, upto: int, reconstruction: torch.Tensor | None) -> None:
    """Prunes what the layer holds.

    Args:
        upto: The position from which on tokens stay, and are not shown to the policy.
        reconstruction: What each slot got while the context was fed again, (batch, kv_heads, slots), or None.
    """
    entries = Entries.of(layer)
    attention = entries.attention
    if reconstruction is not None:
        entries = replace(entries, attention=reconstruction)
    entries = entries.in_order()
    after, behind = entries.positions >= upto, layer.state.seen - upto
    context = replace(entries, positions=torch.where(after, -1, entries.positions))
    scores = torch.where(after, torch.inf, score(layer, context, limit.slots - behind, None, after=behind))
    entries = replace(entries, scores=None if layer.policy.order_only else scores)
    if reconstruction is not None:
        entries = replace(entries, attention=attention)
    install(layer, best_of(layer, entries, scores, limit))


def _attend(
    layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: RotatingPass
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a block over slots and itself, and what these got from the observed queries."""
    rotation, tokens, used = layer.rotation, keys.shape[2], layer.state.used()
    observe = layer.policy.observes != 0
    if rotation.compact:
        assert rotation.geometry is not None
        to = running.rotation(rotation.geometry, block_index(layer, running))
        query, keys = (query, keys) if to is None else (to(query), to(keys))
    allowed, output = _allowed(layer, running), None
    if not layer.state.seen and running.whole and call.bias is None:
        output = call.dense(query, keys, values).to(values.dtype)
        if not observe:
            return output, None
    if used:
        keys, values = torch.cat([keys_for_queries(layer), keys], 2), torch.cat([layer.store.read(used)[1], values], 2)
    attended, observed = block_attention(
        query,
        keys,
        values if output is None else None,
        call.scaling,
        Visibility(layer.state.holding(), used, running.valid, allowed),
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        bias=_bias(layer, call, tokens),
        observers=observers(layer.window(tokens), running.valid, tokens, keys.device) if observe else None,
    )
    result = attended if output is None else output
    assert result is not None
    return result, observed


def observed_by(layer: EquipLayer, queries: LastQueries | None, keys: torch.Tensor, running: RotatingPass) -> torch.Tensor | None:
    """What a prompt's keys got from its last queries, (batch, kv_heads, tokens), or None where the policy observes none.

    Args:
        keys: (batch, kv_heads, tokens, head_dim), as the model rotated them.
    """
    window, tokens = layer.policy.observes, keys.shape[2]
    if window == 0:
        return None
    count = tokens if window is None else min(window, tokens)
    available = 0 if queries is None else queries.states.shape[2]
    if queries is None or available < count:
        raise UnsupportedError(f"queries: the policy scores a prompt of {tokens} tokens by its last {count} queries, and got {available}.")
    earlier, valid = tokens - count, running.valid
    slots, new = (None, None) if valid is None else (valid[:, None, :earlier], valid[:, earlier:])
    _, observed = block_attention(
        queries.states[:, :, available - count :],
        keys,
        None,
        queries.scaling,
        Visibility(slots, earlier, new),
        softcap=queries.softcap,
        sink_logits=queries.sink_logits,
        observers=observers(window, new, count, keys.device),
    )
    return observed


def _allowed(layer: EquipLayer, running: RotatingPass) -> torch.Tensor | None:
    """A mask of the model's own over slots and new tokens, (batch or 1, 1 or kv_heads, tokens, slots + tokens)."""
    allowed, tokens, used = running.allowed, running.tokens, layer.state.used()
    if allowed is None or (not used and allowed.shape[1] == 1):
        return allowed if allowed is None or not layer.state.seen else allowed[..., -tokens:]
    old = mask_of_slots(layer, allowed)
    return torch.cat([old, allowed[..., -tokens:].expand(*old.shape[:2], -1, -1)], -1)


def _bias(layer: EquipLayer, call: Call, tokens: int) -> torch.Tensor | None:
    """A bias by position over slots and new tokens."""
    bias, used = call.bias, layer.state.used()
    if bias is None or not used:
        return bias if bias is None or not layer.state.seen else bias[..., -tokens:]
    heads = max(bias.shape[1], layer.store.shape[1])
    columns = bias_columns(layer, bias[..., : bias.shape[-1] - tokens], used, heads)
    bias = bias.expand(columns.shape[0], heads, -1, -1)
    return torch.cat([bias.gather(-1, columns[:, :, None].expand(-1, -1, tokens, -1)), bias[..., -tokens:]], -1)
