"""Keys, values and normalised inputs of a model's layers, read on the way: the cache that reads, and its pass.

Everything is read without positions and without padding. Keys are as they were before their rotation; the real tokens of all rows stand
behind each other in matrices (tokens, width), the heads side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.answerable import require_answering
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.layers import KVLayer, PassingLayer
from hf_kvcaches.core.partial import PassEnded, SkippedLayer, ToldModule, name_of, twin_of, with_layers
from hf_kvcaches.core.prefill import run_module, run_span
from hf_kvcaches.core.splicing.rotation import Rotation, rotation_of
from hf_kvcaches.core.watching import Attended, WatchedView
from hf_kvcaches.errors import ConfigError, UnsupportedError


class State(NamedTuple):
    """What a layer made of the tokens at hand.

    Args:
        keys: Without rotation, (tokens, kv_heads * key_dim).
        values: (tokens, kv_heads * value_dim).
        hidden: What its attention was given, normalised, (tokens, hidden), where that was asked for.
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

    def rows(self, kept: torch.Tensor) -> State:
        """Some tokens, by booleans."""
        return State(self.keys[kept], self.values[kept], None if self.hidden is None else self.hidden[kept], self.heads)

    def of(self, kind: str) -> torch.Tensor:
        """`pair` for "states", and for "input" what the attention was given, which must have been asked for."""
        if kind == "states":
            return self.pair
        assert self.hidden is not None
        return self.hidden


class PromptTokens(NamedTuple):
    """Prompts, as a model is fed with them.

    Args:
        ids: (batch, tokens).
        mask: 1 where a token is real, (batch, tokens), or None where all are.
        real: The same as booleans, never None.
        positions: (batch, tokens), counted without padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    real: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None) -> PromptTokens:
        """Checked: padding may stand on the left alone.

        Args:
            input_ids: (batch, tokens) or (tokens,), a tensor or lists.
            attention_mask: 1 where a token is real, or None.
        """
        ids = _matrix("input_ids", input_ids)
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool or not ids.numel():
            raise ConfigError.of("input_ids", "token ids, (batch, tokens)", (tuple(ids.shape), ids.dtype))
        if attention_mask is None:
            real = torch.ones_like(ids, dtype=torch.bool)
        else:
            given = _matrix("attention_mask", attention_mask).to(ids.device)
            real = given.bool()
            # A mask of numbers to be added has 0 where this one has 1.
            holds = real.shape == ids.shape and bool((given == real).all() and real[:, -1].all())
            if not holds or bool((real[:, :-1] & ~real[:, 1:]).any()):
                expected = f"1 and 0 of the shape {tuple(ids.shape)}, with 0 on the left alone"
                raise ConfigError.of("attention_mask", expected, (tuple(given.shape), given.dtype))
        if bool(real.all()):
            return cls(ids.long(), None, real, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
        return cls(ids.long(), real.long(), real, (real.cumsum(-1) - 1).clamp_min(0))

    def to(self, device: torch.device) -> PromptTokens:
        """On another device."""
        ids, mask, real, positions = self
        return PromptTokens(ids.to(device), None if mask is None else mask.to(device), real.to(device), positions.to(device))

    def rows(self) -> list[torch.Tensor]:
        """The real ids of each row, on the CPU."""
        return [ids[real] for ids, real in zip(self.ids.cpu(), self.real.cpu(), strict=True)]


def _matrix(argument: str, given: Any) -> torch.Tensor:
    """What was given as a tensor, a single row as a batch of one."""
    try:
        made = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "Tokenize texts, and pad rows on the left."
        raise ConfigError.of(argument, "a tensor or lists of numbers, (batch, tokens)", type(given).__name__, hint) from error
    return made[None] if made.ndim == 1 else made


class ReadingCache(KVCache):
    """Holds nothing: it reads keys and values as they come, and can look at queries.

    Args:
        queries: Called with what each layer attends with; None where nobody asks.

    Attributes:
        leaves: A list to put each layer's keys and values into, for gradients; None for none.
    """

    own_layer_types = ("full_attention", "sliding_attention", "chunked_attention")

    def __init__(self, model: PreTrainedModel, queries: Callable[[Attended], None] | None = None) -> None:
        self.on_queries = queries
        self.on_layer: Callable[[int, torch.Tensor, torch.Tensor], None] = lambda index, keys, values: None
        self.leaves: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        super().__init__(model if queries is not None else compat.decoder_config(model.config))
        require_plain_layers(self.config)
        if queries is not None:
            require_answering(model, "The metric 'attention'")

    def make_layer(self, layer_idx: int) -> KVLayer:
        return _ReadingLayer(self, layer_idx)


def require_plain_layers(config: Any) -> Rotation:
    """How a model's keys are turned, if each of its layers has keys and values that can be translated."""
    foreign = sorted({kind for kind, _ in compat.layer_plan(config) if kind not in ReadingCache.own_layer_types})
    if foreign:
        raise UnsupportedError(f"model: layers of the types {foreign} keep no keys and values that could be translated.")
    rotation = rotation_of(config)
    still = {geometry.kind for geometry in rotation.layers} - {"rope", "none", "learned"}
    if rotation.refused or still:
        raise UnsupportedError(f"model: {rotation.why}, so what it keeps can't be translated.")
    return rotation


