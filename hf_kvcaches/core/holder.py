"""Holders: caches that can take over a prompt's exact keys and values from elsewhere, as if they had read the prompt themselves."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.call import AnsweringLayer
from hf_kvcaches.core.decoder import ForwardHook
from hf_kvcaches.core.identity import Identity, Provenance
from hf_kvcaches.core.layers import GrowingLayer, KVLayer
from hf_kvcaches.core.parallel import is_tensor_parallel
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.core.step import Passes, padding_of
from hf_kvcaches.errors import ConfigError, Refusal, UnsupportedError

_UNKNOWN = Identity(reason="It took over keys and values from a cache that does not say which model computed them.")


@dataclass(frozen=True)
class LastQueries:
    """The last queries of a prompt in one layer, or more, and what a `Call` says of their attention."""

    states: Tensor  # (batch, heads, queries, head_dim), as the model rotated them
    scaling: float
    softcap: float | None = None
    sink_logits: Tensor | None = None


class HolderCache(KVCache):
    """A cache that adopts prompts: afterwards its layers hold what they would hold after a prefill."""

    adopted: bool = False  # whether another cache hands its prompts to this one

    @property
    def adopt_window(self) -> int | None:
        """How many of a prompt's last queries `adopt_layer` needs: 0 for none, None for all."""
        return 0

    def adopt_refused(self, with_queries: bool = False) -> Refusal | None:
        """Why a cache with these settings can't adopt prompts, with their last `adopt_window` queries or without. Says what to use."""
        return None

    @classmethod
    def from_cache(
        cls,
        past: Cache,
        model: Any,
        *args: Any,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        queries: Sequence[LastQueries | None] | None = None,
        **options: Any,
    ) -> Self:
        """A new cache that goes on where another one is, which stays as it is.

        Args:
            past: A `DynamicCache`, or a cache of this package that keeps every key and value exactly.
            model: As for the constructor, and so are `args` and `options`.
            attention_mask: 1 where a token of `past` is real, (batch, tokens), with padding at the start of rows; None for no padding.
            position_ids: Those that `past` was filled with, (batch or 1, tokens); None for those of `generate`, which count real tokens.
            queries: Of each layer, the last ones of the prompt, where `adopt_window` is not 0.
        """
        cache = cls(model, *args, **options)
        if queries is None and (refusal := cache.adopt_refused()):
            raise UnsupportedError(refusal.reason)
        tokens = _require_exact_past(past, cache)
        if queries is not None and len(queries) != len(cache.layers):
            raise ConfigError.of("queries", f"one value for each of {len(cache.layers)} layers", f"{len(queries)} values")
        padding = None if attention_mask is None else padding_of(attention_mask, tokens)
        if position_ids is None:
            position_ids = generated_positions(cache, padding, tokens)
        for index, (layer, source) in enumerate(zip(cache.layers, past.layers, strict=True)):
            window = not isinstance(layer, KVLayer)
            if window and type(source) is type(layer) and getattr(source, "sliding_window", 0) == getattr(layer, "sliding_window", 0):
                cache.layers[index] = copy.deepcopy(source)
                continue
            keys, values = exact_states(source, index, tokens, window=window)
            _require_heads(cache, index, keys, values)
            cache.adopt_layer(index, keys, values, position_ids, padding, None if queries is None else queries[index])
        if isinstance(past, KVCache):
            if past.provenance.until:
                cache.provenance = copy.deepcopy(past.provenance)
            cache.log = copy.deepcopy(past.log)
            cache.log.crop(tokens)
        return cache

    def adopt_layer(
        self,
        layer_idx: int,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        padding: Tensor | None = None,
        queries: LastQueries | None = None,
    ) -> None:
        """Copy a prompt's keys and values, (batch, kv_heads, tokens, head_dim), rotated at their positions, into a layer, which is empty.

        Args:
            layer_idx: A layer with full attention, or one with a sliding window, which keeps the last tokens.
            positions: (batch or 1, tokens), int64. Give all layers the same tensor.
            padding: How many slots at the start of each row hold no token, (batch,), or None.
            queries: The last `adopt_window` of the prompt, or more.
        """
        layer: Any = self.layers[layer_idx]
        if not isinstance(layer, KVLayer) and type(layer) is not DynamicSlidingWindowLayer:
            raise ConfigError.of("layer_idx", "a layer with full or sliding attention", layer_idx, f"It is a {type(layer).__name__}.")
        if seen := layer.get_seq_length():
            raise ConfigError(f"layer_idx: expected an empty layer, got one that has seen {seen} tokens. Call reset(), or use a new cache.")
        rows, tokens = keys.shape[0], keys.shape[2]
        if values.shape[:3] != keys.shape[:3]:
            raise ConfigError.of("values", f"a shape of {(*keys.shape[:3], 'head_dim')}", tuple(values.shape))
        if positions.ndim != 2 or positions.shape[0] not in (1, rows) or positions.shape[1] != tokens:
            raise ConfigError.of("positions", f"a shape of {(1, tokens)} or {(rows, tokens)}", tuple(positions.shape))
        if padding is not None and padding.shape != (rows,):
            raise ConfigError.of("padding", f"a shape of {(rows,)}", tuple(padding.shape))
        with torch.no_grad():
            if isinstance(layer, AnsweringLayer):
                layer.check_new_tokens(keys, values)
                layer.lazy_initialization(keys, values)
                layer.adopt(keys, values, positions, padding, queries)
            elif isinstance(layer, KVLayer):
                layer.update(keys, values)
            else:
                start = max(0, tokens - layer.sliding_window + 1)
                layer.update(keys[:, :, start:], values[:, :, start:])
                layer.cumulative_length = tokens
        if not self.provenance.until:  # it can't be saved
            self.provenance = Provenance(tokens, [(0, _UNKNOWN)])
        if self.offloading and any(isinstance(before, KVLayer) for before in self.layers[:layer_idx]):  # a pass prefetches no first layer
            Cache.offload(self, layer_idx, self.only_non_sliding)


