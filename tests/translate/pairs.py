"""Pairs of small models of many families, translators between them, and what layers and translated caches must hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache as remembered
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GPTNeoXConfig, LlamaConfig, Phi3Config, PreTrainedModel, Qwen2Config, Qwen3Config

from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.fit import TranslatorConfig
from hf_kvcaches.translate.states import LayerState, PromptTokens, read
from hf_kvcaches.translate.translator import CacheTranslator
from tests import tiny
from tests.segments.test_cache import MODELS as REUSED

TEXTS = tuple(tuple(tiny.ids(100, seed=100 + seed).tolist()) for seed in range(8))
# A part for each layer, and directions are rounded.
HALF: dict[str, Any] = {"payload": 0.5, "layers_per_code": 1}
PARTIAL = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = REUSED | {"gpt2": tiny.gpt2, "qk_norm": lambda: tiny.build(Qwen3Config(**{**tiny._SHAPE, "head_dim": 16}))}


def stirred(model: Any, seed: int = 1) -> Any:
    """Norms and biases that do something: fresh models have ones and zeros there."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                parameter.copy_(0.6 + torch.rand(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def neox(seed: int = 0) -> Any:
    """Half of each key is turned; queries, keys and values of a head lie together."""
    shape = {name: size for name, size in tiny._SHAPE.items() if name != "num_key_value_heads"}
    return tiny.build(GPTNeoXConfig(**{**shape, "num_hidden_layers": 3, "rope_parameters": PARTIAL}), seed)


MODELS: dict[str, Callable[..., Any]] = {
    "llama": lambda seed=0: stirred(tiny.llama(seed)),
    "yarn": lambda seed=0: stirred(tiny.build(LlamaConfig(**{**tiny._SHAPE, "rope_parameters": YARN}), seed)),
    "gpt2": lambda seed=0: stirred(tiny.gpt2(seed)),
    "qwen2": lambda seed=0: stirred(tiny.build(Qwen2Config(**tiny._SHAPE), seed)),
    "qwen3": lambda seed=0: stirred(tiny.build(Qwen3Config(**{**tiny._SHAPE, "head_dim": 12}), seed)),
    "phi3": lambda seed=0: stirred(tiny.build(Phi3Config(**{**tiny._SHAPE, "pad_token_id": 0}), seed)),
    "neox": lambda seed=0: stirred(neox(seed)),
    "gemma2": lambda seed=0: stirred(tiny.gemma2(seed)),
}


class Made(NamedTuple):
    """What one layer made: (batch, tokens, width) each, keys unrotated."""

    keys: Tensor
    values: Tensor
    hidden: Tensor


def content_of(model: Any, cache: Cache, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Unrotated keys and values of each layer of a cache, (batch, tokens, width)."""
    found = []
    for geometry, layer in zip(rotation_of(model.config).layers, cache.layers, strict=True):
        keys = geometry.unrotate(layer.keys, positions) if geometry.kind == "rope" else layer.keys
        found.append((keys.transpose(1, 2).flatten(2), layer.values.transpose(1, 2).flatten(2)))
    return found


@torch.no_grad()
def made_by(model: Any, ids: Tensor, mask: Tensor | None = None) -> list[Made]:
    """What each layer of a model makes of a batch."""
    inputs, cache, mask = list[Tensor](), DynamicCache(), torch.ones_like(ids) if mask is None else mask
    keep = lambda module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"])  # noqa: E731
    handles = [attention_module(layer).register_forward_pre_hook(keep, with_kwargs=True) for layer in decoder_layers(model)[2]]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    for handle in handles:
        handle.remove()
    return [Made(*content, hidden) for content, hidden in zip(content_of(model, cache, positions), inputs, strict=True)]


def traces_of(model: Any) -> dict[str, Any]:
    """All that a pass could leave behind on a model."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "hooks": [(name, *(len(getattr(module, kind)) for kind in hooks)) for name, module in model.named_modules()],
        "layers": [id(decoder_layers(model)[2]), *map(id, decoder_layers(model)[2])],
        "attention": (model.config._attn_implementation, str(type(model.config._attn_implementation_internal))),
        "training": [module.training for module in model.modules()],
        "gradients": [parameter.grad is None for parameter in model.parameters()],
        "decoder": sorted(vars(model.base_model)),
    }


def texts_of(count: int = 24, length: int = 24, seed: int = 0) -> list[list[int]]:
    """Random texts, some shorter."""
    return [tiny.ids(length - number % 5, seed=1000 * seed + number).tolist() for number in range(count)]


def changed(model: PreTrainedModel, share: float = 0.1, seed: int = 7) -> PreTrainedModel:
    """The model after a training of sorts."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(share * parameter.std() * torch.randn(parameter.shape, generator=noise))
    return model


def fit(producer: Any, consumer: Any, texts: Any = TEXTS, **options: Any) -> CacheTranslator:
    """A translator fitted to random texts; options of `TranslatorConfig` stand among the others."""
    own = {name: options.pop(name) for name in ("payload", "recompute_layers", "score", "max_length") if name in options}
    return CacheTranslator.fit(producer, consumer, None, texts, **own, config=TranslatorConfig(**options), progress=False)


def plain(producer: Any, consumer: Any, texts: list[list[int]] | None = None, **options: Any) -> CacheTranslator:
    """A translator with a code for each layer, in which all errors cost the same, unless told otherwise."""
    return fit(producer, consumer, texts or texts_of(), **{"metric": "plain", "layers_per_code": 1, **options})


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


@torch.no_grad()
def filled(translator: CacheTranslator, producer: Any, consumer: Any, prompt: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Unrotated keys and values of all tokens but the last, (tokens, width), of a cache that is filled from codes."""
    cache = TranslatedCache(consumer, translator, translator.encode(producer, prompt))
    positions = torch.arange(cache.prefill(prompt))
    return {layer: (keys[0], values[0]) for layer, (keys, values) in enumerate(content_of(consumer, cache, positions))}


def states_by_row(model: Any, texts: Any, hidden: Any = ()) -> list[dict[int, LayerState]]:
    """The states of each text."""
    found = []
    for text in texts:
        states: dict[int, LayerState] = {}
        read(model, PromptTokens.of(text), states.__setitem__, hidden=hidden)
        found.append(states)
    return found


def error(found: Tensor, expected: Tensor) -> float:
    """As a share of what is expected."""
    return float((found - expected).norm() / expected.norm())


def close(actual: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=atol, rtol=0)


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
def reference(translator: CacheTranslator, ids: Tensor, pair: tuple[PreTrainedModel, PreTrainedModel] | None = None) -> DynamicCache:
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
