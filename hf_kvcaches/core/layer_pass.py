"""Passes through some of a model's layers: what the model is given in the place of the cache whose layers it fills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from hf_kvcaches.core import attention
from hf_kvcaches.core.partial import PassEnded

if TYPE_CHECKING:
    from hf_kvcaches.core.cache import KVCache


class LayerPass(Cache):
    """Appends to the layers of a cache; lengths are those of the layers that run."""

    def __init__(self, cache: KVCache, start: int = 0) -> None:
        super().__init__(layers=cache.layers)
        self.cache, self.start = cache, start

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        if isinstance(states[0], attention.LayerView):
            self.cache.answer_next(states[0])
        return states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(super().get_seq_length(self._counting(layer_idx)))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, self._counting(layer_idx))
        return sizes

    def _counting(self, layer_idx: int) -> int:
        """The lowest running layer of the kind that `layer_idx` has; layers of linear attention don't count tokens."""
        if layer_idx >= self.start:
            return layer_idx
        kinds = self.is_sliding
        counting = [index for index in range(self.start, len(kinds)) if isinstance(self.layers[index], CacheLayerMixin)]
        return next((index for index in counting if kinds[index] == kinds[layer_idx]), layer_idx)


class StoppingPass(LayerPass):
    """Ends when a layer has its keys and values, with a `PassEnded`."""

    def __init__(self, cache: KVCache, last: int, start: int = 0) -> None:
        super().__init__(cache, start)
        self.last = last

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self.last:
            raise PassEnded
        return states
