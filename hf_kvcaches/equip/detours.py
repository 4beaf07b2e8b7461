"""Passes whose new tokens are not appended: the second reading of a context (KVzip, arXiv 2505.23416), and changes of a text in the cache.

What follows a change keeps the keys and values that it had, computed with the old text before it; only its positions are put right (Let the
Code LLM Edit Itself When You Edit the Code, arXiv 2407.03157). The replacement itself is computed with all that is before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_kvcaches import compat
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.identity import Provenance
from hf_kvcaches.core.step import Pass
from hf_kvcaches.equip.policies.future import even_chunks, most_received
from hf_kvcaches.equip.pruning import joined
from hf_kvcaches.equip.slot_layer import Undo
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.attention import Visibility


@contextmanager
def detours(cache: Any, layers: Sequence[Any], ways: Sequence[Callable[..., torch.Tensor]]) -> Iterator[Provenance]:
    """Have each layer's new tokens take a detour, without gradients; what computed them is noted apart from what the cache was fed."""
    for layer, way in zip(layers, ways, strict=True):
        layer.detour = way
    fed, cache.provenance = cache.provenance, Provenance()
    try:
        with torch.no_grad():
            yield cache.provenance
    finally:
        cache.provenance = fed
        for layer in layers:
            layer.detour = None


def _reread(
    received: torch.Tensor, span: list[int], layer: Any, query: torch.Tensor, keys: torch.Tensor, values: Any, call: Call, running: Pass
) -> torch.Tensor:
    """Attention of repeated tokens over the context and each other. The layer stores none of them.

    `received` gets the largest weight that tokens of a `span` of the text have from their own repetition; a table of all tokens by all
    tokens is never made.
    """
    table, rotation = layer.table, layer.rotation
    steps = torch.arange(running.tokens, device=keys.device)[None] if running.valid is None else running.valid.cumsum(-1) - 1
    count = table.count if isinstance(table.count, int) else table.count.view(-1, 1)
    index = rotation.index_of_new(table, steps.clamp(min=0) + count)
    query, keys = (rotation.to_frame(x, running.positions(), index, table) for x in (query, keys))
    kept_states = layer.kept_states(table.used)
    text = table.text_index()[:, :1]  # nothing is pruned yet: all heads hold the same tokens
    inside = (text >= span[0]) & (text < span[1])
    columns = inside.any(0).any(0).nonzero()[:, 0]
    real = None if running.valid is None else torch.cat([inside[..., columns], running.valid[:, None]], -1)
    most = most_received(query * call.scaling, kept_states[0][:, :, columns], keys, call.softcap, real)
    received[..., columns] = torch.maximum(received[..., columns], most)
    kept = int(columns[-1]) + 1 if columns.numel() else 0
    visible = Visibility((text[..., :kept] >= 0) & (text[..., :kept] < span[1]), kept, running.valid)
    states = joined((kept_states[0][:, :, :kept], kept_states[1][:, :, :kept]), (keys, values))
    output: torch.Tensor = layer.attend_with(query, states, call, visible, call.bias)[0]
    return output


def reconstruct(cache: Any, model: Any, layers: list[Any], input_ids: torch.Tensor | None, context: int) -> list[torch.Tensor]:
    """Feed a context of so many tokens again, a chunk at a time; return the most that a query of it gave to each slot of each layer."""
    rows = layers[0].storage.shape[0]
    ids = cache.log.ids if input_ids is None else input_ids.reshape(-1, input_ids.shape[-1])
    if ids.shape[0] != rows or ids.shape[1] < context:
        what = f"the ids of the {context} tokens of the context in {rows} rows"
        raise ConfigError.of("input_ids", what, tuple(ids.shape), "Pass compress(model, input_ids=...), padding included.")
    ids = ids[:, :context].to(compat.base_model(model).device)
    if not all(layer.waiting for layer in layers):
        raise UnsupportedError(
            "compress: this policy reads a context again while all of it is held, and this one was compressed before. Feed the longer text "
            "to a new cache, or use a policy that can compress again, such as 'future'."
        )
    # Layers without full attention are put back as they were.
    others = {index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers) if layer not in layers}
    real = torch.ones(ids.shape[0], cache.seen, dtype=torch.bool, device=ids.device)
    if (text := layers[0].table.text) is not None:  # None: no row was padded, and all tokens are real, also evicted ones
        places = torch.where(text < 0, cache.seen, text)[:, 0].to(ids.device)
        real = real.new_zeros(ids.shape[0], cache.seen + 1).scatter_(1, places, True)[:, :-1]
    received = [torch.zeros(*layer.storage.shape, layer.table.used, device=layer.device) for layer in layers]
    span = [0, 0]
    try:
        with detours(cache, layers, [partial(_reread, tensor, span) for tensor in received]):
            for piece in even_chunks(context, cache.policy.deferred):
                part, span[:] = ids[:, piece], (piece.start, piece.stop)
                mask = torch.cat([real, real[:, piece]], 1).long()
                model(
                    input_ids=part,
                    attention_mask=mask if not bool(mask.all()) else None,
                    position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :],
                    **compat.cache_kwargs(model, cache),
                    logits_to_keep=1,
                )
                for index, layer in others.items():
                    cache.layers[index] = copy.deepcopy(layer)
    finally:
        for index, layer in others.items():
            cache.layers[index] = layer
    return received


