"""Tiny models of many families, and what their layers make of tokens, read by hooks on their projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config

from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.states import LayerState, PromptTokens, read, rotation_of_model, state_of
from hf_kvcaches.translate.translator import CacheTranslator
from tests import tiny
from tests.translate.pairs import split

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
    """What one layer made: (batch, tokens, width) each."""

    keys: Tensor
    values: Tensor
    hidden: Tensor


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder's layers."""
    base = model.base_model
    found: nn.ModuleList = base.h if hasattr(base, "h") else base.layers
    return found


def _watched(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs tell what a layer makes."""
    if hasattr(layer, "attn"):
        return {"hidden": layer.ln_1, "fused": layer.attn.c_attn}
    if hasattr(layer, "attention"):
        return {"hidden": layer.input_layernorm, "interleaved": layer.attention.query_key_value}
    own = layer.self_attn
    if hasattr(own, "qkv_proj"):
        return {"hidden": layer.input_layernorm, "fused": own.qkv_proj}
    return {"hidden": layer.input_layernorm, "keys": getattr(own, "k_norm", own.k_proj), "values": own.v_proj}


def parts_of(config: Any, outputs: dict[str, Tensor]) -> Made:
    """Keys and values, taken out of what projections gave."""
    heads = config.num_attention_heads
    if "interleaved" in outputs:
        parts = outputs["interleaved"].unflatten(-1, (heads, 3, -1))
        return Made(parts[..., 1, :].flatten(-2), parts[..., 2, :].flatten(-2), outputs["hidden"])
    if "fused" in outputs:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        size = outputs["fused"].shape[-1] // (heads + 2 * kv_heads)
        _, keys, values = outputs["fused"].split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
        return Made(keys, values, outputs["hidden"])
    keys = outputs["keys"].flatten(2)
    return Made(keys, outputs["values"], outputs["hidden"])


@torch.no_grad()
def made_by(model: Any, ids: Tensor, mask: Tensor | None = None) -> list[Made]:
    """What each layer of a model makes of a batch, without any cache."""
    taken: list[dict[str, Tensor]] = []
    handles = []
    for layer in layers_of(model):
        own: dict[str, Tensor] = {}
        taken.append(own)
        for name, module in _watched(layer).items():
            handles.append(module.register_forward_hook(lambda _, __, output, own=own, name=name: own.__setitem__(name, output.clone())))
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if mask is not None:
        arguments |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    model(**arguments)
    for handle in handles:
        handle.remove()
    return [parts_of(model.config, own) for own in taken]


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


def fitted(producer: Any, consumer: Any, texts: list[list[int]] | None = None, **options: Any) -> CacheTranslator:
    """A translator with a code for each layer, in which all errors cost the same, unless told otherwise."""
    return CacheTranslator.fit(producer, consumer, None, texts or texts_of(), **split({"metric": "plain", "layers_per_code": 1, **options}))


@torch.no_grad()
def filled(translator: CacheTranslator, producer: Any, consumer: Any, prompt: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Unrotated keys and values of all tokens but the last, (tokens, width), of a cache that is filled from codes."""
    cache = TranslatedCache(consumer, translator, translator.encode(producer, prompt))
    count = cache.prefill(prompt)
    tokens, rotation = PromptTokens.of(prompt[:, :count]), rotation_of_model(consumer)
    pairs = {}
    for index, layer in enumerate(cache.layers):
        state = state_of(rotation, index, layer.keys, layer.values, tokens)
        heads, key_dim, value_dim = state.shape
        keys, values = state.states.split([heads * key_dim, heads * value_dim], dim=1)
        pairs[index] = keys, values
    return pairs


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
