"""A cache that keeps everything, in buffers that grow ahead of need."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from hf_kvcaches.core.attention import LayerView, MaskRecipe, previous_attention, previous_implementation
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.layers import TensorLayer
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.slots import slot_attention


class GrowingLayer(TensorLayer):
    """Keys and values in preallocated buffers, (batch, kv_heads, capacity, head_dim), of which the first `kept` slots count.

    `keys` and `values` show just these slots, as in transformers' own layers.
    """

    row_tensors: ClassVar[tuple[str, ...]] = ("key_buffer", "value_buffer")
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
            value_states: Like `key_states`.
            *args: Ignored.
            **kwargs: Ignored.
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
        buffers = {name: tensor[:, :, : self.kept] for name, tensor in tensors.items() if name in GrowingLayer.row_tensors}
        return tensors | buffers, values


def append(buffer: torch.Tensor | None, new: torch.Tensor, start: int, reserve: int = 8) -> torch.Tensor:
    """Writes `new` behind the first `start` slots of a buffer, which is replaced by a larger one when it is full.

    Args:
        buffer: (batch, kv_heads, capacity, head_dim), or None for none yet.
        new: (batch, kv_heads, tokens, head_dim).
        start: How many slots of the buffer count.
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
        slots: That are needed now.
        reserve: Room for one token more for each so many, and for 64 at least.
    """
    return slots + max(64, slots // reserve)


class DenseView(torch.Tensor):
    """All keys (or values) in order, attended to by what is fastest for one new token on a CPU.

    An ordinary tensor to all but our attention. A model that computes with what the cache gives it, or that does not ask our
    attention after all (another one than the cache was built with, or after a change of its implementation), loses only the speed.
    """

    other: torch.Tensor
    # Whatever is computed from it is an ordinary tensor, without a detour through Python.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def pair(keys: torch.Tensor, values: torch.Tensor) -> tuple[DenseView, DenseView]:
        """The views of keys and values that belong together.

        Args:
            keys: (batch, kv_heads, tokens, head_dim).
            values: Like `keys`.
        """
        key_view, value_view = keys.as_subclass(DenseView), values.as_subclass(DenseView)
        key_view.other = values
        return key_view, value_view

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: MaskRecipe | torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        implementation = previous_implementation(module.config)
        made = mask.make(implementation) if isinstance(mask, MaskRecipe) else mask
        extras = kwargs.get("softcap") is None and kwargs.get("position_bias") is None and not kwargs.get("dropout")
        if implementation != "sdpa" or not extras or kwargs.get("scaling") is None or not _is_plain(made, self.shape[-2]):
            return previous_attention(module, query, self, self.other, made, **kwargs)
        # Faster with ordinary tensors, and nothing is copied.
        keys, values = self.as_subclass(torch.Tensor), self.other.as_subclass(torch.Tensor)
        valid = None if made is None else made[:, 0]
        return slot_attention(query, keys, values, kwargs["scaling"], valid=valid, backend="torch", check=False)


LayerView.register(DenseView)


def _is_plain(mask: torch.Tensor | None, tokens: int) -> bool:
    """Whether a mask says only which tokens take part.

    Args:
        mask: As made for sdpa, or None.
        tokens: The number of keys.
    """
    return mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1) and mask.shape[-1] == tokens)


class GrowingCache(KVCache):
    """Keeps every token, like `DynamicCache`, without copying the whole cache for each new one.

    The ground that lossy caches are measured from, and what a cache with nothing to save falls back to.

    **Departs from** `DynamicCache`: a decoding step writes one slot into a buffer instead of concatenating. On a CPU, in float32, a model
    that uses sdpa attends to a single new token by a kernel made for that, equal up to rounding. Rows, cropping, saving and
    copying work alike. Sliding, linear and shared layers of hybrid models are transformers' own.

    **Refuses**: `torch.compile` of the cache itself (`is_compileable` is False; a compiled model is fine).

    **Memory per token**: 2 x kv_heads x head_dim x bytes per element x layers, plus an eighth (at least 64 slots) of reserve.

    Args:
        model: A transformers model, or its config.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    kernel_from: ClassVar[int] = 2**18
    """From how many elements of a layer's keys on (2**18 are a megabyte) the kernel for single tokens is used."""

    def make_layer(self, layer_idx: int) -> GrowingLayer:
        return GrowingLayer()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # In half precision the fused kernel's float32 sums are worth its time, and with few keys the way to ours costs more than it saves.
        alone = key_states.shape[-2] == 1 and key_states.dtype == torch.float32 and key_states.device.type == "cpu"
        if not alone or keys.numel() < self.kernel_from or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return keys, values
        if self.attention_enabled and isinstance(self.layers[layer_idx], GrowingLayer):
            return DenseView.pair(keys, values)
        return keys, values