def _require_exact_past(past: Any, cache: KVCache) -> int:
    if not isinstance(past, Cache) or not hasattr(past, "layers"):
        raise ConfigError.of("past", "a DynamicCache, or a cache of this package that keeps every token", past)
    if past.layers and not any(isinstance(layer, CacheLayerMixin) for layer in past.layers):
        raise ConfigError.of("past", "a cache with layers of attention", past, "There is nothing to compress.")
    if isinstance(past, KVCache) and past.broken:
        raise ConfigError.of("past", "a whole prompt", "a cache whose prefill failed", "Call its reset(), and fill it anew.")
    if not (tokens := int(past.get_seq_length())):
        raise ConfigError.of("past", "a cache that holds a prompt", "an empty one", "Run the prompt with it first.")
    if len(past.layers) != len(cache.layers):
        raise ConfigError.of("past", f"a cache of this model, with {len(cache.layers)} layers", f"{len(past.layers)} layers")
    return tokens


def generated_positions(cache: KVCache, padding: Tensor | None, tokens: int) -> Tensor:
    """The positions by which `generate` numbers a left-padded batch, (batch or 1, tokens); `padding` is (batch,), or None."""
    positions = torch.arange(tokens)[None]
    if padding is not None:
        positions = (positions.to(padding.device) - padding[:, None]).clamp(min=0)
    model = cache.living_model
    return positions + int(model is not None and compat.is_family(model.config, "counts_from_one"))


