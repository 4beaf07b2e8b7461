"""Caches that take over a prompt's exact keys and values from elsewhere, and prune or encode them as after a prefill of their own."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.identity import Identity, Provenance
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.masks import padding_of
from hf_kvcaches.core.parallel import is_tensor_parallel
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import ConfigError, UnsupportedError

_UNKNOWN = Identity(reason="It took over keys and values from a cache that does not say which model computed them.")


@dataclass(frozen=True)
class LastQueries:
    """The last queries of a prompt in one layer, for policies that look at their attention.

    Args:
        states: (batch, heads, queries, head_dim), as the model rotated them.
        scaling: What the model's attention multiplies the scores with. Some models scale queries before, and pass 1.
        softcap: Bound of the scores, or None.
        sink_logits: A learned score for each head that takes a share of the weights, (heads,), or None.
    """

    states: torch.Tensor
    scaling: float
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None


class AdoptingCache(KVCache):
    """A cache whose layers have `adopt(keys, values, running, queries)`: afterwards they hold what they would hold after a prefill."""

    @property
    def adopt_window(self) -> int | None:
        """How many of a prompt's last queries `adopt_layer` needs: 0 for none, None for all."""
        return 0

    @abstractmethod
    def adopt_refused(self, window: int = 0) -> str:
        """Why a cache with these settings can't adopt keys and values, and what to use instead; "" where it can.

        Args:
            window: How many of the prompt's last queries come with them.
        """

    def prompt_pass(self, positions: torch.Tensor, padding: torch.Tensor | None, tokens: int, device: torch.device) -> Any:
        """What the layers' `adopt` is told of the pass that computed a prompt; None where they need not know.

        Args:
            positions: The model's positions of all tokens, (batch or 1, tokens).
            padding: How many slots at the start of each row hold no token, (batch,), or None.
            tokens: Slots of a row.
            device: Of the keys.
        """
        return None

    @classmethod
    def from_cache(
        cls,
        past: Cache,
        model: Any,
        *args: Any,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        queries: Sequence[LastQueries | None] | None = None,
        **options: Any,
    ) -> Self:
        """A new cache that goes on where another one is, which stays as it is.

        Args:
            past: A `DynamicCache`, or a cache of this package that keeps every key and value exactly.
            model: As for the constructor.
            *args: As for the constructor.
            attention_mask: 1 where a token of `past` is real, (batch, tokens), with padding at the start of rows; None for no padding.
            position_ids: Those that `past` was filled with, (batch or 1, tokens); None for those of `generate`, which count real tokens.
            queries: Of each layer, the last ones of the prompt, where `adopt_window` is not 0.
            **options: As for the constructor.
        """
        cache = cls(model, *args, **options)
        reason = "" if queries is not None else cache.adopt_refused()
        if reason:
            raise UnsupportedError(reason)
        tokens = _require_source(past, cache)
        if queries is not None and len(queries) != len(cache.layers):
            raise ConfigError.of("queries", f"one value for each of {len(cache.layers)} layers", f"{len(queries)} values")
        padding = None if attention_mask is None else padding_of(attention_mask, tokens)
        if position_ids is None:
            position_ids = torch.arange(tokens)[None]
            position_ids = position_ids if padding is None else (position_ids.to(padding.device) - padding[:, None]).clamp(min=0)
            position_ids = position_ids + first_position(cache)
        for index, (layer, source) in enumerate(zip(cache.layers, past.layers, strict=True)):
            if not isinstance(layer, KVLayer) and _is_alike(source, layer):
                cache.layers[index] = copy.deepcopy(source)
                continue
            keys, values = exact_states(source, index, tokens, window=not isinstance(layer, KVLayer))
            _require_heads(cache, index, keys, values)
            cache.adopt_layer(index, keys, values, position_ids, padding, None if queries is None else queries[index])
        if isinstance(past, KVCache):
            if past.provenance.taken:
                cache.provenance = copy.deepcopy(past.provenance)
            cache.fed = copy.deepcopy(past.fed)
            cache.fed.cut(tokens)
        return cache

    def adopt_layer(
        self,
        layer_idx: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        padding: torch.Tensor | None = None,
        queries: LastQueries | None = None,
    ) -> None:
        """Takes over a prompt's keys and values in one layer, which is empty. The tensors are copied.

        A cache without a provenance records that the model is not known, and can't be saved.

        Args:
            layer_idx: A layer with full attention, or one with a sliding window, which keeps the last tokens.
            keys: (batch, kv_heads, tokens, head_dim), as the model rotated them at `positions`.
            values: Like `keys`.
            positions: (batch or 1, tokens), int64. Give all layers the same tensor.
            padding: How many slots at the start of each row hold no token, (batch,), or None.
            queries: The last `adopt_window` of the prompt, or more.
        """
        layer = self.layers[layer_idx]
        if not isinstance(layer, KVLayer) and type(layer) is not DynamicSlidingWindowLayer:
            raise ConfigError.of("layer_idx", "a layer with full or sliding attention", layer_idx, f"It is a {type(layer).__name__}.")
        seen = layer.get_seq_length()
        if seen:
            raise ConfigError(
                f"adopt_layer: expected an empty layer, got one that has seen {seen} tokens. Call reset(), or use a new cache."
            )
        rows, tokens = keys.shape[0], keys.shape[2]
        if values.shape[:3] != keys.shape[:3]:
            raise ConfigError.of("values", f"a shape of {(*keys.shape[:3], 'head_dim')}", tuple(values.shape))
        if positions.ndim != 2 or positions.shape[0] not in (1, rows) or positions.shape[1] != tokens:
            raise ConfigError.of("positions", f"a shape of {(1, tokens)} or {(rows, tokens)}", tuple(positions.shape))
        if padding is not None and padding.shape != (rows,):
            raise ConfigError.of("padding", f"a shape of {(rows,)}", tuple(padding.shape))
        with torch.no_grad():
            if isinstance(layer, KVLayer):
                layer.check_new_tokens(keys, values)
                layer.lazy_initialization(keys, values)
                layer.adopt(keys, values, self.prompt_pass(positions, padding, tokens, keys.device), queries)
            else:
                _fill_window(layer, keys, values)
        if not self.provenance.taken:
            self.provenance = Provenance.of(_UNKNOWN, tokens)
        offloaded = [index for index, other in enumerate(self.layers) if isinstance(other, KVLayer)][1:]
        if self.offloading and layer_idx in offloaded:  # a pass prefetches all layers but the first
            self.offload(layer_idx, self.only_non_sliding)


