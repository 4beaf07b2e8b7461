"""Changing a text that is already in the cache: tokens are dropped, what follows moves, and others are put in their place.

What follows a change keeps the keys and values that it had, computed with the old text before it; only its positions are put right
(Let the Code LLM Edit Itself When You Edit the Code, arXiv 2407.03157). The replacement itself is computed with all that stands before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hf_kvcaches.core.blocks import Visibility, block_attention, observers
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip import pruning
from hf_kvcaches.equip.candidates import Candidates, first_of, in_order, joined, kept_candidates, remember
from hf_kvcaches.equip.frames import Frames, TurningPass
from hf_kvcaches.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from hf_kvcaches.core.calls import Call
    from hf_kvcaches.equip.cache import EquipCache
    from hf_kvcaches.equip.layer import EquipLayer


@dataclass(frozen=True)
class Insertion:
    """Tokens on their way into the middle of the text."""

    start: int


def drop(layer: EquipLayer, gone: torch.Tensor, moved: int = 0, start: int = 0) -> None:
    """Empties slots, and moves the tokens from a position on.

    Args:
        gone: True for slots to empty, (batch or 1, 1 or kv_heads, slots in use).
    """
    found = kept_candidates(layer)
    heads = max(gone.shape[1], found.positions.shape[1])
    positions = found.positions.to(torch.int32).expand(-1, heads, -1)
    before = (positions >= 0).sum(-1, keepdim=True)
    positions = torch.where(positions >= start, positions + moved, positions)
    positions = torch.where(gone.expand_as(positions), -1, positions)
    layer.fed += moved
    found = in_order(replace(found, positions=positions))
    layer.absorb(first_of(found, int((positions >= 0).sum(-1).max())), before)


def evict(cache: EquipCache, layers: list[EquipLayer], positions: torch.Tensor) -> None:
    """Drops tokens wherever they are still kept.

    Args:
        positions: Indices among the tokens seen.
    """
    seen = cache.seen
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < seen:
        raise ConfigError.of("positions", f"indices from 0 to {seen - 1}, among the tokens seen", positions.tolist())
    for layer in layers:
        held = layer.kept_positions()[:, : layer.slot_positions().shape[1], : layer.used]
        drop(layer, torch.isin(held, positions.to(held.device)))
        layer.make_final()


def edit(cache: EquipCache, model: Any, layers: list[EquipLayer], start: int, stop: int, new_ids: torch.Tensor) -> None:
    """Puts other tokens in the place of some.

    Args:
        new_ids: (rows, tokens); none at all only deletes.
    """
    moved = new_ids.shape[1] - (stop - start)
    _check(cache, layers, start, stop, new_ids)
    shifts = [_shift(layer, cache, index, stop, moved) for index, layer in enumerate(layers)]
    before = [layer.snapshot() for layer in layers]
    try:
        for layer, turn in zip(layers, shifts, strict=True):
            _open(layer, start, stop, moved, turn)
        if new_ids.shape[1]:
            _run(cache, model, layers, start, new_ids)
        for layer in layers:
            layer.make_final()
    except BaseException:
        for layer, state in zip(layers, before, strict=True):
            layer.restore(state)
        raise


def _check(cache: EquipCache, layers: list[EquipLayer], start: int, stop: int, new_ids: torch.Tensor) -> None:
    seen = cache.seen
    if not seen:
        raise ConfigError.of("start, stop", "positions among the tokens seen", (start, stop), "The cache is empty: feed it a text first.")
    if not 0 <= start <= stop <= seen:
        raise ConfigError.of("start, stop", f"0 <= start <= stop <= {seen}, positions among the tokens seen", (start, stop))
    if len(layers) < len(cache.layers):
        raise UnsupportedError("edit: this model has layers that keep their own window or state, and they can't be edited.")
    if any(layer.fed != layer.seen for layer in layers):
        raise UnsupportedError("edit: the counter of tokens seen was set forward, so positions say nothing of the text. Use a new cache.")
    if any(layer.first is not None for layer in layers):
        raise UnsupportedError("edit: the rows are padded, so a position is not the same place in all of them. Edit a cache of one row.")
    rows = layers[0].rows
    if new_ids.shape[0] not in (1, rows):
        raise ConfigError.of("new_ids", f"1 or {rows} rows of token ids", tuple(new_ids.shape))


def _shift(layer: EquipLayer, cache: EquipCache, index: int, stop: int, moved: int) -> RotaryGeometry | None:
    """The angles by which what follows has to be turned where positions are those of the text; None where nothing is."""
    if layer.frames.turns or moved == 0 or stop >= layer.fed:
        return None
    geometry = RotaryGeometry.from_config(cache.config, layer_idx=index)
    if geometry.kind == "none":
        return None
    if geometry.kind != "rope" or geometry.refusal is not None:
        raise UnsupportedError(
            "edit: the keys of this model can't be moved, and what follows would have to. Replace the span by as many tokens as it has."
        )
    return geometry


def _open(layer: EquipLayer, start: int, stop: int, moved: int, geometry: RotaryGeometry | None) -> None:
    """Drops the span, and moves what follows."""
    held = layer.slot_positions()
    if geometry is not None:
        keys, _ = layer.held_now()
        delta = torch.where(held >= stop, moved, 0)
        layer.replace_keys(Frames("frames", geometry).by(delta)(keys))
    drop(layer, (held >= start) & (held < stop), moved, stop)
    layer.seen += moved


def _run(cache: EquipCache, model: Any, layers: list[EquipLayer], start: int, new_ids: torch.Tensor) -> None:
    ids = new_ids.expand(layers[0].rows, -1)
    for layer in layers:
        layer.inserting = Insertion(start)
    try:
        with torch.no_grad():
            model(
                input_ids=ids,
                position_ids=torch.arange(start, start + ids.shape[1], device=ids.device)[None],
                past_key_values=cache,
                use_cache=True,
            )
    finally:
        for layer in layers:
            layer.inserting = None


def insert_block(
    layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: TurningPass
) -> torch.Tensor:
    """Attention of new tokens in the middle of the text, which then take their slots: (batch, tokens, heads, head_dim).

    Args:
        layer: Told where they begin (`inserting`); what follows has moved already.
        query: (batch, heads, tokens, head_dim), as the model rotated them.
        keys: (batch, kv_heads, tokens, head_dim), likewise.
        call: What else the model said.
    """
    assert layer.inserting is not None
    if call.bias is not None:
        raise UnsupportedError("edit: this model adds a bias by position to its scores, which can't be opened in the middle.")
    start, tokens, frames = layer.inserting.start, keys.shape[2], layer.frames
    held = layer.slot_positions()
    earlier = (held >= 0) & (held < start)
    place = earlier.sum(-1, keepdim=True) + torch.arange(tokens, device=keys.device)
    placed = keys
    if frames.geometry is not None:
        turn = running.turn(frames.geometry, place)
        assert turn is not None
        query, placed = turn(query), turn(keys)
    visible = Visibility(earlier, layer.used, None)
    observe = layer.policy.observes != 0
    output, observed = block_attention(
        query,
        torch.cat([layer.placed_keys(running), placed], 2),
        torch.cat([layer.held_now()[1], values], 2),
        call.scaling,
        visible,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        observers=observers(layer.window(tokens), None, tokens, keys.device) if observe else None,
    )
    assert output is not None
    stored, stands = placed, place if frames.two else None
    if frames.unrotated:
        back = running.turn(frames.geometry, torch.zeros_like(place))  # type: ignore[arg-type]
        assert back is not None
        stored = back(keys)
    positions = torch.arange(start, start + tokens, device=keys.device, dtype=torch.int32).expand(keys.shape[0], 1, -1)
    new = Candidates(stored, values, positions, None if stands is None else stands.expand(keys.shape[0], -1, -1), None, None, None)
    found = joined(layer, kept_candidates(layer), new)
    remember(layer, found, observed, positions.new_full((keys.shape[0], 1, 1), tokens, dtype=torch.long))
    pruning.lay_out(layer, in_order(found), layer.limit)
    return output
