"""Tiny models of many families, and what their layers make of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config

from hf_kvcaches.core.decoder import attention_module
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.fit import TranslatorConfig
from hf_kvcaches.translate.states import LayerState, PromptTokens, read
from hf_kvcaches.translate.translator import CacheTranslator
from tests import tiny

PARTIAL = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


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


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder's layers."""
    base = model.base_model
    found: nn.ModuleList = base.h if hasattr(base, "h") else base.layers
    return found


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
    handles = [attention_module(layer).register_forward_pre_hook(keep, with_kwargs=True) for layer in layers_of(model)]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    for handle in handles:
        handle.remove()
    return [Made(*content, hidden) for content, hidden in zip(content_of(model, cache, positions), inputs, strict=True)]


def left_padded(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, padded on the left, and their mask."""
    width = max(lengths)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return torch.where(mask.bool(), tiny.ids(len(lengths), width, seed=seed), torch.zeros(1, dtype=torch.long)), mask


def traces_of(model: Any) -> dict[str, Any]:
    """All that a pass could leave behind on a model."""
    decoder = model.base_model
    return {
        "hooks": [
            (name, len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
            for name, module in model.named_modules()
        ],
        "layers": [id(layer) for layer in layers_of(model)],
        "list": id(layers_of(model)),
        "attention": (model.config._attn_implementation, str(type(model.config._attn_implementation_internal))),
        "training": [module.training for module in model.modules()],
        "gradients": [parameter.grad is None for parameter in model.parameters()],
        "decoder": sorted(vars(decoder)),
    }


def texts_of(count: int = 24, length: int = 24, seed: int = 0) -> list[list[int]]:
    """Random texts, some shorter."""
    return [tiny.ids(length - number % 5, seed=1000 * seed + number).tolist() for number in range(count)]


OPTIONS = ("payload", "recompute_layers", "score", "max_length", "progress")


def split(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `CacheTranslator.fit`, of some with those of `TranslatorConfig` among them."""
    config = {name: value for name, value in options.items() if name not in OPTIONS}
    return {"progress": False, "config": TranslatorConfig(**config)} | {name: options[name] for name in OPTIONS if name in options}


def fitted(producer: Any, consumer: Any, texts: list[list[int]] | None = None, **options: Any) -> CacheTranslator:
    """A translator with a code for each layer, in which all errors cost the same, unless told otherwise."""
    return CacheTranslator.fit(producer, consumer, None, texts or texts_of(), **split({"metric": "plain", "layers_per_code": 1, **options}))


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
