"""Changing a text that is already in the cache: tokens are dropped, what follows moves, and others are put in their place.

What follows a change keeps the keys and values that it had, computed with the old text before it; only its positions are put right
(Let the Code LLM Edit Itself When You Edit the Code, arXiv 2407.03157). The replacement itself is computed with all that is before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_kvcaches import compat
from hf_kvcaches.equip import blocks
from hf_kvcaches.equip.entries import Entries
from hf_kvcaches.equip.frames import keys_by_rank
from hf_kvcaches.equip.layer import EquipLayer, detours
from hf_kvcaches.equip.rotation import rotation_between
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.blocks import Visibility, block_attention, observers

if TYPE_CHECKING:
    from hf_kvcaches.core.call import Call
    from hf_kvcaches.equip.cache import EquipCache
    from hf_kvcaches.equip.rotation import RotatingPass


def drop(layer: EquipLayer, gone: torch.Tensor, moved: int = 0, start: int = 0) -> None:
    """Empties slots, and moves the tokens from a position on.

    Args:
        gone: True for slots to empty, (batch or 1, 1 or kv_heads, slots in use).
    """
    entries = Entries.of(layer)
    heads = max(gone.shape[1], entries.positions.shape[1])
    positions = entries.positions.expand(-1, heads, -1)
    positions = torch.where(positions >= start, positions + moved, positions)
    positions = torch.where(gone.expand_as(positions), -1, positions)
    layer.state.advance(moved)
    entries = replace(entries, positions=positions).in_order()
    layer.look_for_sinks(entries.positions)
    blocks.install(layer, entries.first(int(entries.kept().max())))


def evict(cache: EquipCache, layers: list[EquipLayer], positions: torch.Tensor) -> None:
    """Drops tokens, by their indices among the tokens seen, wherever they are still kept."""
    seen = cache.seen
    if not positions.numel():
        return
    if not 0 <= int(positions.min()) <= int(positions.max()) < seen:
        raise ConfigError.of("positions", f"indices from 0 to {seen - 1}, among the tokens seen", positions.tolist())
    others = [layer for layer in cache.layers if layer not in layers]
    windows = [layer.sliding_window for layer in others if isinstance(layer, DynamicSlidingWindowLayer)]
    if len(windows) < len(others):
        raise UnsupportedError("evict: this model has layers that keep a state of their own, and they can't forget tokens.")
    if windows and int(positions.max()) > seen - max(windows):
        raise UnsupportedError(
            f"evict: this model has layers with a window of {max(windows)} tokens of their own, and they can't forget what is in it. "
            f"Evict positions up to {seen - max(windows)}."
        )
    for layer in layers:
        held = layer.text_positions()[:, : layer.positions.shape[1]]
        drop(layer, torch.isin(held, positions.to(held.device)))
        layer.make_final()


def edit(cache: EquipCache, model: Any, layers: list[EquipLayer], start: int, stop: int, new_ids: torch.Tensor) -> None:
    """Puts other tokens, (rows, tokens), in the place of some; none at all only deletes."""
    _check(cache, layers, start, stop, new_ids)
    before = [(layer.state.clone(), layer.store.snapshot()) for layer in layers]
    try:
        for layer in layers:
            _open(layer, start, stop, new_ids.shape[1])
        if new_ids.shape[1]:
            _insert(cache, model, layers, start, new_ids)
        for layer in layers:
            layer.make_final()
    except BaseException:
        for layer, (state, content) in zip(layers, before, strict=True):
            layer.state = state
            layer.store.restore(content)
        raise


def _check(cache: EquipCache, layers: list[EquipLayer], start: int, stop: int, new_ids: torch.Tensor) -> None:
    seen = cache.seen
    if not seen:
        raise ConfigError.of("start, stop", "positions among the tokens seen", (start, stop), "The cache is empty: feed it a text first.")
    if not 0 <= start <= stop <= seen:
        raise ConfigError.of("start, stop", f"0 <= start <= stop <= {seen}, positions among the tokens seen", (start, stop))
    if len(layers) < len(cache.layers):
        raise UnsupportedError("edit: this model has layers that keep their own window or state, and they can't be edited.")
    first, padding = layers[0].state.first, layers[0].state.padding
    if first is not None and padding is not None:
        index = torch.arange(padding.shape[1], device=padding.device)
        if start < int(first.max()) or not torch.equal(padding, index >= first[:, None]):
            raise UnsupportedError(
                "edit: rows are padded at or behind the start, so a position is not the same place in all of them. Edit what follows the "
                "padding of every row, or a cache of one row."
            )
    rows = layers[0].store.shape[0]
    if new_ids.shape[0] not in (1, rows):
        raise ConfigError.of("new_ids", f"1 or {rows} rows of token ids", tuple(new_ids.shape))


def _open(layer: EquipLayer, start: int, stop: int, tokens: int) -> None:
    """Drops the span, and moves what follows to make room for so many tokens."""
    positions, geometry, moved = layer.positions, layer.geometry, tokens - (stop - start)
    if moved and stop < layer.seen and not layer.rotation.compact and geometry.kind != "none":
        if geometry.refusal is not None:
            raise UnsupportedError(
                "edit: the keys of this model can't be moved, and what follows would have to. Replace the span by as many tokens as it has."
            )
        keys, values = layer.store.read(layer.state.used())
        keys = geometry.shift(keys, torch.where(positions >= stop, moved, 0))
        layer.store.install(keys, values, layer.state.kept_rows(), layer.state.most())
    drop(layer, (positions >= start) & (positions < stop), moved, stop)


def _insert(cache: EquipCache, model: Any, layers: list[EquipLayer], start: int, new_ids: torch.Tensor) -> None:
    ids, first = new_ids.expand(layers[0].store.shape[0], -1), layers[0].state.first
    position_ids = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    if first is not None:
        position_ids = position_ids - first[:, None].to(ids.device)
    with detours(layers, [Insertion(start)] * len(layers)):
        model(input_ids=ids, position_ids=position_ids, **compat.cache_kwargs(model, cache))


@dataclass(frozen=True)
class Insertion:
    """Puts new tokens into the middle of the text, from the position `start` on; what follows has moved already."""

    start: int

    def attend(
        self, layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: RotatingPass
    ) -> torch.Tensor:
        """Attention over what is before them and themselves, then they take their slots: (batch, tokens, heads, head_dim)."""
        if call.bias is not None:
            raise UnsupportedError("edit: this model adds a bias by position to its scores, which can't be opened in the middle.")
        start, tokens, rotation, used = self.start, keys.shape[2], layer.rotation, layer.state.used()
        earlier = (layer.positions >= 0) & (layer.positions < start)
        rank = earlier.sum(-1, keepdim=True) + torch.arange(tokens, device=keys.device)
        ranked = keys
        if rotation.geometry is not None:
            to = rotation_between(rotation.geometry, running.positions(), rank)
            query, ranked = to(query), to(keys)
        output, observed = block_attention(
            query,
            torch.cat([keys_by_rank(layer), ranked], 2),
            torch.cat([layer.store.read(used)[1], values], 2),
            call.scaling,
            Visibility(earlier, used, None),
            softcap=call.softcap,
            sink_logits=call.sink_logits,
            observers=observers(layer.window(tokens), None, tokens, keys.device) if layer.policy.observes != 0 else None,
        )
        assert output is not None
        if rotation.unrotated:
            assert rotation.geometry is not None
            ranked = rotation_between(rotation.geometry, running.positions(), torch.zeros_like(rank))(keys)
        positions = torch.arange(start, start + tokens, device=keys.device, dtype=torch.int32).expand(keys.shape[0], 1, -1)
        rotated_to = rank.expand(keys.shape[0], -1, -1) if rotation.kept_rotated else None
        entries = Entries(ranked, values, positions, rotated_to).behind(Entries.of(layer))
        entries = blocks.remember(layer, entries, observed, positions.new_full((keys.shape[0], 1, 1), tokens, dtype=torch.long))
        entries = blocks.pruned(layer, entries.in_order(), layer.limit)
        layer.look_for_sinks(entries.positions)
        blocks.install(layer, entries)
        return output
