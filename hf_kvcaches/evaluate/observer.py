"""A cache that holds nothing, and shows what a model attends with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.view import LayerView, previous_attention
from hf_kvcaches.errors import UnsupportedError


class Attended(NamedTuple):
    """What one call of attention was given; states are (batch, heads or KV heads, tokens, head_dim), queries and keys rotated."""

    layer_idx: int
    module: nn.Module  # the model's attention
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    options: dict[str, Any]  # `scaling`, `softcap` and whatever else the model gives its attention function

    @property
    def scaling(self) -> float:
        return float(self.options.get("scaling") or self.query.shape[-1] ** -0.5)


class WatchedView(LayerView):
    """Keys and values of one forward pass; the first attention call is shown, and not those of layers that share them."""

    def __init__(self, watch: Callable[[Attended], None], layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.watch, self.layer_idx, self.keys, self.values = watch, layer_idx, keys, values
        self.shown = False

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.shown:
            self.shown = True
            self.watch(Attended(self.layer_idx, module, query, self.keys, self.values, kwargs))
        return previous_attention(module, query, self.keys, self.values, mask, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(f"This model reads {name!r} from the keys or values of its cache, so its attention can't be measured.")


class PassingLayer(KVLayer):
    """Holds nothing, counts the tokens of each pass, and shows its cache what attention is given. For caches that only look on."""

    kept = 0

    def __init__(self, cache: Any, layer_idx: int) -> None:
        super().__init__()
        self.cache, self.layer_idx = cache, layer_idx

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        view = WatchedView(self.cache.watch, self.layer_idx, key_states, value_states)
        return view, view

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def reset(self) -> None:
        self.seen = 0


class WatchingCache(KVCache):
    """Lets a model attend as ever to one sequence, and watches its full-attention layers."""

    needs_attention = True

    @abstractmethod
    def watch(self, attended: Attended) -> None:
        """Told of each layer's attention before it is computed."""

    def make_layer(self, layer_idx: int) -> KVLayer:
        return PassingLayer(self, layer_idx)
