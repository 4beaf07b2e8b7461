"""Patched layers of a consumer: they compute keys and values from a translated input of their attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from transformers import Cache, PreTrainedModel

from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.kernels.arguments import RowSpan
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.partial import PassEnded, SkippedLayer, StoppingPass, run_module, with_layers
from hf_kvcaches.translate.states import PromptTokens, ReadingCache, State, require_plain_layers, state_of, with_exchanged_input


def feed_attention(model: PreTrainedModel, layer: int, hidden: torch.Tensor, tokens: PromptTokens, cache: Cache) -> None:
    """Compute a layer's keys and values from another input of its attention.

    Args:
        hidden: Normalised, (batch, tokens, hidden).
        cache: Takes keys and values, and raises `PassEnded` behind them.
    """
    layers = decoder_layers(model)[2]
    below = [SkippedLayer(skipped, hidden.to(model.dtype) if index == layer - 1 else None) for index, skipped in enumerate(layers[:layer])]
    exchanged = with_exchanged_input(layers[layer], lambda states: hidden.to(states))
    with suppress(PassEnded):
        run_module(with_layers(model, [*below, exchanged, *layers[layer + 1 :]]), cache, tokens.ids, tokens.positions, tokens.mask)


@torch.no_grad()
def state_of_input(model: PreTrainedModel, layer: int, hidden: torch.Tensor, tokens: PromptTokens) -> State:
    """Return the keys and values that a layer computes from another input of its attention.

    Args:
        hidden: Normalised, (tokens, hidden), of one prompt.
    """
    cache, states = ReadingCache(model), list[State]()

    def on_layer(index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        states.append(state_of(require_plain_layers(cache.config), index, keys, values, tokens))
        raise PassEnded

    cache.on_layer = on_layer
    feed_attention(model, layer, hidden[None], tokens, cache)
    return states[0]


def fill_layer(cache: SplicingCache, layer: int, inputs: torch.Tensor, spans: Sequence[RowSpan], seen: int, tokens: PromptTokens) -> None:
    """Write the keys and values of a patched layer.

    Args:
        inputs: Of its attention, for each rebuilt token, (tokens, hidden).
        spans: The slots of the rebuilt tokens.
        seen: Slots that were filled before.
        tokens: The tokens that are in the cache afterwards.
    """
    new = tokens._replace(ids=tokens.ids[:, seen:], positions=tokens.positions[:, seen:])
    hidden = inputs.new_zeros(*new.ids.shape, inputs.shape[1])
    for span, rows in zip(spans, inputs.split([span.tokens for span in spans]), strict=True):
        hidden[span.row, span.first - seen :] = rows
    feed_attention(cache.model, layer, hidden, new, StoppingPass(cache, layer, layer))
