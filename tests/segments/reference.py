"""A prefill with reuse, one token after the other: what is stored is appended, all else is run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import GrowingCache, RotaryGeometry, SegmentReuseCache, SegmentStore
from hf_kvcaches.reuse.partial import run_layers

States = list[tuple[torch.Tensor, torch.Tensor]]


class Source:
    """An earlier prompt, as the model alone computes it."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, cut: int | None = None) -> None:
        self.model = model
        # Its layers keep all tokens, also those with a window.
        cache = SegmentReuseCache(model, SegmentStore("memory"), mode="exact")
        with torch.no_grad():
            outputs = model(ids, past_key_values=cache, output_hidden_states=cut is not None)
            self.hidden = None if cut is None else outputs.hidden_states[cut]
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
    depths: Mapping[int, int] | None = None,
    repaired: Mapping[int, tuple[int, int]] | None = None,
) -> tuple[torch.Tensor, DynamicCache]:
    """The last token's logits, and the cache.

    Args:
        model: The model.
        ids: (1, tokens).
        positions: For each place that is reused, where it stood in the source.
        source: The earlier prompt.
        depths: For some of these places, how many layers are reused; the others run on the source's hidden states.
        repaired: For other places, how many layers run, and where the token stood in the source, whose keys and values the others reuse.
    """
    cache = GrowingCache(model.config)
    logits = None
    with torch.no_grad():
        for place in range(ids.shape[1]):
            if place in (repaired or {}):
                depth, position = repaired[place]
                run_layers(model, 0, depth, ids[:, place : place + 1], cache, torch.tensor([place]))
                for layer, (key, value) in list(zip(cache.layers, source.at(position, place), strict=True))[depth:]:
                    layer.update(key, value)
                continue
            if place not in positions:
                logits = model(ids[:, place : place + 1], position_ids=torch.tensor([[place]]), past_key_values=cache).logits
                continue
            depth = (depths or {}).get(place, len(cache.layers))
            for layer, (key, value) in list(zip(cache.layers, source.at(positions[place], place), strict=True))[:depth]:
                layer.update(key, value)
            if depth < len(cache.layers):
                hidden = source.hidden[:, positions[place] : positions[place] + 1]
                token = ids[:, place : place + 1]
                run_layers(model, depth, len(cache.layers), token, cache, torch.tensor([place]), hidden=hidden)
    return logits[:, -1], cache


def reused_positions(cache: SegmentReuseCache, row: int = 0) -> dict[int, int]:
    """For each place that a cache has reused, where it stood when it was stored."""
    positions = {}
    for span in (span for planned in cache.plans if planned.number == row for span in planned.spans):
        for tokens in span.sources:
            for place in range(max(tokens.start, span.start + span.repair), tokens.stop):
                positions[place] = tokens.position + place - tokens.start
    return positions
