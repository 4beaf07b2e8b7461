"""Drafted tokens of the streaming policy: one attention and one indexed write for all of them, as if they had come one by one.

Which token each draft evicts is known beforehand, so query i is only hidden the slots of the first i + 1 victims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_kvcaches.equip.blocks import block_index

if TYPE_CHECKING:
    from hf_kvcaches.core.call import Call
    from hf_kvcaches.equip.layer import EquipLayer
    from hf_kvcaches.equip.rotation import RotatingPass


def fits(layer: EquipLayer, tokens: int, call: Call, running: RotatingPass) -> bool:
    """Whether drafts can be taken at once."""
    state, sinks = layer.state, layer.settings.sinks
    plain = layer.recording is not None and call.bias is None and running.valid is None and running.allowed is None
    known = layer.evicts_in_order and not layer.rotation.unrotated and state.filled is not None and state.filled >= sinks
    return plain and known and 1 < tokens <= state.slots - sinks


def take_drafts(
    layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: RotatingPass
) -> torch.Tensor:
    """Takes drafts and attends: (batch, tokens, heads, head_dim).

    Args:
        query: (batch, heads, tokens, head_dim), as the model rotated them.
        keys: (batch, kv_heads, tokens, head_dim), as the model rotated them.
    """
    state, store, rotation, tokens = layer.state, layer.store, layer.rotation, keys.shape[2]
    assert layer.recording is not None
    assert state.filled is not None
    filled = state.filled
    store.reserve(min(state.slots, filled + tokens), state.slots)
    state.reserve(store.capacity)
    victims = _victims(layer, tokens)
    sink_query = None
    if rotation.kept_rotated:
        assert rotation.geometry is not None
        ranks = (torch.arange(filled, filled + tokens, device=keys.device)).clamp(max=state.slots - 1)
        to_ranks = running.rotation(rotation.geometry, ranks[None, None])
        near = running.rotation(rotation.geometry, block_index(layer, running))
        sink_query = query if to_ranks is None else to_ranks(query)
        query, keys = (query, keys) if near is None else (near(query), near(keys))
    output = _attend(layer, query, sink_query, keys, values, victims, call)
    layer.recording.note_drafts(layer, victims)
    store.write(victims, *store.encode(keys, values))
    return output


def _victims(layer: EquipLayer, tokens: int) -> torch.Tensor:
    """The slots that new tokens take one after the other, (batch, 1, tokens): empty ones, then those of the oldest behind the sinks."""
    positions = layer.state.positions
    assert positions is not None
    slots = torch.arange(positions.shape[-1], device=positions.device, dtype=positions.dtype)
    worth = torch.where(positions < 0, slots - len(slots), positions)
    worth[..., : layer.settings.sinks] = torch.iinfo(worth.dtype).max
    return worth.topk(tokens, largest=False, sorted=True).indices


def _attend(
    layer: EquipLayer,
    query: torch.Tensor,
    sink_query: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    victims: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    """Attention of drafts over slots and each other.

    Args:
        query: (batch, heads, tokens, head_dim), rotated as the keys behind the sinks.
        sink_query: The same, rotated as the sinks; None where these are rotated alike.
        victims: (batch, 1, tokens).
    """
    used, tokens, kv_heads = layer.state.used(), keys.shape[2], keys.shape[1]
    old_keys, old_values = layer.store.read(used)
    sinks = min(layer.settings.sinks, used)

    def scores_of(asking: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        return (asking * call.scaling).unflatten(1, (kv_heads, -1)) @ asked[:, :, None].mT

    parts = [scores_of(query if sink_query is None else sink_query, old_keys[:, :, :sinks])]
    parts += [scores_of(query, old_keys[:, :, sinks:]), scores_of(query, keys)]
    scores = torch.cat(parts, -1).float()
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    # The draft that takes each slot; a slot that none takes is seen by all.
    taken_by = torch.full((victims.shape[0], layer.store.capacity), tokens, device=keys.device)
    taken_by.scatter_(1, victims[:, 0], torch.arange(tokens, device=keys.device).expand(victims.shape[0], -1))
    order = torch.arange(tokens, device=keys.device)[:, None]
    visible = torch.cat([taken_by[:, None, :used] > order, (order >= order.T).expand(victims.shape[0], -1, -1)], -1)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if call.sink_logits is not None:
        logits = call.sink_logits.float().view(1, kv_heads, -1, 1, 1)
        scores = torch.cat([scores, logits.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : used + tokens].to(values.dtype)
    output = weights[..., :used] @ old_values[:, :, None] + weights[..., used:] @ values[:, :, None]
    return output.flatten(1, 2).transpose(1, 2)
