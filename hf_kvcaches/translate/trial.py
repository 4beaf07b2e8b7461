"""What the consumer says behind a text's beginning, with this or that in the place of its own keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.calibrating import divergence
from hf_kvcaches.core.growing import GrowingCache
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.maps import Maps
from hf_kvcaches.translate.pair import Pair
from hf_kvcaches.translate.paper.feeding import state_of_input
from hf_kvcaches.translate.states import PromptTokens, ReadingCache

# Of a text kept apart, so much is asked for behind the rest: a quarter, and no more than so many tokens.
_ASKED = 32

Exchanged = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
Score = Callable[[torch.Tensor, torch.Tensor], float]


class _TrialCache(GrowingCache):
    """Holds all keys and values of layers with a window, too: their masks look no further."""

    own_layer_types = ReadingCache.own_layer_types


class Trial:
    """One text kept apart."""

    def __init__(self, pair: Pair, ids: torch.Tensor) -> None:
        self.pair = pair
        asked = max(2, min(_ASKED, len(ids) // 4))
        self.begun, self.asked = ids[:-asked], ids[-asked:]
        self.producer, self.consumer = pair.states(self.begun, range(pair.layers))
        self.alone = self.answer({})

    def answer(self, exchanged: Exchanged) -> torch.Tensor:
        """Logits, (places, vocabulary).

        Args:
            exchanged: Keys without rotation and values of some layers, (tokens, width) each; others are the consumer's own.
        """
        model, tokens = self.pair.consumer, len(self.begun)
        cache = _TrialCache(model.config)
        positions = torch.arange(tokens)
        for index, layer in enumerate(cache.layers):
            state = self.consumer[index]
            keys, values = exchanged.get(index, (state.keys, state.values))
            keys, values = (part.to(state.keys).unflatten(1, (state.heads, -1)).transpose(0, 1)[None] for part in (keys, values))
            geometry = self.pair.rotation.layers[index]
            layer.update(geometry.rotate(keys, positions.to(keys.device)) if geometry.kind == "rope" else keys, values)
        ids = self.asked[None].to(compat.input_device(model))
        where = torch.arange(tokens, tokens + ids.shape[1], device=ids.device)[None]
        logits: torch.Tensor = model(input_ids=ids, position_ids=where, past_key_values=cache, use_cache=True).logits[0]
        return logits

    def translated(self, maps: Maps, lowest: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of all layers that are sent.

        Args:
            lowest: How many layers the consumer runs.
        """
        side, found = self.consumer[lowest].of("input"), {}
        coefficients = {encoder.part: encoder.quantizer.decode(encoder.encode(self.producer)) for encoder in maps.encoders}
        for decoder in maps.decoders:
            given = decoder.apply(side, coefficients.get(decoder.part or ""))
            if decoder.kind == "input":
                state = state_of_input(self.pair.consumer, decoder.layer, given, PromptTokens.of(self.begun).to(given.device))
                found[decoder.layer] = state.keys, state.values
            else:
                width = decoder.shape[0] * decoder.shape[1]
                found[decoder.layer] = given[:, :width], given[:, width:]
        return found


def closeness(alone: torch.Tensor, found: torch.Tensor) -> float:
    """Minus the mean divergence."""
    return -float(divergence(alone, found).mean())


def mean_score(trials: Sequence[Trial], exchanged: Sequence[Exchanged], score: Score = closeness) -> float:
    """The mean of a score over texts; greater is better."""
    scores = [float(score(trial.alone, trial.answer(own))) for trial, own in zip(trials, exchanged, strict=True)]
    if not all(map(math.isfinite, scores)):
        raise ConfigError.of("score", "a finite number for each text", scores)
    return fmean(scores)