class _ReadingLayer(PassingLayer):
    """Tells its cache, and hands on what came."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        if self.cache.leaves is not None:
            # Cut off from what they are made of: gradients are those of what comes behind.
            pair = key_states.detach().requires_grad_(), value_states.detach().requires_grad_()
            self.cache.leaves.append(pair)
            return pair
        self.cache.on_layer(self.layer_idx, key_states, value_states)
        if self.cache.on_queries is None:
            return key_states, value_states
        view = WatchedView(self.cache.on_queries, self.layer_idx, key_states, value_states)
        return view, view


@torch.no_grad()
def read_states(
    model: PreTrainedModel,
    tokens: PromptTokens,
    on_state: Callable[[int, State], None],
    *,
    hidden: Sequence[int] = (),
    upto: int | None = None,
    queries: Callable[[Attended], None] | None = None,
) -> None:
    """Runs a model over prompts, and hands each layer's state on as soon as it is there.

    Args:
        upto: The last layer that is wanted; the pass ends there, before its attention. None: all, and the pass is run to its end.
    """
    rotation = require_plain_layers(compat.decoder_config(model.config))
    inputs: dict[int, torch.Tensor] = {}

    def take(index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        on_state(index, state_of(rotation, index, keys, values, tokens)._replace(hidden=inputs.pop(index, None)))
        if index == upto:
            raise PassEnded

    def keep(index: int, given: torch.Tensor) -> None:
        inputs[index] = given[tokens.real]

    with watch_inputs(model, hidden, keep), suppress(PassEnded):
        cache = ReadingCache(model, queries)
        cache.on_layer = take
        run_base(model, cache, tokens)


def run_base(model: PreTrainedModel, cache: KVCache, tokens: PromptTokens) -> None:
    """A pass without the model's head."""
    run_span(model, cache, tokens.ids, tokens.positions, tokens.mask)


def state_of(rotation: Rotation, layer: int, keys: torch.Tensor, values: torch.Tensor, tokens: PromptTokens) -> State:
    """A layer's state of the real tokens. Keys lose their rotation; learned positions stay in them.

    Args:
        keys: (batch, kv_heads, tokens, head_dim).
    """
    geometry, real = rotation.layers[layer], tokens.real.to(keys.device)
    content = geometry.unrotate(keys, tokens.positions.to(keys.device)) if geometry.kind == "rope" else keys
    flat_keys, flat_values = (part.transpose(1, 2)[real].flatten(1) for part in (content, values))
    return State(flat_keys, flat_values, None, keys.shape[1])


def feed_attention(model: PreTrainedModel, layer: int, hidden: torch.Tensor, tokens: PromptTokens, cache: Cache) -> None:
    """Gives a layer's attention another input than the model's own, up to its keys and values.

    Args:
        hidden: Normalised, (batch, tokens, hidden).
        cache: Takes keys and values, and raises `PassEnded` behind them.
    """

    def exchange(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = hidden.to(args[0] if args else kwargs["hidden_states"])
        return ((given, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": given})

    layers = compat.decoder_layers(model)[2]
    below = [SkippedLayer(skipped, hidden.to(model.dtype) if index == layer - 1 else None) for index, skipped in enumerate(layers[:layer])]
    twin = with_layers(model, [*below, with_told_attention(layers[layer], exchange), *layers[layer + 1 :]])
    with suppress(PassEnded):
        run_module(twin, cache, tokens.ids, tokens.positions, tokens.mask)


def with_told_attention(layer: nn.Module, on_call: Callable[..., Any]) -> nn.Module:
    """A twin of a decoder layer that tells what its attention is called with."""
    attention = compat.attention_module(layer)
    return twin_of(layer, {name_of(layer, attention): ToldModule(attention, on_call)})


@torch.no_grad()
def state_of_input(model: PreTrainedModel, layer: int, hidden: torch.Tensor, tokens: PromptTokens) -> State:
    """The keys and values that a layer makes of an input.

    Args:
        hidden: Normalised, (tokens, hidden), of one prompt.
    """
    cache, found = ReadingCache(model), list[State]()

    def take(index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        found.append(state_of(require_plain_layers(cache.config), index, keys, values, tokens))
        raise PassEnded

    cache.on_layer = take
    feed_attention(model, layer, hidden[None], tokens, cache)
    return found[0]


@contextmanager
def watch_inputs(model: PreTrainedModel, layers: Sequence[int], on_input: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """While open, tells what the attention of some layers is given, (batch, tokens, hidden)."""
    decoder = compat.decoder_layers(model)[2]

    def hook(index: int) -> Callable[..., None]:
        return lambda module, args, kwargs: on_input(index, args[0] if args else kwargs["hidden_states"])

    handles = [
        compat.attention_module(decoder[index]).register_forward_pre_hook(hook(index), with_kwargs=True) for index in dict.fromkeys(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