def _require_source(past: Any, cache: KVCache) -> int:
    """Checks that a cache can be a source, and returns how many tokens it has."""
    if not isinstance(past, Cache) or not hasattr(past, "layers"):
        raise ConfigError.of("past", "a DynamicCache, or a cache of this package that keeps every token", past)
    if past.layers and not any(isinstance(layer, CacheLayerMixin) for layer in past.layers):
        raise ConfigError.of("past", "a cache with layers of attention", past, "There is nothing to compress.")
    tokens = int(past.get_seq_length())
    if isinstance(past, KVCache) and past.filling:
        raise ConfigError.of("past", "a whole prompt", "a cache whose prefill failed", "Call its reset(), and fill it anew.")
    if not tokens:
        raise ConfigError.of("past", "a cache that holds a prompt", "an empty one", "Run the prompt with it first.")
    if len(past.layers) != len(cache.layers):
        raise ConfigError.of("past", f"a cache of this model, with {len(cache.layers)} layers", f"{len(past.layers)} layers")
    return tokens


def _model_of(cache: KVCache) -> PreTrainedModel | None:
    """The model that a cache was built with, if it was built with one."""
    return None if cache._model is None else cache._model()


def first_position(cache: KVCache) -> int:
    """The position of a text's first token, where the caller passes no positions."""
    model = _model_of(cache)
    return 1 if model is not None and model.config.model_type == "paligemma" else 0


def exact_states(
    layer: Any, layer_idx: int, tokens: int, argument: str = "past", *, window: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values, (batch, kv_heads, tokens, head_dim) each; refuses layers that don't keep them exactly.

    Args:
        tokens: How many the source has seen.
        argument: What the caller calls the source, for errors.
        window: Whether they are for a layer with a sliding window.
    """
    states = None
    if type(layer) is DynamicLayer:  # its subclasses quantize
        states = (layer.keys, layer.values)
    elif isinstance(layer, KVLayer):
        states = layer.window_states() if window else layer.exact_states()
    if states is None:
        hint = "Fill a DynamicCache or a GrowingCache; layers with a sliding window drop tokens when decoding begins."
        raise ConfigError.of(f"{argument}.layers[{layer_idx}]", "a layer with every key and value", type(layer).__name__, hint)
    keys, values = states
    if keys is None or values is None or keys.ndim != 4 or keys.shape[2] != tokens:
        got = "none" if keys is None else tuple(keys.shape)
        raise ConfigError.of(f"{argument}.layers[{layer_idx}]", f"keys of {tokens} tokens", got, "A forward pass failed on the way.")
    return keys.to(layer.device), values.to(layer.device)


def _require_heads(cache: KVCache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Refuses keys and values of another model, as far as the config tells.

    Args:
        keys: (batch, kv_heads, tokens, head_dim).
    """
    config, model = compat.layer_configs(cache.config)[layer_idx], _model_of(cache)
    sizes, heads = head_sizes(cache.config, layer_idx), getattr(config, "num_key_value_heads", None)
    # The latent attention of DeepSeek and others has heads that the config does not name.
    if sizes is None or heads is None or getattr(config, "kv_lora_rank", None) or (model is not None and is_tensor_parallel(model)):
        return
    expected, got = (heads, *sizes), (keys.shape[1], keys.shape[3], values.shape[3])
    if got != expected:
        raise ConfigError.of(
            f"past.layers[{layer_idx}]",
            f"{expected[0]} heads of {expected[1]} and {expected[2]}, as the model has",
            got,
            "Use its own cache.",
        )


def _is_alike(source: Any, layer: Any) -> bool:
    """Whether two of transformers' layers have one type and window."""
    return type(source) is type(layer) and getattr(source, "sliding_window", None) == getattr(layer, "sliding_window", None)


def _fill_window(layer: DynamicSlidingWindowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Fills a layer with the last tokens of a prompt.

    Args:
        keys: (batch, kv_heads, tokens, head_dim).
    """
    tokens = keys.shape[2]
    start = max(0, tokens - layer.sliding_window + 1)
    layer.update(keys[:, :, start:], values[:, :, start:])
    layer.cumulative_length = tokens
