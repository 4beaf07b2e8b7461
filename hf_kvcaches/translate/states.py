"""Prompts, and the keys, values and attention inputs that a model computes for them, read while the model runs.

Positions and padding are left out: keys are unrotated, and the real tokens of all rows are concatenated, (tokens, width), with the heads
side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.rope import Rotation, rotation_of
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.evaluate.observer import PassingLayer
from hf_kvcaches.reuse.partial import PassEnded, ToldModule, name_of, run_module, twin_of, with_layers

Module = TypeVar("Module", bound=nn.Module)


class LayerState(NamedTuple):
    """What a layer computes for some tokens.

    Args:
        states: Unrotated keys and values side by side, (tokens, width).
        shape: KV heads, and the dimensions of a key and a value.
        hidden: The normalised input of the attention, (tokens, hidden), where that is read.
    """

    states: torch.Tensor
    shape: tuple[int, int, int]
    hidden: torch.Tensor | None = None

    @property
    def known(self) -> torch.Tensor:
        """`hidden`, which was read."""
        assert self.hidden is not None
        return self.hidden


class PromptTokens(NamedTuple):
    """Prompts as a model reads them.

    Args:
        ids: (batch, tokens).
        mask: 1 where a token is real, or None where all are.
        real: The mask as booleans, never None.
        positions: Counted without padding.
        chosen: The indices, over all rows, of the tokens whose states are read: the real ones; None for all.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    real: torch.Tensor
    positions: torch.Tensor
    chosen: torch.Tensor | None

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None) -> PromptTokens:
        """Check a batch, (batch, tokens) or (tokens,), a tensor or lists, which may be padded on the left only."""
        ids = _batch("input_ids", input_ids)
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool or not ids.numel():
            raise ConfigError.of("input_ids", "token ids, (batch, tokens)", (tuple(ids.shape), ids.dtype))
        mask = torch.ones_like(ids) if attention_mask is None else _batch("attention_mask", attention_mask).to(ids.device)
        real = mask.bool()
        # An additive mask has 0 where this one has 1.
        binary = real.shape == ids.shape and bool((mask == real).all() and real[:, -1].all())
        if not binary or bool((real[:, :-1] & ~real[:, 1:]).any()):
            expected = f"1 and 0 of the shape {tuple(ids.shape)}, with 0 on the left only"
            raise ConfigError.of("attention_mask", expected, (tuple(mask.shape), mask.dtype))
        positions = (real.cumsum(-1) - 1).clamp_min(0)
        if bool(real.all()):
            return cls(ids.long(), None, real, positions, None)
        return cls(ids.long(), real.long(), real, positions, real.flatten().nonzero()[:, 0])

    def to(self, device: torch.device) -> PromptTokens:
        return PromptTokens(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]

    def first(self, count: int) -> PromptTokens:
        return PromptTokens.of(self.ids[:, :count], self.real[:, :count])

    def rows(self) -> list[torch.Tensor]:
        """The real ids of each row, on the CPU."""
        return [ids[real] for ids, real in zip(self.ids.cpu(), self.real.cpu(), strict=True)]


def _batch(argument: str, values: Any) -> torch.Tensor:
    """Return numbers as a tensor; a single row is a batch of one."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "Tokenize texts, and pad rows on the left."
        raise ConfigError.of(argument, "a tensor or lists of numbers, (batch, tokens)", type(values).__name__, hint) from error
    return tensor[None] if tensor.ndim == 1 else tensor


class ReadingCache(KVCache):
    """Hold nothing, and call `on_layer` with each layer's index, keys and values as the model computes them."""

    own_layer_types = ("full_attention", "sliding_attention", "chunked_attention")

    def __init__(self, model: PreTrainedModel, on_layer: Callable[[int, torch.Tensor, torch.Tensor], Any]) -> None:
        self.on_layer = on_layer
        super().__init__(compat.decoder_config(model.config))

    def make_layer(self, layer_idx: int) -> KVLayer:
        return _ReadingLayer(self, layer_idx)


