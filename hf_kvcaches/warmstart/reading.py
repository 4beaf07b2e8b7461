"""Read a prompt's keys, values and last queries, while the model runs it or from a cache that holds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.holder import exact_states
from hf_kvcaches.core.source import SourceCache
from hf_kvcaches.core.view import require_answering
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.observer import Attended, WatchedView
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.reuse.partial import run_span

# The states of the last token in a cache may differ from recomputed ones by at most this share of their norm.
_SAME = 0.05


@dataclass(frozen=True)
class PromptStates:
    """The keys, values and last queries that a model computes for the tokens of one pass.

    Args:
        queries: For each layer the last token's, (heads, head_dim), rotated and not scaled.
    """

    layers: tuple[LayerStates, ...]
    queries: tuple[torch.Tensor, ...]
    scaling: tuple[float, ...]


class _ReadLayer(SplicedLayer):
    """A layer that holds the tokens before a pass, if any, and passes the states of the pass to `watch`."""

    def __init__(self, watch: Callable[[Attended], None], layer_idx: int, before: LayerStates | None) -> None:
        super().__init__()
        self.watch, self.layer_idx, self.before = watch, layer_idx, before
        self.seen = 0 if before is None else before.keys.shape[1]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[2]
        if self.before is not None:
            key_states, value_states = (
                torch.cat([old[None].to(new.device), new], 2) for old, new in zip(self.before, (key_states, value_states), strict=True)
            )
        view = WatchedView(self.watch, self.layer_idx, key_states, value_states)
        return view, view


class _ReadCache(SplicingCache):
    hooks_forward = False

    def __init__(self, model: PreTrainedModel, before: Sequence[LayerStates] | None) -> None:
        self.before = before
        self.read: list[tuple[LayerStates, torch.Tensor, float]] = []
        super().__init__(model)

    def make_layer(self, layer_idx: int) -> SplicedLayer:
        # Not a bound method: layers that refer to the cache would keep all keys alive until the next garbage collection.
        return _ReadLayer(functools.partial(_keep, self.read), layer_idx, None if self.before is None else self.before[layer_idx])


def _keep(read: list[tuple[LayerStates, torch.Tensor, float]], attended: Attended) -> None:
    tokens = attended.query.shape[2]
    keys, values = (
        states[0] if states.shape[2] == tokens else states[0, :, -tokens:].clone() for states in (attended.keys, attended.values)
    )
    read.append((LayerStates(keys, values), attended.query[0, :, -1].clone(), attended.scaling))


@torch.no_grad()
def read_prompt(model: PreTrainedModel, ids: torch.Tensor, before: Sequence[LayerStates] | None = None) -> PromptStates:
    """Run a prompt, (1, tokens), and return its states; `before` holds each layer's states of the tokens before it."""
    start = 0 if before is None else before[0].keys.shape[1]
    if ids.ndim != 2 or ids.shape[0] != 1 or start + ids.shape[1] < 2:
        raise ConfigError.of("ids", "one prompt of at least two tokens, (1, tokens)", tuple(ids.shape))
    cache = _ReadCache(model, before)
    require_answering(model, "A warm start")
    run_span(model, cache, ids, torch.arange(start, start + ids.shape[1], device=ids.device))
    return PromptStates(*zip(*cache.read, strict=True))


def last_token(model: PreTrainedModel, ids: torch.Tensor, layers: Sequence[LayerStates]) -> PromptStates:
    """Run the last token of a prompt, (1, tokens), whose keys and values are given, and return its states."""
    return read_prompt(model, ids[:, -1:], [LayerStates(*(states[:, :-1] for states in layer)) for layer in layers])


@torch.no_grad()
def states_of_cache(model: PreTrainedModel, cache: Any, ids: torch.Tensor, digest: str) -> PromptStates:
    """Return a prompt's states from a cache; only the last token is recomputed.

    Args:
        ids: The prompt's token ids, (1, tokens).
        digest: The digest of the model's identity, under which the cache's tokens must have been computed.
    """
    if not isinstance(cache, Cache):
        raise ConfigError.of("cache", "a DynamicCache, or a cache of this package that keeps every token", type(cache).__name__)
    tokens = ids.shape[1]
    if why_not := _why_not(model, cache, ids[0], digest):
        raise ConfigError(f"cache: {why_not} Add the prompt without the cache, which runs it.")
    layers = []
    for index, layer in enumerate(cache.layers):
        keys, values = exact_states(layer, index, cache.get_seq_length(), "cache")
        if keys.shape[0] != 1:
            raise ConfigError.of("cache", "one row", f"{keys.shape[0]} rows", "Add prompts of a batch without their cache.")
        layers.append(LayerStates(keys[0, :, :tokens], values[0, :, :tokens]))
    recomputed = last_token(model, ids, layers)
    for index, (layer, last) in enumerate(zip(layers, recomputed.layers, strict=True)):
        for name, states, expected in zip(LayerStates._fields, layer, last, strict=True):
            difference = (states[:, -1:].float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6)
            if not difference <= _SAME:
                got = f"{name} in layer {index} that differ by {float(difference):.0%}"
                hint = "Its tokens, positions, padding or model are others."
                raise ConfigError.of("cache", "what the model computes for the prompt's last token", got, hint)
    return PromptStates(tuple(layers), recomputed.queries, recomputed.scaling)


def _why_not(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, digest: str) -> str:
    """Say why a cache can't be proven to hold a prompt's exact states; "" if it can, and for caches that keep no record."""
    seen, tokens = int(cache.get_seq_length()), len(ids)
    if seen < tokens:
        return f"It holds {seen} tokens, and the prompt has {tokens}."
    if not isinstance(cache, KVCache):
        return ""
    if cache.broken:
        return "Its prefill failed."
    identity = cache.provenance.identity
    if why := cache.why_inexact or identity.reason:
        return why
    if identity.known_digest() != digest:
        return "The model was another when it filled the cache, or had other adapters."
    if isinstance(cache, SourceCache):
        fed = cache.log.ids if cache.log.padding(seen) == [0] else None
    else:
        fed = cache.log.ids if len(cache.log) >= tokens else None
    if fed is None or fed.shape[0] != 1:
        return "The tokens that it was fed are not known, or they are several rows or padded."
    return "" if torch.equal(fed[0, :tokens].cpu(), ids.cpu()) else "It was fed other tokens than those of the prompt."
