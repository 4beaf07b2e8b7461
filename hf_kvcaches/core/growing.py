"""A cache that keeps everything, in buffers that grow ahead of need."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.layers import TensorLayer
from hf_kvcaches.errors import ConfigError


class GrowingLayer(TensorLayer):
    """Keys and values in preallocated buffers, (batch, kv_heads, capacity, head_dim), of which the first `seen` slots count."""

    is_croppable = True

    @property
    def kept(self) -> int:
        return self.seen

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the new tokens and returns all.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim), rotated.
            value_states: Like `key_states`.
            *args: Ignored.
            **kwargs: Ignored.
        """
        self.check_new_tokens(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.seen = self.seen, self.seen + key_states.shape[-2]
        keys, values = append(self.keys, key_states, start), append(self.values, value_states, start)
        self.keys, self.values = keys, values
        if start == 0:
            return key_states, value_states
        return keys[:, :, : self.seen], values[:, :, : self.seen]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; the buffers stay.

        Args:
            tokens_to_remove: Minus the number of tokens, as in transformers; 0 does nothing.
        """
        change = int(tokens_to_remove)  # some versions of generate come with a tensor
        if not -self.seen <= change <= 0:
            raise ConfigError.of("tokens_to_remove", f"a number from -{self.seen} to 0", change, "crop(-n) removes the last n tokens.")
        self.seen += change

    def activate_past_recording(self) -> None:
        """Nothing to record: cropping is exact at any time."""

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = super().export_state()
        return {name: tensor[:, :, : self.seen] for name, tensor in tensors.items()}, values


def append(buffer: torch.Tensor | None, new: torch.Tensor, start: int) -> torch.Tensor:
    """Writes `new` behind the first `start` slots of a buffer, which is replaced by a larger one when it is full.

    Args:
        buffer: (batch, kv_heads, capacity, head_dim), or None for none yet.
        new: (batch, kv_heads, tokens, head_dim).
        start: How many slots of the buffer count.
    """
    stop = start + new.shape[-2]
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        # Graphs don't bear writing in place. Backward needs even keys without a gradient of their own, for that of the queries;
        # a compiled graph can't ask whether the buffer comes from inference mode, where it may not be written to later.
        return new if buffer is None else torch.cat([buffer[:, :, :start], new], dim=-2)
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    if buffer is None or stop > buffer.shape[-2] or frozen:
        # An eighth more than needed: each token is copied some eight times in all, however long the text gets.
        capacity = stop + max(64, stop // 8)
        larger = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
        if buffer is not None:
            larger[:, :, :start] = buffer[:, :, :start]
        buffer = larger
    buffer[:, :, start:stop] = new
    return buffer


class GrowingCache(KVCache):
    """Keeps every token, like `DynamicCache`, without copying the whole cache for each new one.

    The ground that lossy caches are measured from, and what a cache with nothing to save falls back to.

    **Departs from** `DynamicCache`: a decoding step writes one slot into a buffer instead of concatenating. Rows, cropping, saving
    and copying work alike. Sliding, linear and shared layers of hybrid models are transformers' own.

    **Refuses**: `torch.compile` of the cache itself (`is_compileable` is False; a compiled model is fine).

    **Memory per token**: 2 x kv_heads x head_dim x bytes per element x layers, plus an eighth (at least 64 slots) of reserve.

    Args:
        model: A transformers model, or its config.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    def make_layer(self, layer_idx: int) -> GrowingLayer:
        return GrowingLayer()
