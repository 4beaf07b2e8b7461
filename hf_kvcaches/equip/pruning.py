"""A block of new tokens: all attend, then the cache is cut down to its budget in one go."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_kvcaches.core.adopting import LastQueries
from hf_kvcaches.core.attention import previous_attention
from hf_kvcaches.core.blocks import Visibility, block_attention, observers
from hf_kvcaches.equip.budgets import Limit
from hf_kvcaches.equip.candidates import Candidates, arrived, block_places, candidates, first_of, in_order, kept_candidates
from hf_kvcaches.equip.frames import TurningPass
from hf_kvcaches.equip.state import padding_first
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import UnsupportedError

if TYPE_CHECKING:
    from hf_kvcaches.core.calls import Call
    from hf_kvcaches.equip.layer import EquipLayer


def take_block(
    layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: TurningPass, limit: Limit
) -> torch.Tensor:
    """Attends with a block of new tokens, then prunes: (batch, tokens, heads, head_dim).

    Args:
        query: (batch, heads, tokens, head_dim), as the model rotated them.
        keys: (batch, kv_heads, tokens, head_dim), likewise.
        call: What else the model said.
    """
    output, observed = _attend(layer, query, keys, values, call, running)
    prune_block(layer, keys, values, running, limit, observed, LastQueries(query, call.scaling), call.module)
    return output


def prune_block(
    layer: EquipLayer,
    keys: torch.Tensor,
    values: torch.Tensor,
    running: TurningPass,
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
    if layer.deferring:
        layer.slots = layer.fed + running.tokens
        limit = layer.limit
    shown = _shown(layer, queries, running)
    if layer.replaces_in_place and running.valid is None:
        if layer.is_ring:
            layer.write_ring(*arrived(layer, keys, running)[:1], values)
        else:
            replace_in_place(layer, candidates(layer, keys, values, running, observed, shown, ordered=False), keys.shape[2], module)
        return
    lay_out(layer, candidates(layer, keys, values, running, observed, shown), limit, module)


def _shown(layer: EquipLayer, queries: LastQueries | None, running: TurningPass) -> torch.Tensor | None:
    """The queries of new tokens that the policy is shown, padding first; remembered where it has to see some while decoding."""
    if queries is None or not (layer.policy.sees_block or layer.policy.queries):
        return None
    states = queries.states
    valid = None if running.valid is None else running.valid[:, -states.shape[2] :]
    layer.scaling = queries.scaling
    layer.note_queries(queries, valid)
    if not layer.policy.sees_block:
        return None
    return states if valid is None else padding_first(states, valid)


def lay_out(layer: EquipLayer, found: Candidates, limit: Limit, module: nn.Module | None = None) -> None:
    """Makes of the candidates what stays the content of the slots.

    Args:
        layer: Told of the new tokens (`fed`, `first`), with its old slots.
    """
    before = (found.positions >= 0).sum(-1, keepdim=True)
    layer.absorb(prune(layer, found, limit, module), before)


def replace_in_place(layer: EquipLayer, found: Candidates, tokens: int, module: nn.Module | None) -> None:
    """Writes the new tokens that stay over the kept ones that go, and touches no others.

    Args:
        layer: Full, the same in all rows, told of the new tokens.
    """
    scores = score(layer, found, layer.slots, module)
    positions = found.positions.expand(-1, scores.shape[1], -1) if scores.shape[1] > 1 else found.positions
    scores = scores.expand(-1, positions.shape[1], -1)
    order = positions.argsort(-1)  # equal scores fall as in order of position
    keep = layer.policy.keep(
        scores.gather(-1, order), positions.gather(-1, order), layer.slots, sinks_end=layer.sinks_end, recent=layer.recent
    )
    keep = order.gather(-1, keep)
    heads, used = max(keep.shape[1], found.positions.shape[1]), layer.used
    rows = found.keys.shape[0]
    stays = torch.zeros(rows, heads, used + tokens, dtype=torch.bool, device=keep.device).scatter_(2, keep.expand(rows, heads, -1), True)
    # As many slots are left as tokens come, for each row and head, and both lists are in the same order.
    left, came = (~stays[..., :used]).nonzero(), stays[..., used:].nonzero()
    found.scores = scores
    layer.overwrite(found, left, came + came.new_tensor([0, 0, used]), heads)


def _attend(
    layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: TurningPass
) -> tuple[torch.Tensor, torch.Tensor | None]:
    frames, tokens = layer.frames, keys.shape[-2]
    observe = layer.policy.observes != 0
    watch = observers(layer.window(tokens), running.valid, tokens, keys.device) if observe else None
    if frames.geometry is not None:
        turn = running.turn(frames.geometry, block_places(layer, running))
        if turn is not None:
            query, keys = turn(query), turn(keys)
    kept = layer.used
    given = _given(layer, running)
    if not layer.fed and running.whole and call.bias is None:
        output, _ = previous_attention(call.module, query, keys, values, call.mask, **call.options)
        output = output.to(values.dtype)
    else:
        output = None
    if kept:
        keys, values = torch.cat([layer.near_keys(running), keys], 2), torch.cat([layer.held_now()[1], values], 2)
    slots = layer.holding()
    visible = Visibility(slots, kept, running.valid, given)
    own, observed = None, None
    if output is None or observe:
        own, observed = block_attention(
            query,
            keys,
            values if output is None else None,
            call.scaling,
            visible,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
            bias=_block_bias(layer, call, tokens),
            observers=watch,
        )
    result = own if output is None else output
    assert result is not None
    return result, observed


def observed_by(layer: EquipLayer, queries: LastQueries | None, keys: torch.Tensor, running: TurningPass) -> torch.Tensor | None:
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


def _given(layer: EquipLayer, running: TurningPass) -> torch.Tensor | None:
    """A mask of the model's own over slots and new tokens, (batch or 1, 1, tokens, slots + tokens)."""
    allowed, tokens = running.allowed, running.tokens
    if allowed is None or (not layer.used and allowed.shape[1] == 1):
        return allowed if allowed is None or not layer.fed else allowed[..., -tokens:]
    if allowed.shape[1] != 1 or layer.slot_positions().shape[1] != 1:
        raise UnsupportedError(
            "attention_mask: EquipCache can't follow a ready mask through slots that differ by head. Give the padding mask instead."
        )
    held = layer.kept_positions()[:, :1, : layer.used].clamp(min=0)
    old = allowed.expand(held.shape[0], -1, -1, -1).gather(-1, held[:, :, None].expand(-1, -1, tokens, -1))
    return torch.cat([old, allowed[..., -tokens:].expand(held.shape[0], -1, -1, -1)], -1)


