"""Keys, values and attention inputs of a model's layers, read while the model runs.

Positions and padding are left out: keys are unrotated, and the real tokens of all rows are concatenated, (tokens, width), with the heads
side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.rope import Rotation, rotation_of
from hf_kvcaches.core.view import require_answering
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.evaluate.observer import Attended, PassingLayer, WatchedView
from hf_kvcaches.reuse.partial import PassEnded, ToldModule, name_of, run_module, twin_of, with_layers


class State(NamedTuple):
    """What a layer computes for some tokens.

    Args:
        keys: Unrotated, (tokens, kv_heads * key_dim).
        values: (tokens, kv_heads * value_dim).
        hidden: The normalised input of its attention, (tokens, hidden), where that is read.
    """

    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor | None
    heads: int

    @property
    def pair(self) -> torch.Tensor:
        """Keys and values side by side."""
        return torch.cat([self.keys, self.values], dim=1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """KV heads, and the dimensions of a key and a value."""
        return self.heads, self.keys.shape[1] // self.heads, self.values.shape[1] // self.heads

    def rows(self, chosen: torch.Tensor) -> State:
        """The state of some tokens, (tokens,) booleans."""
        keys, values, *hidden = (part[chosen.to(part.device)] for part in self[:3] if part is not None)
        return State(keys, values, hidden[0] if hidden else None, self.heads)

    def of(self, kind: str) -> torch.Tensor:
        """`pair` for "states", `hidden` for "input"."""
        if kind == "states":
            return self.pair
        assert self.hidden is not None
        return self.hidden


class PromptTokens(NamedTuple):
    """Prompts as a model reads them.

    Args:
        ids: (batch, tokens).
        mask: 1 where a token is real, (batch, tokens), or None where all are.
        real: The mask as booleans, never None.
        positions: (batch, tokens), counted without padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    real: torch.Tensor
    positions: torch.Tensor

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
        return cls(ids.long(), None if bool(real.all()) else real.long(), real, (real.cumsum(-1) - 1).clamp_min(0))

    def to(self, device: torch.device) -> PromptTokens:
        """The same prompts on another device."""
        return PromptTokens(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]

    def rows(self) -> list[torch.Tensor]:
        """The real ids of each row, on the CPU."""
        return [ids[real] for ids, real in zip(self.ids.cpu(), self.real.cpu(), strict=True)]


def _batch(argument: str, values: Any) -> torch.Tensor:
    """Numbers as a tensor; a single row is a batch of one."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "Tokenize texts, and pad rows on the left."
        raise ConfigError.of(argument, "a tensor or lists of numbers, (batch, tokens)", type(values).__name__, hint) from error
    return tensor[None] if tensor.ndim == 1 else tensor


class ReadingCache(KVCache):
    """Hold nothing; pass on each layer's keys and values, and its queries, as the model computes them.

    Args:
        queries: Called with what each layer attends with; None where only keys and values are read.

    Attributes:
        on_layer: Called with a layer's index, keys and values; returns what the model attends to in their place, or None.
    """

    own_layer_types = ("full_attention", "sliding_attention", "chunked_attention")

    def __init__(self, model: PreTrainedModel, queries: Callable[[Attended], None] | None = None) -> None:
        self.on_queries = queries
        self.on_layer: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None] = lambda *_: None
        super().__init__(model if queries is not None else compat.decoder_config(model.config))
        require_plain_layers(self.config)
        if queries is not None:
            require_answering(model, "The metric 'loss' or 'attention'")

    def make_layer(self, layer_idx: int) -> KVLayer:
        return _ReadingLayer(self, layer_idx)


class _ReadingLayer(PassingLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        keys, values = self.cache.on_layer(self.layer_idx, key_states, value_states) or (key_states, value_states)
        if self.cache.on_queries is None:
            return keys, values
        view = WatchedView(self.cache.on_queries, self.layer_idx, keys, values)
        return view, view


def require_plain_layers(config: Any) -> Rotation:
    """Return how a model's keys are rotated; refuse a model with layers whose keys and values can't be translated."""
    foreign = sorted({kind for kind, _ in compat.layer_plan(config) if kind not in ReadingCache.own_layer_types})
    if foreign:
        raise UnsupportedError(f"model: layers of the types {foreign} keep no keys and values that could be translated. Use another cache.")
    rotation = rotation_of(config)
    if rotation.refused or {geometry.kind for geometry in rotation.layers} - {"rope", "none", "learned"}:
        raise UnsupportedError(f"model: {rotation.why}, so its keys can't be translated. Use another cache.")
    return rotation


@torch.no_grad()
def read_states(
    model: PreTrainedModel,
    tokens: PromptTokens,
    on_state: Callable[[int, State], None],
    *,
    hidden: Collection[int] = (),
    upto: int | None = None,
    queries: Callable[[Attended], None] | None = None,
) -> None:
    """Run a model over prompts and pass on each layer's state as soon as it is computed.

    Args:
        hidden: Layers whose attention's input is part of their state.
        upto: The last layer to read; the pass ends before its attention. None to run the whole pass.
        queries: As in `ReadingCache`.
    """
    rotation, layers = require_plain_layers(compat.decoder_config(model.config)), decoder_layers(model)[2]
    inputs: dict[int, torch.Tensor] = {}

    def on_layer(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        on_state(layer, state_of(rotation, layer, keys, values, tokens)._replace(hidden=inputs.pop(layer, None)))
        if layer == upto:
            raise PassEnded

    def watched(layer: int) -> nn.Module:
        return with_watched_input(layers[layer], lambda states: inputs.__setitem__(layer, states[tokens.real.to(states.device)]))

    cache = ReadingCache(model, queries)
    cache.on_layer = on_layer
    modules = [watched(layer) if layer in hidden else module for layer, module in enumerate(layers)]
    with suppress(PassEnded):
        run_module(with_layers(model, modules) if hidden else model.base_model, cache, tokens.ids, tokens.positions, tokens.mask)


def state_of(rotation: Rotation, layer: int, keys: torch.Tensor, values: torch.Tensor, tokens: PromptTokens) -> State:
    """Return a layer's state of the real tokens from (batch, kv_heads, tokens, head_dim); learned positions stay in the keys."""
    geometry, real = rotation.layers[layer], tokens.real.to(keys.device)
    content = geometry.unrotate(keys, tokens.positions.to(keys.device)) if geometry.kind == "rope" else keys
    flat_keys, flat_values = (states.transpose(1, 2)[real].flatten(1) for states in (content, values))
    return State(flat_keys, flat_values, None, keys.shape[1])


def with_watched_input(layer: nn.Module, watch: Callable[[torch.Tensor], Any]) -> nn.Module:
    """Return a twin of a decoder layer that passes its attention's input, (batch, tokens, hidden), to `watch`."""
    return with_exchanged_input(layer, lambda states: (watch(states), states)[1])


def with_exchanged_input(layer: nn.Module, exchange: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a twin of a decoder layer whose attention gets another input."""

    def on_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((exchange(args[0]), *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": exchange(kwargs["hidden_states"])})

    attention = attention_module(layer)
    return twin_of(layer, {name_of(layer, attention): ToldModule(attention, on_call)})
