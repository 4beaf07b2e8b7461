"""A cache that keeps everything, in buffers that grow ahead of need."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hf_kvcaches.core.holder import HolderCache, LastQueries
from hf_kvcaches.core.layers import TensorLayer
from hf_kvcaches.errors import ConfigError


class GrowingLayer(TensorLayer):
    """Keys and values in preallocated buffers, (batch, kv_heads, capacity, head_dim), of which the first `kept` slots count.

    `keys` and `values` show just these slots, as in transformers' own layers.
    """

    row_tensors: ClassVar[tuple[str, ...]] = ("key_buffer", "value_buffer")
    exact_tensors = row_tensors
    is_croppable = True
    key_buffer: torch.Tensor | None = None
    value_buffer: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        """(batch, kv_heads, seen, head_dim), or None before the first token."""
        return None if self.key_buffer is None else self.key_buffer[:, :, : self.kept]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        # Only the None of transformers' constructor comes here; a tensor is refused like any undeclared one.
        assert value is None

    @property
    def values(self) -> torch.Tensor | None:
        """Like `keys`."""
        return None if self.value_buffer is None else self.value_buffer[:, :, : self.kept]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        assert value is None

    @property
    def kept(self) -> int:
        return self.seen

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the new tokens and returns all.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim), rotated.
        """
        self.check_new_tokens(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.seen
        stop = start + key_states.shape[-2]
        keys, values = append(self.key_buffer, key_states, start), append(self.value_buffer, value_states, start)
        if keys is not self.key_buffer:
            self.key_buffer = keys
        if values is not self.value_buffer:
            self.value_buffer = values
        # Last, because who reads along in another thread goes by it.
        self.seen = stop
        if start == 0:
            return key_states, value_states
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def exact_states(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        return self.keys, self.values

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, running: None, queries: LastQueries | None = None) -> None:
        """Takes over a prompt's keys and values.

        Args:
            keys: (batch, kv_heads, tokens, head_dim), as the model rotated them.
        """
        self.update(keys, values)

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
        """From now on new tokens may be drafts; cropping is exact at any time."""
        self.record_past = True

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = super().export_state()
        buffers = {name: tensor[:, :, : self.kept] for name, tensor in tensors.items() if name in self.exact_tensors}
        return tensors | buffers, values


def append(buffer: torch.Tensor | None, new: torch.Tensor, start: int, reserve: int = 8) -> torch.Tensor:
    """Writes `new` behind the first `start` slots of a buffer, which is replaced by a larger one when it is full.

    Args:
        buffer: (batch, kv_heads, capacity, head_dim), or None for none yet.
        new: (batch, kv_heads, tokens, head_dim).
        reserve: A larger buffer has room for one token more for each so many, so each token is copied about as many times in all.
    """
    tokens = new.shape[-2]
    stop = start + tokens
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        # Graphs don't bear writing in place. Backward needs even keys without a gradient of their own, for that of the queries;
        # a compiled graph can't ask whether the buffer comes from inference mode, where it may not be written to later.
        return new if buffer is None else torch.cat([buffer[:, :, :start], new], dim=-2)
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    if buffer is None or stop > buffer.shape[-2] or frozen:
        capacity = capacity_for(stop, reserve)
        larger = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
        larger[..., stop:, :].zero_()  # what was in that memory before is nobody's business
        if buffer is not None:
            larger[:, :, :start] = buffer[:, :, :start]
        buffer = larger
    buffer.narrow(2, start, tokens).copy_(new)
    return buffer


def capacity_for(slots: int, reserve: int = 8) -> int:
    """How many slots a new buffer gets.

    Args:
        reserve: Room for one token more for each so many, and for 64 at least.
    """
    return slots + max(64, slots // reserve)


class GrowingCache(HolderCache):
    """Keeps every token, like `DynamicCache`, without copying the whole cache for each new one.

    The ground that lossy caches are measured from, and what a cache with nothing to save falls back to.

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

    def adopt_refused(self, window: int = 0) -> str:
        return ""
