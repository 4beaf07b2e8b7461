"""Cache layers: what each owes transformers, one whose tensors are declared, and one that keeps every token."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError

_MOST_TOKENS = 1 << 40  # no cache has seen more, and no counter of one is larger


def row_picker(indices: Any) -> Callable[[Tensor], Tensor]:
    """What picks rows of a tensor, dimension 0: by a slice, row numbers, or a bool for each row."""
    if isinstance(indices, slice):
        return lambda tensor: tensor[indices]
    try:
        picked = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        picked = torch.empty(0, 0)
    if picked.ndim != 1 or picked.is_floating_point() or picked.is_complex():
        raise ConfigError.of("indices", "a list or a tensor of row numbers, or of a bool for each row", indices)
    return lambda tensor: tensor[picked.to(tensor.device)]


def other_rows(rows: int, dtype: torch.dtype | None, new: Tensor) -> ConfigError:
    """The error for new tokens of another batch or dtype than those in the cache."""
    return ConfigError(
        f"The cache holds {rows} rows of {dtype}, and the model came with {new.shape[0]} rows of {new.dtype}. "
        "Use a new cache, or reset() this one; batch_repeat_interleave and batch_select_indices change its rows."
    )


class KVLayer(CacheLayerMixin):
    """One layer of a `KVCache`.

    `seen` counts the tokens that the model has fed in, which decides positions and masks; `kept` the slots that the layer still holds.
    Every operation that transformers may call and that touches state is refused here, so that none is inherited that forgets a part.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    exact_tensors: ClassVar[tuple[str, ...]] = ()
    """The tensors of `export_state` that are all keys and all values, as long as the layer has `exact_states`."""
    seen: int = 0
    record_past: bool = False
    """Whether new tokens can be taken back with `crop`, as transformers asks and sets it."""

    @property
    @abstractmethod
    def kept(self) -> int:
        """The number of slots that hold a token."""

    @abstractmethod
    def owned_tensors(self) -> dict[str, Tensor]:
        """Every tensor that the layer keeps alive, by name: what its memory is measured on."""

    def exact_states(self, window: bool = False) -> tuple[Tensor | None, Tensor | None] | None:
        """Keys and values of all tokens seen, as the model computed them; None where the layer has lost some.

        For a layer with a sliding `window`, tokens that no later one sees may be zeros.
        """
        return None

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All tokens seen, whatever is kept: a layer that keeps fewer answers its queries itself."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: the number of tokens that can be seen has no end."""
        return -1

    def reset(self) -> None:
        self._refuse("reset")

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse("crop", "Decode without an assistant, or rebuild the cache from the shorter text.")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(row_picker(indices))

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        self._move(self.device if self.is_initialized else "cpu")

    def activate_past_recording(self) -> None:
        self._refuse("activate_past_recording", "Decode without an assistant.")

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What is needed to build the layer again: tensors, and plain values for JSON."""
        self._refuse("save")

    def import_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over what `export_state` gave; the tensors are on the layer's device."""
        self._refuse("load")

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self._refuse("other rows", "Decode without beam search, and repeat the prompt instead of the cache.")

    def _move(self, device: torch.device | str) -> None:
        self._refuse("offload")

    def _refuse(self, operation: str, hint: str = "") -> NoReturn:
        raise UnsupportedError(f"{type(self).__name__} does not support {operation}. {hint}".rstrip())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seen={self.seen}, kept={self.kept})"