def _block_bias(layer: EquipLayer, call: Call, tokens: int) -> torch.Tensor | None:
    bias = call.bias
    if bias is None or not layer.used:
        return bias if bias is None or not layer.fed else bias[..., -tokens:]
    if layer.compact:
        places = layer.slot_positions().argsort(-1).argsort(-1) + bias.shape[-1] - tokens - layer.used
    else:
        places = layer.kept_positions()[:, :, : layer.used].clamp(min=0)
    heads = call.bias.shape[1] if call.bias is not None else 1
    wide = max(heads, places.shape[1])
    places = places.repeat_interleave(wide // places.shape[1], 1)[:, :, None].expand(-1, -1, tokens, -1)
    bias = bias.expand(places.shape[0], wide, -1, -1)
    return torch.cat([bias.gather(-1, places), bias[..., -tokens:]], -1)


def prune(layer: EquipLayer, found: Candidates, limit: Limit, module: nn.Module | None = None) -> Candidates:
    """What stays of the candidates, in order of position, and the layer's scores of it.

    Args:
        layer: Told of the new tokens (`fed`, `first`), with its old slots.
    """
    count = int((found.positions >= 0).sum(-1).max())
    scores = score(layer, found, limit.slots, module)
    found.scores = None if layer.policy.order_only else scores
    return _best_of(layer, found, scores, limit, count)


def _best_of(layer: EquipLayer, found: Candidates, scores: torch.Tensor, limit: Limit, count: int) -> Candidates:
    """The candidates that stay.

    Args:
        count: How many tokens the longest row has.
    """
    if count <= limit.slots:
        return first_of(found, count) if count < found.positions.shape[-1] else found
    return found.pick(layer.policy.keep(scores, found.positions, limit.slots, sinks_end=layer.sinks_end, recent=limit.recent))


def compress(layer: EquipLayer, limit: Limit, upto: int, reconstruction: torch.Tensor | None) -> None:
    """Prunes what the layer holds.

    Args:
        upto: The position from which on tokens stay, and are not shown to the policy.
        reconstruction: What each slot got while the context was fed again, (batch, kv_heads, slots), or None.
    """
    found = kept_candidates(layer)
    if reconstruction is not None:
        found.attention = reconstruction
    found = in_order(found)
    after = found.positions >= upto
    context = replace(found, positions=torch.where(after, -1, found.positions))
    scores = score(layer, context, limit.slots - (layer.fed - upto), None, behind=layer.fed - upto)
    scores = torch.where(after, torch.inf, scores)
    held = (found.positions >= 0).sum(-1, keepdim=True)
    found.scores = None if layer.policy.order_only else scores
    found.attention = None if reconstruction is not None else found.attention
    layer.absorb(_best_of(layer, found, scores, limit, int(held.max())), held)


def seen_by_policy(
    layer: EquipLayer,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    attention: torch.Tensor | None,
    *,
    seen: int,
    queries: torch.Tensor | None,
    budget: int,
    module: nn.Module | None,
    **more: Any,
) -> Tokens:
    """What the layer's policy looks at; arguments are those of `Tokens`."""
    return Tokens(
        keys,
        values,
        positions,
        attention,
        seen,
        layer.settings.sinks,
        first=0 if layer.first is None else layer.first,
        queries=queries,
        scaling=layer.scaling,
        geometry=layer.settings.geometry,
        budget=budget,
        module=module,
        **more,
    )


def score(layer: EquipLayer, found: Candidates, budget: int, module: nn.Module | None, behind: int = 0) -> torch.Tensor:
    """What the policy says of the candidates, (batch, 1 or kv_heads, tokens).

    Args:
        budget: How many of them will stay.
        module: The model's attention, where it is asked.
        behind: How many tokens came after all candidates.
    """
    if layer.policy.order_only:
        return (found.positions - layer.fed).float()
    queries = layer.queries if found.queries is None else found.queries
    queries = queries[:, :, : queries.shape[2] - behind] if queries is not None and behind else queries
    keys = found.keys
    if layer.frames.turns and layer.policy.directions:
        keys = layer.as_rotated(keys, found.positions, found.stands)
    tokens = seen_by_policy(
        layer,
        keys,
        found.values,
        found.positions,
        found.attention,
        seen=layer.fed - behind,
        scores=found.scores,
        queries=queries,
        budget=budget,
        module=module,
        inputs=layer.inputs,
    )
    return layer.policy.checked_score(tokens)
