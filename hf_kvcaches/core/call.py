"""What a model's attention asks of a layer that answers queries itself, and the view by which new tokens get there."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.view import LayerView, previous_attention
from hf_kvcaches.errors import UnsupportedError


class Call:
    """What a model's attention module asks, with its mask, made for its own implementation, and all other arguments of its function."""

    def __init__(self, module: nn.Module, mask: Tensor | None, options: dict[str, Any]) -> None:
        self.module, self.mask, self.options = module, mask, options
        self.softcap: float | None = options.get("softcap")  # the bound of the scores
        # What is added to the scores, (batch or 1, heads or 1, queries, tokens seen).
        self.bias: Tensor | None = options.get("position_bias")
        # A learned score for each head that takes a share of the weights and gives nothing, (heads,).
        self.sink_logits: Tensor | None = options.get("s_aux")

    @cached_property
    def scaling(self) -> float:
        scaling = self.options.get("scaling")
        return float(scaling) if scaling is not None else float(self.module.head_dim) ** -0.5  # type: ignore[arg-type]

    @property
    def is_causal(self) -> bool:
        """Whether tokens see no later ones where there is no mask."""
        chosen = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if chosen is None else chosen)

    def dense(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of a whole first prompt by the model's own implementation, (batch, tokens, heads, head_dim)."""
        attend = self.options.get("dense_attention", previous_attention)
        output: Tensor = attend(self.module, query, keys, values, self.mask, **self.options)[0]
        return output

    def check(self, cache: str, *, sinks: bool = False) -> None:
        """Refuse what a cache that answers queries itself leaves out: learned sinks, too, unless it knows `sinks`."""
        for name in ("s_aux", "head_mask", "cu_seq_lens_q"):
            if self.options.get(name) is not None and not (sinks and name == "s_aux"):
                raise UnsupportedError(f"{cache} does not support attention with {name}. Use another cache with this model.")
        if self.options.get("dropout"):
            raise UnsupportedError(f"{cache} does not support dropout of attention weights. Call model.eval(), or set it to 0.")


class AnsweringLayer(KVLayer):
    """A layer that takes new tokens together with their queries, which it answers."""

    cache_name: ClassVar[str]  # for errors

    @abstractmethod
    def check_new_tokens(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys and values that don't fit what the layer holds."""

    @abstractmethod
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, call: Call) -> Tensor:
        """Take the new tokens, all rotated by the model, and return their queries' attention, (batch, tokens, heads, head_dim)."""

    def adopt(self, keys: Tensor, values: Tensor, positions: Tensor, padding: Tensor | None, queries: Any = None) -> None:
        """Take over a prompt, as after a prefill; arguments as in `HolderCache.adopt_layer`."""
        self._refuse("adopt")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        view = NewTokens(self, key_states, value_states)
        return view, view


class NewTokens(LayerView):
    """New tokens, (batch, kv_heads, tokens, head_dim), on their way to an answering layer's `attend`."""

    def __init__(self, layer: AnsweringLayer, keys: Tensor, values: Tensor) -> None:
        device = keys.device.type
        enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        self.autocasts = enabled and keys.dtype != torch.float64  # which autocast leaves alone
        if self.autocasts:  # as the model's own attention would
            keys, values = (states.to(torch.get_autocast_dtype(device)) for states in (keys, values))
        layer.check_new_tokens(keys, values)
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        self.layer, self.keys, self.values, self.attended, self.cache_name = layer, keys, values, False, layer.cache_name

    def attend(self, module: nn.Module, query: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.attended:
            raise UnsupportedError(
                f"{type(module).__name__} attends twice to the keys of one layer, as models do whose layers share keys. "
                "This cache takes a layer's tokens when they are attended to, so it can't be used with this model."
            )
        self.attended = True
        call = Call(module, mask, kwargs)
        if not self.autocasts:
            output = self.layer.attend(query, self.keys, self.values, call)
        else:  # the layer computes in the autocast precision throughout, as in a model of that precision
            with torch.autocast(query.device.type, enabled=False):
                output = self.layer.attend(query.to(self.keys.dtype), self.keys, self.values, call)
        return output, None
