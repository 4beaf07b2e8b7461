"""Pairs of small models, translators between them, and what a translated cache has to hold, computed row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache as remembered
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.translate.config import TranslatorConfig
from hf_kvcaches.translate.translator import CacheTranslator
from tests import tiny
from tests.segments.test_cache import MODELS

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


OPTIONS = ("payload", "recompute_layers", "score", "max_length", "progress")


def split(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `CacheTranslator.fit`, of some with those of `TranslatorConfig` among them."""
    config = {name: value for name, value in options.items() if name not in OPTIONS}
    return {"progress": False, "config": TranslatorConfig(**config)} | {name: options[name] for name in OPTIONS if name in options}


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
    """What one prompt's cache must hold without its last token, for Llamas.

    Args:
        ids: (1, tokens).
        pair: The producer and the consumer; None for `models`.
    """
    producer, consumer = pair or models()
    ids = ids[:, :-1]
    read, own, made = (DynamicCache(config=model.config) for model in (producer, consumer, consumer))
    entering: dict[str, torch.Tensor] = {}
    lowest, exact = translator.settings.recompute_layers, translator.settings.exact_tokens
    handles = [
        model.model.layers[lowest].input_layernorm.register_forward_hook(
            lambda module, args, output, role=role: entering.__setitem__(role, output[0])
        )
        for role, model in (("producer", producer), ("consumer", consumer))
    ]
    producer(ids, past_key_values=read)
    consumer(ids, past_key_values=own)
    for handle in handles:
        handle.remove()
    where = torch.arange(ids.shape[1])[None]
    (turned, back) = (model.model.rotary_emb(entering["consumer"][None], where) for model in (consumer, producer))
    content = {}
    for index, layer in enumerate(read.layers):
        keys, _ = apply_rotary_pos_emb(layer.keys, layer.keys, back[0], -back[1])
        content[index] = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (keys, layer.values)], 1)
    coefficients, maps = {}, translator.maps
    for code, encoder in enumerate(maps.encoders):
        found = torch.cat([content[layer] for layer in encoder.sources], 1) @ encoder.weights.states + encoder.weights.shift
        found = found + entering["producer"] @ encoder.weights.hidden
        coefficients[code] = maps.decode(maps.pack({code: found}), len(found))[code]
    for index in range(lowest + 1):
        made.update(own.layers[index].keys, own.layers[index].values, index)
    for decoder in translator.maps.decoders:
        states = entering["consumer"] @ decoder.weights.side + decoder.weights.bias
        if decoder.code is not None:
            states = states + coefficients[decoder.code] @ decoder.weights.codes
        keys, values = (part.unflatten(1, (2, -1)).transpose(0, 1)[None] for part in states.chunk(2, 1))
        keys = apply_rotary_pos_emb(keys, keys, *turned)[0]
        # The first tokens are the consumer's own.
        true = own.layers[decoder.layer]
        sides = (torch.cat([one[:, :, :exact], other[:, :, exact:]], 2) for one, other in ((true.keys, keys), (true.values, values)))
        made.update(*sides, decoder.layer)
    return made