class _ReadingLayer(PassingLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        self.cache.on_layer(self.layer_idx, key_states, value_states)
        return key_states, value_states


def rotation_of_model(model: PreTrainedModel) -> Rotation:
    """Return how a model's keys are rotated; refuse a model with layers whose keys and values can't be translated."""
    config = compat.decoder_config(model.config)
    foreign = sorted({kind for kind, _ in compat.layer_plan(config) if kind not in ReadingCache.own_layer_types})
    if foreign:
        raise UnsupportedError(f"model: layers of the types {foreign} keep no keys and values that could be translated. Use another cache.")
    rotation = rotation_of(config)
    if rotation.refused or {geometry.kind for geometry in rotation.layers} - {"rope", "none", "learned"}:
        raise UnsupportedError(f"model: {rotation.why}, so its keys can't be translated. Use another cache.")
    return rotation


@torch.no_grad()
def read(
    model: PreTrainedModel,
    tokens: PromptTokens,
    on_state: Callable[[int, LayerState], None],
    *,
    hidden: Collection[int] = (),
    last: int | None = None,
) -> None:
    """Run a model over prompts and pass on each layer's state as soon as it is computed.

    Args:
        hidden: Layers whose attention's input is part of their state.
        last: The last layer to read; the pass ends before its attention. None to run the whole pass.
    """
    rotation, layers = rotation_of_model(model), decoder_layers(model)[2]
    inputs: dict[int, torch.Tensor] = {}

    def on_layer(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        state = state_of(rotation, layer, keys, values, tokens)
        on_state(layer, state._replace(hidden=_real(inputs.pop(layer), tokens) if layer in inputs else None))
        if layer == last:
            raise PassEnded

    def watched(layer: int) -> nn.Module:
        return with_watched_input(layers[layer], lambda states: inputs.__setitem__(layer, states))

    modules = [watched(layer) if layer in hidden else module for layer, module in enumerate(layers)]
    decoder = with_layers(model, modules) if hidden else model.base_model
    with suppress(PassEnded):
        run_module(decoder, ReadingCache(model, on_layer), tokens.ids, tokens.positions, tokens.mask)


def state_of(rotation: Rotation, layer: int, keys: torch.Tensor, values: torch.Tensor, tokens: PromptTokens) -> LayerState:
    """Return a layer's state of the real tokens from (batch, kv_heads, tokens, head_dim); learned positions stay in the keys."""
    geometry = rotation.layers[layer]
    content = geometry.unrotate(keys, tokens.positions.to(keys.device)) if geometry.kind == "rope" else keys
    sides = [_real(states.transpose(1, 2).flatten(2), tokens) for states in (content, values)]
    return LayerState(torch.cat(sides, dim=1), (keys.shape[1], keys.shape[3], values.shape[3]))


def _real(states: torch.Tensor, tokens: PromptTokens) -> torch.Tensor:
    """Return the chosen tokens of all rows, (tokens, width), of (batch, tokens, width)."""
    flat = states.flatten(0, 1)
    return flat if tokens.chosen is None else flat.index_select(0, tokens.chosen.to(states.device))


def cache_of(rotation: Rotation, states: Mapping[int, LayerState], dtype: torch.dtype) -> DynamicCache:
    """Return a cache of one prompt with these states of all layers; gradients pass."""
    cache = DynamicCache()  # without the model's config no layer drops tokens behind its window, which the attention mask has
    for layer, state in sorted(states.items()):
        heads, key_dim, value_dim = state.shape
        sides = state.states.split([heads * key_dim, heads * value_dim], dim=1)
        keys, values = (side.unflatten(1, (heads, -1)).transpose(0, 1)[None] for side in sides)
        geometry = rotation.layers[layer]
        if geometry.kind == "rope":
            keys = geometry.rotate(keys, torch.arange(keys.shape[2], device=keys.device))
        cache.update(keys.to(dtype), values.to(dtype), layer)
    return cache


def with_watched_input(layer: nn.Module, watch: Callable[[torch.Tensor], Any]) -> nn.Module:
    """Return a twin of a decoder layer that passes its attention's input, (batch, tokens, hidden), to `watch`."""

    def on_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        watch(args[0] if args else kwargs["hidden_states"])
        return args, kwargs

    attention = attention_module(layer)
    return twin_of(layer, {name_of(layer, attention): ToldModule(attention, on_call)})


def in_evaluation(model: Module) -> Module:
    """Return a model in evaluation mode, or else a twin that shares all weights: other threads' passes stay in training mode."""
    if not any(module.training for module in model.modules()):
        return model
    names = [name for name, module in model.named_modules(remove_duplicate=False) if name and next(module.children(), None) is None]
    twin = twin_of(model, {name: twin_of(model.get_submodule(name), {}) for name in names})
    return twin.eval()  # type: ignore[return-value]