def evict(cache: Any, layers: list[Any], positions: torch.Tensor) -> None:
    """Drop tokens, by their indices among the tokens seen, wherever they are still kept."""
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
    with layers[0].storage.rewriting():
        for layer in layers:
            layer.table.catch_up()
            with cache.at_hand(layer):
                layer.drop(torch.isin(layer.table.text_index(), positions.to(layer.device)))
                layer.make_final()


def edit(cache: Any, model: Any, layers: list[Any], start: int, stop: int, new_ids: torch.Tensor) -> None:
    """Put other tokens, (rows, tokens), in the place of some; none at all only deletes."""
    _check(cache, layers, start, stop, new_ids)
    ids, table, by = new_ids.expand(layers[0].storage.shape[0], -1), layers[0].table, Provenance()
    with layers[0].storage.rewriting():
        before = [Undo(layer) for layer in layers]
        try:
            for layer in layers:
                layer.table.catch_up()
                with cache.at_hand(layer):
                    _open(layer, start, stop, ids.shape[1])
            if ids.shape[1]:
                positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
                if table.counts is not None:
                    positions = positions - (table.seen - table.counts).view(-1, 1).to(ids.device)
                with detours(cache, layers, [partial(_insert, start)] * len(layers)) as by:
                    model(input_ids=ids, position_ids=positions, **compat.cache_kwargs(model, cache))
        except BaseException:
            for layer, undo in zip(layers, before, strict=True):
                undo.restore(layer)
            raise
        for layer in layers:
            layer.make_final()
        cache.provenance.replace(start, stop, ids.shape[1], by)
        cache.provenance.crop(cache.seen)


def _check(cache: Any, layers: list[Any], start: int, stop: int, new_ids: torch.Tensor) -> None:
    seen = cache.seen
    if not seen:
        raise ConfigError.of("start, stop", "positions among the tokens seen", (start, stop), "The cache is empty: feed it a text first.")
    if not 0 <= start <= stop <= seen:
        raise ConfigError.of("start, stop", f"0 <= start <= stop <= {seen}, positions among the tokens seen", (start, stop))
    if len(layers) < len(cache.layers):
        raise UnsupportedError("edit: this model has layers that keep their own window or state, and they can't be edited.")
    table = layers[0].table
    if table.counts is not None:
        # Padding that is no row's beginning, or reaches into the edit, makes one position several places.
        padding = seen - table.counts
        shifted = (table.text_index() - table.positions[..., : table.used]) == padding
        if start < int(padding.max()) or not bool((shifted | (table.text_index() < 0)).all()):
            raise UnsupportedError(
                "edit: rows are padded at or behind the start, so a position is not the same place in all of them. Edit what follows the "
                "padding of every row, or a cache of one row."
            )
    if new_ids.shape[0] not in (1, rows := layers[0].storage.shape[0]):
        raise ConfigError.of("new_ids", f"1 or {rows} rows of token ids", tuple(new_ids.shape))


def _open(layer: Any, start: int, stop: int, tokens: int) -> None:
    """Drop the span, and move what follows to make room for so many tokens."""
    layer.unshift()
    layer.own()
    table, geometry, moved = layer.table, layer.geometry, tokens - (stop - start)
    text = table.text_index()
    behind, dropped = text >= stop, (text >= start) & (text < stop)
    if moved and stop < layer.seen and not layer.rotation.unrotated and geometry.kind != "none":
        if geometry.refusal is not None:
            raise UnsupportedError(
                "edit: the keys of this model can't be moved, and what follows would have to. Replace the span by as many tokens as it has."
            )
        keys, values = layer.storage.read(table.used)
        keys = geometry.shift(keys, torch.where(behind, moved, 0))
        layer.storage.rebuild(None, layer.storage.encode(keys, values), 0, layer.slots)
    for name in ("positions", "text"):
        if (places := getattr(table, name)) is not None:
            places[..., : table.used] += torch.where(behind, moved, 0).to(places.dtype)
    table.advance(moved)
    if table.counts is not None:
        table.counts, table.fewest = table.counts + moved, max(0, table.fewest + moved)
    layer.drop(dropped)


def _insert(
    start: int, layer: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass
) -> torch.Tensor:
    """Put new tokens into the middle of the text, where what follows has moved already: they see what is before `start` and themselves."""
    if call.bias is not None:
        raise UnsupportedError("edit: this model adds a bias by position to its scores, which can't be opened in the middle.")
    table, rotation, used, batch, tokens = layer.table, layer.rotation, layer.table.used, *keys.shape[::2]
    text = torch.arange(start, start + tokens, device=keys.device).expand(batch, 1, -1)
    index = positions = text if table.counts is None else text - (table.seen - table.counts)
    earlier = (table.text_index() >= 0) & (table.text_index() < start)
    if rotation.unrotated and used:  # what follows moves on in the frame, so that new tokens have one index in all rows and heads
        first, later = earlier.sum(-1).max(), (table.text_index() >= 0) & ~earlier
        table.distances[..., :used] += (used - first - later.sum(-1, keepdim=True) - tokens * later).to(torch.int32)
        index = (first + torch.arange(tokens, device=earlier.device)).view(1, 1, -1)
    new = layer.incoming(keys, values, running, index)
    query = rotation.to_frame(query, running.positions(), index[:, 0], table)
    output: torch.Tensor
    output, observed = layer.attend_with(query, states := layer.states(used, new), call, Visibility(earlier, used, None))
    table.append(positions.to(torch.int32), None if table.text is None else text)
    layer.arrive(new, None, attention=observed, states=states, queries=query, query_index=index[:, 0], module=call.module)
    return output
