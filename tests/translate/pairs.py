"""Pairs of small models, translators between them, and what a translated cache has to hold, computed row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache as remembered
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3Config

from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.translate.translator import CacheTranslator
from tests import tiny
from tests.segments.test_cache import MODELS
from tests.translate.models import made_by, split

TEXTS = tuple(tuple(tiny.ids(100, seed=100 + seed).tolist()) for seed in range(8))
# A part for each layer, and directions are rounded.
HALF: dict[str, Any] = {"payload": 0.5, "layers_per_code": 1}

FAMILIES = MODELS | {
    "gpt2": tiny.gpt2,
    "qk_norm": lambda: tiny.build(Qwen3Config(**{**tiny._SHAPE, "head_dim": 16})),
}


def changed(model: PreTrainedModel, share: float = 0.1, seed: int = 7) -> PreTrainedModel:
    """The model after a training of sorts."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(share * parameter.std() * torch.randn(parameter.shape, generator=noise))
    return model


def fit(producer: Any, consumer: Any, texts: Any = TEXTS, **options: Any) -> CacheTranslator:
    """A translator fitted to random texts."""
    return CacheTranslator.fit(producer, consumer, None, texts, **split(options))


@remembered
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A producer, and a consumer that was trained on. No test changes them."""
    return tiny.llama(), changed(tiny.llama())


@remembered
def fitted(**options: Any) -> CacheTranslator:
    """Between the two `models`."""
    return fit(*models(), **{**HALF, **options})


def lossless(model: Any) -> CacheTranslator:
    """From a model to itself, with all directions, and nothing rounded but by arithmetic."""
    return fit(model, model, ridge=1e-8, payload=2.0, metric="plain", layers_per_code=1)


@contextlib.contextmanager
def last_layer(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens a row enter the model's last layer, pass by pass."""
    seen: list[int] = []
    last = decoder_layers(model)[2][-1]
    handle = last.register_forward_pre_hook(tiny.observing(lambda module, args: seen.append(args[0].shape[1])))
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def reference(translator: CacheTranslator, ids: torch.Tensor, pair: tuple[PreTrainedModel, PreTrainedModel] | None = None) -> DynamicCache:
    """What the cache of one prompt, (1, tokens), must hold without its last token, for Llamas; of `models`, or of a pair."""
    producer, consumer = pair or models()
    theirs, own = (made_by(model, ids[:, :-1]) for model in (producer, consumer))
    maps, lowest, exact = translator.maps, translator.settings.recompute_layers, translator.settings.exact_tokens
    coefficients, known, cache = {}, own[lowest].hidden[0], DynamicCache()
    for code, encoder in enumerate(maps.encoders):
        content = torch.cat([part[0] for layer in encoder.sources for part in theirs[layer][:2]], 1)
        found = content @ encoder.weights.states + theirs[lowest].hidden[0] @ encoder.weights.hidden + encoder.weights.shift
        coefficients[code] = maps.decode(maps.pack({code: found}), len(found))[code]
    decoders = {decoder.layer: decoder for decoder in maps.decoders}
    for layer, made in enumerate(own):
        sides = torch.cat([made.keys[0], made.values[0]], 1)
        if layer in decoders:
            weights, code = decoders[layer].weights, decoders[layer].code
            states = known @ weights.side + weights.bias + (0 if code is None else coefficients[code] @ weights.codes)
            sides = torch.cat([sides[:exact], states[exact:]])  # the first tokens are the consumer's own
        keys, values = (part.unflatten(1, (2, -1)).transpose(0, 1)[None] for part in sides.chunk(2, 1))
        cache.update(rotation_of(consumer.config).layers[layer].rotate(keys, torch.arange(keys.shape[2])), values, layer)
    return cache
