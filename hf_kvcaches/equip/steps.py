"""A decoding step: the new token overwrites the eviction victim, then its query attends to the slots.

Everything is computed on tensors of fixed shapes, so that a compiled graph runs the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_kvcaches.equip.frames import as_model_rotated, keys_for_queries, offset, rotated_to
from hf_kvcaches.equip.policies.base import WaitingPolicy, put_score
from hf_kvcaches.equip.scoring import bias_columns, mask_of_slots, seen_by_policy
from hf_kvcaches.kernels.blocks import Visibility, block_attention

if TYPE_CHECKING:
    from hf_kvcaches.core.call import Call
    from hf_kvcaches.equip.layer import EquipLayer

_OBSERVED = ("attention", "gathering", "gathered", "scores")


def step(layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Any) -> torch.Tensor:
    """Takes one token a row and attends: (batch, 1, heads, head_dim).

    Args:
        query: (batch, heads, 1, head_dim), as the model rotated it.
        keys: (batch, kv_heads, 1, head_dim), as the model rotated it.
        running: A `RotatingPass`, or a `GraphPass`.
    """
    state, store, rotation = layer.state, layer.store, layer.rotation
    live = None if running.valid is None else running.valid[:, None]
    if layer.recording is not None:
        layer.recording.begin(layer)
    if live is not None:
        state.pass_over(running.valid, 1)
        state.filled = None
    seen = state.count()
    layer.reserve_for_step()
    assert state.positions is not None
    slot = layer.policy.victim(victim_scores(layer), state.candidates(), sinks_end=layer.sinks_end, recent_start=seen + 1 - state.recent)
    if layer.recording is not None:
        layer.recording.note_slot(layer, slot, rotates=layer.eviction_rotates)
    _evict(layer, slot, live)
    _take_slot(layer, slot, live, seen)
    near = running.rotation(rotation.geometry, state.kept() - 1 + offset(layer)) if rotation.kept_rotated else None
    stored = keys if near is None else near(keys)
    if rotation.unrotated:
        assert rotation.geometry is not None
        stored = running.rotation(rotation.geometry, 0, still=True)(keys)
    states = store.encode(stored, values)
    if live is not None:
        states = tuple(torch.where(live[..., None], new, old) for new, old in zip(states, store.at(slot), strict=True))
    store.write(slot, *states)
    output, weights = _attend(layer, query, near, call, running)
    _observe(layer, weights, slot, running, call.module)
    return output


def victim_scores(layer: EquipLayer) -> torch.Tensor:
    """What each slot is worth, (batch, 1 or kv_heads, slots)."""
    if layer.policy.order_only:
        assert layer.state.positions is not None
        return layer.state.positions
    scores = layer.state.attention if layer.state.scores is None else layer.state.scores
    assert scores is not None
    return scores


def _evict(layer: EquipLayer, slot: torch.Tensor, live: torch.Tensor | None) -> None:
    """Closes the gap that the token in a slot leaves, where positions are compact and the slot is not empty."""
    state = layer.state
    if state.has_room() or not (layer.rotation.unrotated or layer.eviction_rotates):
        return
    positions = state.positions
    assert positions is not None
    evicted = positions.gather(2, slot)
    behind = (positions > evicted) & (evicted >= 0)
    behind = behind if live is None else behind & live
    if state.ranks is None:
        layer.store.rotate_down(behind)
    else:
        state.ranks.sub_(behind.to(state.ranks.dtype))


def _take_slot(layer: EquipLayer, slot: torch.Tensor, live: torch.Tensor | None, seen: int | torch.Tensor) -> None:
    """Says that the new token of each row with one is in a slot."""
    state = layer.state
    positions = state.positions
    assert positions is not None
    new = torch.zeros_like(slot, dtype=positions.dtype) + seen
    positions.scatter_(2, slot, new if live is None else torch.where(live, new, positions.gather(2, slot)))
    state.fill_one()
    if state.ranks is not None:
        rank = (torch.zeros_like(slot) + (state.kept() - 1)).to(state.ranks.dtype)
        state.ranks.scatter_(2, slot, rank if live is None else torch.where(live, rank, state.ranks.gather(2, slot)))
    state.advance(1)


def _attend(layer: EquipLayer, query: torch.Tensor, near: Any, call: Call, running: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one query a row over the slots, and its weights where the policy observes them."""
    state, rotation, sinks = layer.state, layer.rotation, layer.settings.sinks
    valid = state.holding()
    if running.allowed is not None:
        allowed = mask_of_slots(layer, running.allowed)[:, :, 0]
        valid = allowed if valid is None else valid & allowed
    sink_query, ranks = None, None
    rank, beyond = state.kept() - 1, offset(layer)
    if rotation.unrotated:
        assert state.ranks is not None
        ranks = state.ranks[..., : state.used()]
        query = _rotated(query, running.rotation(rotation.geometry, rank))
    elif rotation.kept_rotated:
        if sinks and call.bias is None and not (isinstance(beyond, int) and beyond == 0):
            sink_query = _rotated(query, running.rotation(rotation.geometry, rank))
        query = _rotated(query, near)
    if call.bias is not None:
        return _attend_with_bias(layer, query, call, valid)
    return layer.store.attend(
        query,
        state.used(),
        call.scaling,
        valid=valid,
        leading=None if sink_query is None else min(sinks, state.used()),
        leading_query=sink_query,
        ranks=ranks,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        want_weights=layer.policy.observes != 0,
    )


