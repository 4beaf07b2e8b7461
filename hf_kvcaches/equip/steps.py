"""One new token: the one that goes is overwritten, then the query attends to the slots."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_kvcaches.core.blocks import Visibility, block_attention
from hf_kvcaches.equip.frames import TurningPass
from hf_kvcaches.equip.pruning import seen_by_policy
from hf_kvcaches.equip.state import UNKNOWN
from hf_kvcaches.equip.tokens import ages
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.slots import slot_attention

if TYPE_CHECKING:
    from hf_kvcaches.core.calls import Call
    from hf_kvcaches.equip.layer import EquipLayer


def turn_ring(
    layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: TurningPass
) -> bool | torch.Tensor:
    """`insert` and `attend` at once for a full ring, the usual step of the streaming policy; False where there is more to it.

    What `insert` and `attend` ask of a layer takes as long as the attention of a small model, so here each thing is asked once.

    Args:
        query: (batch, heads, 1, head_dim), as the model rotated it.
        keys: (batch, kv_heads, 1, head_dim), likewise.
    """
    counters, frames, slots = layer.counters_now(), layer.frames, layer.slots
    key_buffer, value_buffer = layer.keys, layer.values
    if counters["filled"] < slots or layer.positions is not None or counters["offset_rows"] is not None or running.valid is not None:
        return False
    if counters["offset"] >= frames.limit or torch.is_grad_enabled() or running.allowed is not None or call.bias is not None:
        return False
    assert key_buffer is not None
    assert value_buffer is not None
    if key_buffer.is_inference() and not torch.is_inference_mode_enabled():
        return False
    slot, sinks, far_query = counters["cursor"], layer.settings.sinks, None
    offset = counters["offset"] + 1
    if frames.geometry is not None:
        near = running.turn(frames.geometry, slots - 1 + offset)
        if sinks:
            far = running.turn(frames.geometry, slots - 1)
            far_query = query if far is None else far(query)
        if near is not None:
            query, keys = near(query), near(keys)
    key_buffer.narrow(2, slot, 1).copy_(keys)
    value_buffer.narrow(2, slot, 1).copy_(values)
    counters["offset"], counters["cursor"], counters["fed"] = offset, slot + 1 if slot + 1 < slots else sinks, counters["fed"] + 1
    return slot_attention(
        query,
        key_buffer,
        value_buffer,
        call.scaling,
        far=None if far_query is None else sinks,
        far_query=far_query,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        backend=layer.backend,
        check=False,
    )[0]


def insert(layer: EquipLayer, keys: torch.Tensor, values: torch.Tensor, running: TurningPass) -> int | torch.Tensor:
    """Writes one token a row into its slot, over the one that goes where there is no room, and returns the slot.

    Args:
        keys: (batch, kv_heads, 1, head_dim), as the model rotated them.

    Returns:
        The slot, where it is the same everywhere; else (batch, 1 or kv_heads, 1).
    """
    if layer.frames.two:
        layer.rebase_if_due()
    if layer.is_ring and running.valid is None:
        slot = _turn_ring(layer)
        layer.write(slot, _arrived(layer, keys, running), values)
        layer.fed += 1
        return slot
    layer.leave_ring()
    if running.valid is not None:
        layer.make_ragged()
    if layer.oldest_recent == UNKNOWN and layer.filled == layer.slots:
        layer.find_recents()
    if running.valid is None and layer.oldest_recent >= 0:
        return _insert_in_turn(layer, keys, values, running)
    layer.oldest_recent = UNKNOWN if layer.filled < layer.slots else -1
    return _insert_by_score(layer, keys, values, running)


def _turn_ring(layer: EquipLayer) -> int:
    """The slot for a token where the oldest one goes."""
    filled = layer.filled
    if filled < layer.slots:
        layer.filled = filled + 1
        layer.reserve(filled + 1)
        return filled
    slot = layer.cursor
    layer.cursor = slot + 1 if slot + 1 < layer.slots else layer.settings.sinks
    layer.count_evicted(1)
    return slot


def _arrived(layer: EquipLayer, keys: torch.Tensor, running: TurningPass) -> torch.Tensor:
    """New keys in the rotation in which they are kept."""
    frames = layer.frames
    if frames.geometry is None:
        return keys
    if frames.unrotated:
        turn = running.turn(frames.geometry, 0, still=True)
    else:
        turn = running.turn(frames.geometry, layer.place + layer.frame_offset)
    return keys if turn is None else turn(keys)


def _insert_in_turn(layer: EquipLayer, keys: torch.Tensor, values: torch.Tensor, running: TurningPass) -> int:
    """As `_insert_by_score`, where the newest tokens have a ring of slots behind all others.

    The one that leaves the ring takes the slot of the one that goes, if that is not itself, and the new one takes its place in the ring.
    So nothing has to be looked for but the lowest score, and that not among the newest.
    """
    slot, start, sinks = layer.oldest_recent, layer.slots - layer.near, layer.settings.sinks
    positions, scores, leaving = layer.positions, layer.victim_scores(), layer.fed - layer.near
    assert positions is not None
    candidates, worth = positions[..., sinks:start], scores[..., sinks:start]
    if start > sinks:
        lowest = torch.minimum(worth.amin(-1, keepdim=True), scores[..., slot : slot + 1])
        oldest, index = ages(candidates, worth > lowest).min(-1, keepdim=True)
        stays = oldest < torch.iinfo(positions.dtype).max  # the one that leaves the ring
        if layer.frames.two:
            layer.turn_back(candidates > torch.where(stays, oldest, leaving), sinks)
        old_keys, old_values = layer.token_at(slot)
        if layer.frames.two:
            key = ("leaves", id(layer.frames.geometry), layer.offset)
            back = running.shared(key, lambda: layer.frames.by(torch.tensor([-layer.offset - 1], device=positions.device)))
            old_keys = back(old_keys)
        # If it goes it is written where it was, before the new one is.
        target = torch.where(stays, index + sinks, slot)
        layer.write(target, old_keys, old_values)
        positions.scatter_(2, target, leaving)
        layer.move_scores(slot, target)
    positions[..., slot] = layer.fed
    layer.count_evicted(1)
    layer.write(slot, _arrived(layer, keys, running), values)
    layer.oldest_recent = slot + 1 if slot + 1 < layer.slots else start
    layer.fed += 1
    return slot


def _insert_by_score(layer: EquipLayer, keys: torch.Tensor, values: torch.Tensor, running: TurningPass) -> int | torch.Tensor:
    live = None if running.valid is None else running.valid[:, None]
    if live is not None:
        layer.pass_over(running.valid, 1)
    if layer.kept_rows is not None:
        layer.reserve(min(layer.slots, layer.fed + 1))  # no row keeps more than came
    positions, near_start = layer.positions, layer.near_start + 1
    assert positions is not None
    if layer.frames.two:
        leaving = positions == near_start - 1
        _promote(layer, leaving if live is None else leaving & live, running)
    evicted: torch.Tensor | None
    if layer.kept_rows is None and layer.filled < layer.slots:
        slot: int | torch.Tensor = layer.filled
        layer.filled += 1
        layer.reserve(layer.filled)
        evicted, index = None, torch.full((positions.shape[0], positions.shape[1], 1), layer.filled - 1, device=positions.device)
    else:
        index = slot = layer.policy.victim(
            layer.victim_scores(),
            positions,
            sinks_end=layer.sinks_end,
            recent_start=layer.fed + 1 - layer.recent,
        )
        evicted = positions.gather(2, index)
    positions = layer.positions
    if evicted is not None:
        _close_gap(layer, evicted, index, near_start, live)
    layer.count_insertion(evicted, live)
    keys = _arrived(layer, keys, running)
    if live is not None:
        keys, values = layer.mix_dead_rows(live, index, keys, values)
    layer.write(slot, keys, values)
    assert positions is not None
    new = torch.full_like(index, layer.fed, dtype=positions.dtype)
    positions.scatter_(2, index, new if live is None else torch.where(live, new, positions.gather(2, index)))
    if layer.ranks is not None:
        place = layer.place if isinstance(layer.place, torch.Tensor) else torch.full_like(index, layer.place)
        place = place.to(layer.ranks.dtype).expand_as(index)
        layer.ranks.scatter_(2, index, place if live is None else torch.where(live, place, layer.ranks.gather(2, index)))
    layer.fed += 1
    return slot


def _promote(layer: EquipLayer, leaving: torch.Tensor, running: TurningPass) -> None:
    """Turns the token that leaves the recent ones from the near frame into the far one."""
    offset = layer.frame_offset
    if isinstance(offset, int):
        if offset == 0:
            return
        key = ("promote", id(layer.frames.geometry), offset)
        turn = running.shared(key, lambda: layer.frames.by(torch.tensor([-offset], device=leaving.device)))
    else:
        turn = layer.frames.by(-offset)
    index = leaving.int().argmax(-1, keepdim=True)
    keys = layer.keys_at(index)
    layer.write_keys(index, torch.where(leaving.any(-1, keepdim=True)[..., None], turn(keys), keys))


def _close_gap(layer: EquipLayer, evicted: torch.Tensor, index: torch.Tensor, near_start: int, live: torch.Tensor | None) -> None:
    """Moves the far tokens behind the evicted one a place back."""
    positions = layer.positions
    assert positions is not None
    if layer.frames.two:
        behind = (positions > evicted) & (positions < near_start) & (evicted >= 0)
        layer.turn_back(behind if live is None else behind & live)
    elif layer.ranks is not None:
        behind = (layer.ranks > layer.ranks.gather(2, index)) & (evicted >= 0)
        layer.ranks.sub_((behind if live is None else behind & live).to(layer.ranks.dtype))


def attend(layer: EquipLayer, query: torch.Tensor, call: Call, running: TurningPass) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one query a row over the slots: (batch, 1, heads, head_dim), and its weights where the policy observes them.

    Args:
        query: (batch, heads, 1, head_dim), as the model rotated it.
    """
    valid = layer.holding()
    if running.allowed is not None:
        given = _given(layer, running.allowed)
        valid = given if valid is None else valid & given
    frames, place, offset = layer.frames, layer.place, layer.frame_offset
    want = layer.policy.observes != 0
    if call.bias is not None:
        return _attend_with_bias(layer, query, call, running, valid)
    far: int | torch.Tensor | None = None
    far_query = None
    ranks = None
    if frames.geometry is not None and frames.two:
        near = running.turn(frames.geometry, place + offset)
        if isinstance(offset, torch.Tensor) or offset:
            turn = running.turn(frames.geometry, place)
            far_query = query if turn is None else turn(query)
            far = layer.far_slots()
            if isinstance(far, int) and far == 0:
                far = far_query = None
        query = query if near is None else near(query)
    elif frames.geometry is not None:
        turn = running.turn(frames.geometry, place)
        query = query if turn is None else turn(query)
        ranks = layer.slot_ranks(running)
    return layer.attend_held(query, call, valid=valid, far=far, far_query=far_query, ranks=ranks, want_weights=want)


