"""The consumer's predictions behind a held-out prefix, with exact or translated keys and values of that prefix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.translate.attention_input import state_of_input
from hf_kvcaches.translate.config import Score
from hf_kvcaches.translate.maps import Maps
from hf_kvcaches.translate.pair import Pair
from hf_kvcaches.translate.states import PromptTokens

# Tokens at the end of a text that are predicted: a quarter of it, and no more than this.
_PREDICTED = 32

# Keys without rotation and values of some layers, (tokens, width) each.
KeysValues = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


class Trial:
    """One held-out text."""

    def __init__(self, pair: Pair, ids: torch.Tensor) -> None:
        self.pair = pair
        predicted = max(2, min(_PREDICTED, len(ids) // 4))
        self.prefix, self.continuation = ids[:-predicted], ids[-predicted:]
        self.producer, self.consumer = pair.states(self.prefix, range(pair.layers))
        self.expected = self.logits({})

    def logits(self, states: KeysValues) -> torch.Tensor:
        """Return the consumer's logits, (predicted tokens, vocabulary), with the prefix's states replaced in some layers."""
        # Without the model's config no layer drops tokens behind its window; the attention mask has the window.
        cache = DynamicCache()
        for layer, state in self.consumer.items():
            pair, geometry = states.get(layer, (state.keys, state.values)), self.pair.rotation.layers[layer]
            keys, values = (part.to(state.keys).unflatten(1, (state.heads, -1)).transpose(0, 1)[None] for part in pair)
            positions = torch.arange(len(self.prefix), device=keys.device)
            cache.update(geometry.rotate(keys, positions) if geometry.kind == "rope" else keys, values, layer)
        ids = self.continuation[None].to(compat.input_device(self.pair.consumer))
        consumer = self.pair.consumer
        return consumer(input_ids=ids, **compat.cache_kwargs(consumer, cache)).logits[0]

    def translated(self, maps: Maps, lowest: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the translated keys and values of the prefix, where the consumer runs its lowest layers."""
        side, states = self.consumer[lowest].of("input"), {}
        coefficients = {encoder.part: encoder.quantizer.decode(encoder.encode(self.producer)) for encoder in maps.encoders}
        for decoder in maps.decoders:
            output = decoder.apply(side, coefficients.get(decoder.part or ""))
            if decoder.kind == "input":
                keys, values, *_ = state_of_input(self.pair.consumer, decoder.layer, output, PromptTokens.of(self.prefix).to(output.device))
            else:
                heads, *dims = decoder.shape
                keys, values = output.split([heads * dim for dim in dims], dim=1)
            states[decoder.layer] = keys, values
        return states


def closeness(expected: torch.Tensor, logits: torch.Tensor) -> float:
    """Return minus the mean KL divergence."""
    return -float(divergence(expected, logits).mean())


def predictions(trials: Sequence[Trial], states: Sequence[KeysValues]) -> list[torch.Tensor]:
    """Return the consumer's logits of each text, with the prefix's states replaced in some layers."""
    return [trial.logits(replaced) for trial, replaced in zip(trials, states, strict=True)]


def mean_score(trials: Sequence[Trial], logits: Sequence[torch.Tensor], score: Score = closeness) -> float:
    """Return the mean of a score over texts; greater is better."""
    scores = [float(score(trial.expected, predicted)) for trial, predicted in zip(trials, logits, strict=True)]
    if not all(map(math.isfinite, scores)):
        raise ConfigError.of("score", "a finite number for each text", scores)
    return fmean(scores)