def exact_states(layer: Any, layer_idx: int, tokens: int, argument: str = "past", *, window: bool = False) -> tuple[Tensor, Tensor]:
    """The keys and values of a layer that has seen some tokens, for one with a sliding window or without; refuses inexact ones."""
    states = None
    if type(layer) is DynamicLayer:  # its subclasses quantize
        states = (layer.keys, layer.values)
    elif isinstance(layer, KVLayer):
        states = layer.exact_states(window)
    if states is None:
        hint = "Fill a DynamicCache or a GrowingCache; layers with a sliding window drop tokens when decoding begins."
        raise ConfigError.of(f"{argument}.layers[{layer_idx}]", "a layer with every key and value", type(layer).__name__, hint)
    keys, values = states
    if keys is None or values is None or keys.ndim != 4 or keys.shape[2] != tokens:
        got = "none" if keys is None else tuple(keys.shape)
        raise ConfigError.of(f"{argument}.layers[{layer_idx}]", f"keys of {tokens} tokens", got, "A forward pass failed on the way.")
    return keys.to(layer.device), values.to(layer.device)


def _require_heads(cache: KVCache, layer_idx: int, keys: Tensor, values: Tensor) -> None:
    """Refuse keys and values of another model, as far as the config tells."""
    config, sizes = cache.config.per_layer_config[layer_idx], head_sizes(cache.config, layer_idx)
    heads, sharded = getattr(config, "num_key_value_heads", None), cache._model is not None and is_tensor_parallel(cache.model)
    # The latent attention of DeepSeek and others has heads that the config does not name.
    if sizes is None or heads is None or getattr(config, "kv_lora_rank", None) or sharded:
        return
    got = (keys.shape[1], keys.shape[3], values.shape[3])
    if got != (heads, *sizes):
        expected = f"{heads} heads of {sizes[0]} and {sizes[1]}, as the model has"
        raise ConfigError.of(f"past.layers[{layer_idx}]", expected, got, "Use its own cache.")


class GrowingCache(HolderCache):
    """Keeps every token, like `DynamicCache`, without copying the whole cache for each new one.

    **Departs from** `DynamicCache`: a decoding step writes one slot into a buffer instead of concatenating. Rows,
    cropping, saving and copying work alike. Sliding, linear and shared layers of hybrid models are transformers' own.

    **Refuses**: `torch.compile` of the cache itself (`is_compileable` is False; a compiled model is fine).

    **Memory per token**: 2 x kv_heads x head_dim x bytes per element x layers, plus an eighth (at least 64 slots) of reserve.

    Args:
        model: A transformers model, or its config.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    def make_layer(self, layer_idx: int) -> GrowingLayer:
        return GrowingLayer()


class AnsweringCache(HolderCache):
    """A cache whose layers answer queries, and share a pass."""

    needs_attention = True

    def __init__(self, model: Any, *, offloading: bool = False) -> None:
        self.passes = Passes()  # first: `make_layer` hands it to the layers
        super().__init__(model, offloading=offloading)

    def begin_pass(self, tokens: int) -> None:
        super().begin_pass(tokens)
        self.passes.begin()
        if compat.records_attentions():
            raise UnsupportedError(
                f"output_attentions: {type(self).__name__} computes attention over the tokens as it keeps them, and has no weights for "
                "each token of the text. Leave output_attentions out, or use DynamicCache with attn_implementation='eager'."
            )
        lengths = {int(layer.get_seq_length()) for layer in self.layers if isinstance(layer, CacheLayerMixin)}
        if len(lengths) > 1:
            raise UnsupportedError(
                f"The layers of this cache saw {sorted(lengths)} tokens: a forward pass or a crop failed on the way, or "
                "two threads used it at once. Call reset() and feed the text again."
            )

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        if (model := self.living_model) is not None:
            _DRAFTS.add(model, self)


def _count_drafts(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a cache before each forward pass how many of the tokens are drafts."""
    # Assisted generation feeds a prompt and the first drafts in one call; only the number of logits that it asks for tells them apart.
    cache = compat.cache_of(kwargs)
    if cache is not None and cache in _DRAFTS.caches.get(model, ()):
        keep, ids = kwargs.get("logits_to_keep"), kwargs.get("input_ids")
        # Who wants the logits of a whole prompt does not draft.
        whole = isinstance(ids, Tensor) and ids.shape[1] == keep and not cache.seen
        cache.passes.drafts = keep - 1 if isinstance(keep, int) and keep > 0 and not whole else None


_DRAFTS = ForwardHook(_count_drafts)