def _rotated(query: torch.Tensor, rotation: Any) -> torch.Tensor:
    rotated: torch.Tensor = query if rotation is None else rotation(query)
    return rotated


def _attend_with_bias(
    layer: EquipLayer, query: torch.Tensor, call: Call, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with a bias by position, which is permuted as the slots are."""
    used = layer.state.used()
    keys, values = keys_for_queries(layer), layer.store.read(used)[1]
    assert call.bias is not None
    bias = call.bias.expand(query.shape[0], query.shape[1], -1, -1)[:, :, -1:]
    bias = bias.gather(-1, bias_columns(layer, call.bias, used, query.shape[1])[:, :, None])
    # Every slot comes "before" the query, whose own token is in one of them.
    visible = Visibility(valid, used, torch.zeros(query.shape[0], 1, dtype=torch.bool, device=query.device))
    output, weights = block_attention(
        query,
        torch.nn.functional.pad(keys, (0, 0, 0, 1)),
        torch.nn.functional.pad(values, (0, 0, 0, 1)),
        call.scaling,
        visible,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        bias=torch.nn.functional.pad(bias, (0, 1)),
        observers=torch.ones(1, 1, device=query.device) if layer.policy.observes != 0 else None,
    )
    assert output is not None
    return output, None if weights is None else weights[..., :-1]


def _observe(layer: EquipLayer, weights: torch.Tensor | None, slot: torch.Tensor, running: Any, module: nn.Module) -> None:
    """Remembers what a query gave to each slot, and scores the slots anew.

    Args:
        weights: (batch, kv_heads, slots in use), float32, or None where the policy observes none.
    """
    state, policy = layer.state, layer.policy
    if policy.order_only:
        return
    # Rows without a token have nothing to learn.
    before = {name: tensor.clone() for name in _OBSERVED if running.valid is not None and (tensor := getattr(state, name)) is not None}
    complete = state.add_attention(weights.detach(), slot, policy.observes) if weights is not None else True
    if state.scores is not None:
        _rescore(layer, slot, module, complete)
    for name, tensor in before.items():
        getattr(state, name).copy_(torch.where(running.valid[..., None], getattr(state, name), tensor))


def _rescore(layer: EquipLayer, slot: torch.Tensor, module: nn.Module, complete: torch.Tensor | bool) -> None:
    state, policy = layer.state, layer.policy
    assert state.scores is not None
    used, positions = state.used(), layer.positions
    scores = state.scores[..., :used]
    due = policy.due(state.row_tokens(), layer.settings.sinks, complete) if isinstance(policy, WaitingPolicy) else True
    if due is False or (isinstance(due, torch.Tensor) and not bool(due.any())):
        put_score(scores, slot, torch.inf)  # without keys and values, which some stores have to gather
        return
    keys, values = layer.store.read(used)
    if policy.directions:
        keys = as_model_rotated(layer, keys, positions, rotated_to(layer))
    tokens = seen_by_policy(
        layer,
        keys=keys,
        values=values,
        positions=positions,
        attention=None if state.attention is None else state.attention[..., :used],
        seen=state.count(),
        queries=state.queries,
        budget=state.slots,
        module=module,
        due=due,
    )
    scores.copy_(policy.rescore(scores, tokens, slot))
