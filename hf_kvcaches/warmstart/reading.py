"""Prompts as users give them, and their keys and values, by running them or from a cache that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.holder import exact_states
from hf_kvcaches.core.source import SourceCache
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse.layer import PlainCache
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.reuse.partial import run_span

Prompt = str | Sequence[int] | torch.Tensor

# The states of the last token in a cache may differ from recomputed ones by at most this share of their norm.
_SAME = 0.05


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list."""
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__len__"):
        raise ConfigError.of("prompts", "texts or rows of token ids", type(prompts).__name__, "Of a tokenizer's output, add input_ids.")
    single = isinstance(prompts, str) or (isinstance(prompts, torch.Tensor) and prompts.ndim == 1)
    return [prompts] if single or (len(prompts) and isinstance(prompts[0], int)) else list(prompts)  # type: ignore[list-item,arg-type]


def token_ids(prompt: Prompt, model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Return a prompt's token ids; a text gets the tokenizer's special tokens."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    try:
        ids = [index(token) for token in (prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt)]
    except TypeError as error:
        raise ConfigError.of("prompts", "texts or rows of token ids", type(prompt).__name__) from error
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", 1 << 31)
    if not all(0 <= token < vocabulary for token in ids):
        raise ConfigError.of("prompts", f"token ids from 0 to {vocabulary - 1}", f"{min(ids)} to {max(ids)}")
    return ids


@torch.no_grad()
def read_prompt(model: PreTrainedModel, ids: torch.Tensor) -> list[LayerStates]:
    """Run a prompt, (1, tokens), and return the states of its tokens in each layer."""
    cache = PlainCache(model)
    run_span(model, cache, ids, torch.arange(ids.shape[1], device=ids.device))
    return [LayerStates(layer.keys[0], layer.values[0]) for layer in cache.layers]


@torch.no_grad()
def states_of_cache(model: PreTrainedModel, cache: Any, ids: torch.Tensor, digest: str) -> list[LayerStates]:
    """Return a prompt's states from a cache; only the last token is computed again, and compared.

    Args:
        ids: The prompt's token ids, (1, tokens).
        digest: The digest of the model's identity, under which the cache's tokens must have been computed.
    """
    if not isinstance(cache, Cache):
        raise ConfigError.of("cache", "a DynamicCache, or a cache of this package that keeps every token", type(cache).__name__)
    tokens = ids.shape[1]
    if why_not := _why_not(cache, ids[0], digest):
        raise ConfigError(f"cache: {why_not} Add the prompt without the cache, which runs it.")
    layers = []
    for number, layer in enumerate(cache.layers):
        keys, values = exact_states(layer, number, cache.get_seq_length(), "cache")
        if keys.shape[0] != 1:
            raise ConfigError.of("cache", "one row", f"{keys.shape[0]} rows", "Add prompts of a batch without their cache.")
        layers.append(LayerStates(keys[0, :, :tokens], values[0, :, :tokens]))
    again = PlainCache(model)
    for layer, (keys, values) in zip(again.layers, layers, strict=True):
        layer.update(keys[None, :, :-1], values[None, :, :-1])
    run_span(model, again, ids[:, -1:], torch.tensor([tokens - 1], device=ids.device))
    for number, (layer, states) in enumerate(zip(again.layers, layers, strict=True)):
        for name, given, computed in zip(LayerStates._fields, states, (layer.keys, layer.values), strict=True):
            last = computed[0, :, -1:].float()
            difference = (given[:, -1:].float() - last).norm() / last.norm().clamp_min(1e-6)
            if not difference <= _SAME:
                got = f"{name} in layer {number} that differ by {float(difference):.0%}"
                hint = "Its tokens, positions, padding or model are others."
                raise ConfigError.of("cache", "what the model computes for the prompt's last token", got, hint)
    return layers


def _why_not(cache: Cache, ids: torch.Tensor, digest: str) -> str:
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
    known = cache.log.padding(seen) == [0] if isinstance(cache, SourceCache) else len(cache.log) >= tokens
    fed = cache.log.ids if known else None
    if fed is None or fed.shape[0] != 1:
        return "The tokens that it was fed are not known, or they are several rows or padded."
    return "" if torch.equal(fed[0, :tokens].cpu(), ids.cpu()) else "It was fed other tokens than those of the prompt."
