"""A prefill with reuse, one token after the other: what is stored is appended, all else is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import GrowingCache, RotaryGeometry, SegmentReuseCache, SegmentStore
from hf_kvcaches.reuse.partial import run_layers
from hf_kvcaches.reuse.plan import PromptRow

States = list[tuple[torch.Tensor, torch.Tensor]]


class Source:
    """An earlier prompt, as the model alone computes it."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.model = model
        # Its layers keep all tokens, also those with a window.
        cache = SegmentReuseCache(model, SegmentStore("memory"), mode="exact")
        with torch.no_grad():
            model(ids, past_key_values=cache)
        self.layers = [(layer.keys, layer.values) for layer in cache.layers]

    def at(self, position: int, place: int) -> States:
        """Keys and values of one token, for another place."""
        found = []
        for index, (keys, values) in enumerate(self.layers):
            geometry = RotaryGeometry.from_config(self.model.config, layer_idx=index)
            key = keys[:, :, position : position + 1]
            found.append((geometry.shift(key, place - position) if place != position else key, values[:, :, position : position + 1]))
        return found


def step_by_step(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: Mapping[int, int],
    source: Source,
    repaired: Mapping[int, tuple[int, int]] | None = None,
    given: Mapping[int, States] | None = None,
) -> tuple[torch.Tensor, DynamicCache, dict[int, States]]:
    """The last token's logits, the cache, and the keys and values of the tokens that ran in all layers.

    Args:
        model: The model.
        ids: (1, tokens).
        positions: For each place that is reused, where it stood in the source.
        source: The earlier prompt.
        repaired: For other places, how many layers run, and where the token stood in the source, whose keys and values the others reuse.
        given: Keys and values of other places.
    """
    cache, ran = GrowingCache(model.config), dict[int, States]()
    logits = None
    with torch.no_grad():
        for place in range(ids.shape[1]):
            if place in (repaired or {}):
                depth, position = repaired[place]
                run_layers(model, 0, depth, ids[:, place : place + 1], cache, torch.tensor([place]))
                for layer, (key, value) in list(zip(cache.layers, source.at(position, place), strict=True))[depth:]:
                    layer.update(key, value)
            elif place in positions or place in (given or {}):
                states = source.at(positions[place], place) if place in positions else given[place]
                for layer, (key, value) in zip(cache.layers, states, strict=True):
                    layer.update(key, value)
            else:
                logits = model(ids[:, place : place + 1], position_ids=torch.tensor([[place]]), past_key_values=cache).logits
                ran[place] = [(layer.keys[:, :, -1:].clone(), layer.values[:, :, -1:].clone()) for layer in cache.layers]
    return logits[:, -1], cache, ran


def as_planned(
    model: PreTrainedModel, ids: torch.Tensor, row: PromptRow, source: Source, repaired: Mapping[int, tuple[int, int]] | None = None
) -> tuple[torch.Tensor, DynamicCache]:
    """The last token's logits and the cache of a planned row: new tokens see what is stored, and the last ones what is repaired."""
    stored = {place: place - tokens.start + tokens.position for tokens in row.sources for place in range(tokens.start, tokens.stop)}
    given: dict[int, Any] = {}
    if row.probed:
        ran = step_by_step(model, ids, stored, source)[2]
        given = {place: ran[place] for place in row.new.tolist() if place < ids.shape[1] - row.probed}
    again = set(row.running().tolist())
    positions = {place: position for place, position in stored.items() if place not in again}
    return step_by_step(model, ids, positions, source, repaired, given)[:2]


def reused_positions(cache: Any, row: int = 0) -> dict[int, int]:
    """For each place that a cache has reused, where it stood when it was stored."""
    positions = {}
    for span in (span for planned in cache.plans if planned.number == row for span in planned.spans):
        for tokens in span.sources:
            for place in set(range(tokens.start, tokens.stop)) - set(span.computed.tolist()):
                positions[place] = tokens.position + place - tokens.start
    return positions