def _given(layer: EquipLayer, allowed: torch.Tensor) -> torch.Tensor:
    """What a mask of the model's own says about the slots, (batch or 1, 1 or kv_heads, slots)."""
    if allowed.shape[1] != 1:
        raise UnsupportedError("attention_mask: EquipCache can't follow a mask that differs by head. Give one for all heads.")
    held = layer.kept_positions()[:, :, : layer.used].clamp(min=0)
    return allowed[:, :, 0].expand(held.shape[0], held.shape[1], -1).gather(-1, held)


def _attend_with_bias(
    layer: EquipLayer, query: torch.Tensor, call: Call, running: TurningPass, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with a bias by position, which is permuted as the slots are."""
    keys, values = layer.near_keys(running), layer.held_now()[1]
    assert call.bias is not None
    held = layer.kept_positions()[:, :, : layer.used].clamp(min=0)
    if layer.compact:
        ranks = layer.slot_positions().argsort(-1).argsort(-1)
        held = (ranks + call.bias.shape[-1] - layer.used).expand_as(held)
    bias = call.bias.expand(query.shape[0], query.shape[1], -1, -1)
    held = held.repeat_interleave(query.shape[1] // held.shape[1], 1)
    bias = bias[:, :, -1:].gather(-1, held[:, :, None])
    if layer.frames.geometry is not None:
        target = layer.place + layer.frame_offset if layer.frames.two else layer.place
        turn = running.turn(layer.frames.geometry, target)
        query = query if turn is None else turn(query)
    # Every slot comes "before" the query, whose own token is in one of them.
    blank = torch.zeros_like(keys[:, :, :1])
    visible = Visibility(valid, layer.used, torch.zeros(query.shape[0], 1, dtype=torch.bool, device=query.device))
    output, weights = block_attention(
        query,
        torch.cat([keys, blank], 2),
        torch.cat([values, torch.zeros_like(values[:, :, :1])], 2),
        call.scaling,
        visible,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        bias=torch.nn.functional.pad(bias, (0, 1)),
        observers=torch.ones(1, 1, device=query.device) if layer.policy.observes != 0 else None,
    )
    assert output is not None
    return output, None if weights is None else weights[..., :-1]


def observe(layer: EquipLayer, weights: torch.Tensor | None, slot: int | torch.Tensor, running: TurningPass, module: nn.Module) -> None:
    """Remembers what a query gave to each slot, and scores the slots anew.

    Args:
        weights: (batch, kv_heads, slots in use), float32, or None where the policy doesn't look.
    """
    policy = layer.policy
    if policy.order_only:
        return
    if policy.scores_are_sums and layer.scores is None and isinstance(slot, int) and running.valid is None:
        assert weights is not None
        layer.add_to_sums(weights.detach(), slot)
        return
    index = layer.slot_index(slot)
    complete: torch.Tensor | bool = True
    remembered = ("attention", "gathering", "gathered", "scores")
    # Rows without a token have nothing to learn.
    before = {name: tensor.clone() for name in remembered if running.valid is not None and (tensor := getattr(layer, name)) is not None}
    if weights is not None:
        complete = layer.add_attention(weights.detach(), index)
    keys, values = layer.held_now()
    assert layer.positions is not None
    used = layer.used
    first = 0 if layer.first is None else layer.first
    if layer.frames.turns and policy.looks(layer.fed, first, layer.settings.sinks):
        keys = layer.as_rotated(keys, layer.positions[..., :used], layer.standing() if layer.frames.two else None)
    tokens = seen_by_policy(
        layer,
        keys,
        values,
        layer.positions[..., :used],
        None if layer.attention is None else layer.attention[..., :used],
        seen=layer.fed,
        queries=layer.queries,
        budget=layer.slots,
        module=module,
        complete=complete if isinstance(complete, bool) else True,
    )
    scores = layer.victim_scores()[..., :used]
    if isinstance(complete, bool) or bool(complete.all()):
        layer.set_scores(policy.rescore(scores, tokens, index))
    else:
        waiting = policy.rescore(scores.clone(), replace(tokens, complete=False), index)
        layer.set_scores(torch.where(complete, policy.rescore(scores, tokens, index), waiting))
    if running.valid is not None:
        for name, held in before.items():
            now = getattr(layer, name)
            if now is not None:
                setattr(layer, name, torch.where(running.valid[..., None], now, held))