class TensorLayer(KVLayer):
    """A layer whose tensors are all declared, and therefore all moved, copied, counted and saved together.

    A tensor in an attribute that `row_tensors` does not name is a `TypeError` when rows are picked or the layer is moved, copied or saved.
    """

    keys: Tensor | None
    values: Tensor | None
    row_tensors: ClassVar[tuple[str, ...]] = ("keys", "values")  # dimension 0 is the batch
    counters: ClassVar[tuple[str, ...]] = ("seen",)  # numbers that belong to the state

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def owned_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name in self.row_tensors if (tensor := getattr(self, name, None)) is not None}

    def reset(self) -> None:
        self.__dict__.update(dict.fromkeys(self.row_tensors) | dict.fromkeys(self.counters, 0))
        self.is_initialized = False

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self._declared_tensors(), {name: getattr(self, name) for name in self.counters}

    def import_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        if foreign := (set(tensors) - set(self.row_tensors)) | (set(self.counters) ^ set(values)):
            raise ArtifactError(
                f"The stored state doesn't fit {type(self).__name__}: {sorted(foreign)}. Load it with the version that wrote it."
            )
        numbers = [value for value in values.values() if isinstance(value, int)]
        if type(values.get("seen", 0)) is not int or any(abs(number) > _MOST_TOKENS for number in numbers):
            raise ArtifactError(f"The stored state of a {type(self).__name__} has the counters {str(values)[:200]}. Save the cache again.")
        self.reset()
        self.__dict__.update(tensors | values)
        if self.keys is not None and self.values is not None:
            self.lazy_initialization(self.keys, self.values)

    def check_new_tokens(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse tokens that can't follow those in the cache, whose keys and values are the first two of `row_tensors`."""
        for name, new in zip(self.row_tensors, (key_states, value_states), strict=False):
            old = getattr(self, name, None)
            if old is not None and (old.size(0) != new.size(0) or old.dtype != new.dtype):
                raise other_rows(old.shape[0], old.dtype, new)

    def _declared_tensors(self) -> dict[str, Tensor]:
        """`owned_tensors`, where no others would be left behind."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in self.row_tensors:
                raise TypeError(f"{type(self).__name__}.{name} is a tensor that row_tensors does not name")
        return self.owned_tensors()

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self.__dict__.update({name: function(tensor) for name, tensor in self._declared_tensors().items()})

    def _move(self, device: torch.device | str) -> None:
        self.__dict__.update({name: tensor.to(device, non_blocking=True) for name, tensor in self._declared_tensors().items()})

    def leave_inference_mode(self) -> None:
        """Copy what was made under `torch.inference_mode`, where that is over: it can neither be written to nor be part of a graph."""
        for name in () if torch.is_inference_mode_enabled() else self.row_tensors:
            if (tensor := getattr(self, name, None)) is not None and tensor.is_inference():
                setattr(self, name, tensor.clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorLayer:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        tensors = self._declared_tensors()
        for name, value in vars(self).items():
            # Cloned, because deepcopy refuses tensors that are part of an autograd graph.
            setattr(copied, name, tensors[name].clone() if name in tensors else copy.deepcopy(value, memo))
        return copied


class GrowingLayer(TensorLayer):
    """Keys and values in preallocated buffers, (batch, kv_heads, capacity, head_dim); `keys` and `values` show the first `kept` slots."""

    row_tensors: ClassVar[tuple[str, ...]] = ("key_buffer", "value_buffer")
    exact_tensors = row_tensors
    is_croppable = True
    key_buffer: Tensor | None = None
    value_buffer: Tensor | None = None

    def __init__(self) -> None:
        self.is_initialized = False  # transformers' constructor assigns `keys` and `values`, too

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return None if self.key_buffer is None else self.key_buffer[:, :, : self.kept]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self.value_buffer is None else self.value_buffer[:, :, : self.kept]

    @property
    def kept(self) -> int:
        return self.seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.check_new_tokens(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.seen
        stop = start + key_states.shape[-2]
        self.key_buffer = keys = append(self.key_buffer, key_states, start)
        self.value_buffer = values = append(self.value_buffer, value_states, start)
        self.seen = stop  # last: another thread may read up to `seen`
        if start == 0:
            return key_states, value_states
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def exact_states(self, window: bool = False) -> tuple[Tensor | None, Tensor | None] | None:
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the buffers stay. As in transformers the number is negative; 0 does nothing."""
        change = int(tokens_to_remove)  # some versions of generate come with a tensor
        if not -self.seen <= change <= 0:
            raise ConfigError.of("tokens_to_remove", f"a number from -{self.seen} to 0", change, "crop(-n) removes the last n tokens.")
        self.seen += change

    def activate_past_recording(self) -> None:
        self.record_past = True  # cropping is exact at any time

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = super().export_state()
        buffers = {name: tensor[:, :, : self.kept] for name, tensor in tensors.items() if name in self.exact_tensors}
        return tensors | buffers, values


def append(buffer: Tensor | None, new: Tensor, start: int) -> Tensor:
    """Write `new` behind the first `start` slots of a buffer, (batch, kv_heads, capacity, head_dim), or of a larger one when it is full."""
    tokens = new.shape[-2]
    stop = start + tokens
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        # Graphs don't bear writing in place. Backward needs even keys without a gradient of their own, for that of the queries;
        # a compiled graph can't ask whether the buffer comes from inference mode, where it may not be written to later.
        return new if buffer is None else torch.cat([buffer[:, :, :start], new], dim=-2)
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    if buffer is None or stop > buffer.shape[-2] or frozen:
        larger = new.new_empty((*new.shape[:-2], capacity_for(stop), new.shape[-1]))
        larger[..., stop:, :].zero_()  # uninitialized memory may hold other data
        if buffer is not None:
            larger[:, :, :start] = buffer[:, :, :start]
        buffer = larger
    buffer.narrow(2, start, tokens).copy_(new)
    return buffer


def capacity_for(slots: int, reserve: int = 8) -> int:
    """How many slots a new buffer gets: room for one token more for each `reserve`, and for 64 at least."""
    return slots + max(64, slots // reserve)
