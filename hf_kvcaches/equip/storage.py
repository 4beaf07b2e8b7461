"""Where the keys and values of slots lie: one buffer a row.

Other forms are subclasses. They differ in how keys and values are encoded (`encode`, `decode`: `quantized.py`, `coded.py`, `latent.py`), or
in where the result lies (`held`, `gather`, `hold`, `write`: `ragged.py`, `pages.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch

from hf_kvcaches.core.layers import other_rows
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.arguments import Attended
from hf_kvcaches.kernels.launch import Backend

# Slots of every row and head: (batch, 1 or kv_heads, tokens).
Slots = torch.Tensor
# What is kept of tokens: (batch, kv_heads, tokens, any number) each.
Raw = tuple[torch.Tensor, ...]


class Flat:
    """Keys and values, (batch, kv_heads, slots, head_dim) each; what is empty is zeros. None before the first token.

    In all methods `used` is how many slots may hold a token, from the first on; `most` how many there may ever be; and `kept` how many of
    each row do hold one, (batch, 1 or kv_heads, 1).
    """

    names: ClassVar[tuple[str, ...]] = ("keys", "values")  # the tensors of slots, in the order of what `encode` gives
    beside: ClassVar[tuple[str, ...]] = ()  # tensors of rows that it has besides
    in_graphs: ClassVar[bool] = True  # whether compiled graphs may write to it
    no_gradients: ClassVar[str] = ""  # why there are no gradients, as a sentence; "" where there are
    full: bool = False  # whether every slot that a head has is known to hold a token, where heads differ
    pooled: ClassVar[bool] = False  # whether slots share memory with other caches, so that there may be no room for a token
    keys: torch.Tensor = None  # type: ignore[assignment]
    values: torch.Tensor = None  # type: ignore[assignment]

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def capacity(self) -> int:
        """How many slots there are by now."""
        first = getattr(self, self.names[0])
        return 0 if first is None else first.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and KV heads; zeros before the first token."""
        return (0, 0) if self.keys is None else (self.keys.shape[0], self.keys.shape[1])

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse new tokens that can't follow those in the store, (batch, kv_heads, tokens, head_dim)."""
        rows, dtype = self.shape[0], keys.dtype if self.keys is None else self.keys.dtype
        if rows not in (0, keys.shape[0]) or (rows and not dtype == keys.dtype == values.dtype):
            raise other_rows(rows, dtype, keys)

    def prepare(self, keys: torch.Tensor, real: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Look at the keys of a block before they are encoded; `real` is True for tokens, (batch, 1 or kv_heads, tokens)."""

    def space_for(
        self, rows: int, tokens: int, valid: torch.Tensor | None, block: int, shared: Callable[..., Any]
    ) -> AbstractContextManager[None]:
        """Within it there is memory for the new tokens of a pass, of which the first are a block, and those that are `valid` count.

        It is there for all layers, or the first of them refuses and nothing has changed. `shared` makes what layers share, by name.
        """
        return nullcontext()

    def rewriting(self) -> AbstractContextManager[None]:
        """Within it there is memory to overwrite the slots of this layer and those behind it, or it refuses and nothing has changed."""
        return self.space_for(self.shape[0], 0, None, 1, lambda name, make: make())

    # How tokens are kept, and where.

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Raw:
        """Keys and values as they are kept."""
        return keys, values

    def decode(self, raw: Raw) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, in the model's dtype, from what is kept of them."""
        keys, values = raw
        return keys, values

    def held(self, used: int) -> Raw:
        """What is kept in the first slots, by `names`."""
        return tuple(tensor[:, :, :used] for tensor in self._slots())

    def gather(self, slots: Slots) -> Raw:
        """Copies of what is kept in some slots."""
        return tuple(pick(tensor, slots) for tensor in self.held(self.capacity))

    def hold(self, raw: Raw, most: int) -> None:
        """Make these the first slots, and all others empty."""
        # A budget may be far more than is ever needed; half as many again each time copies a token three times at most.
        slots = raw[0].shape[2]
        slots = max(slots, min(most, max(64, slots + slots // 2)))
        for name, tensor in zip(self.names, raw, strict=True):
            setattr(self, name, extended(tensor, slots))

    def write(self, slots: Slots, raw: Raw) -> None:
        """Overwrite slots, in one indexed write."""
        buffers, graph = [getattr(self, name) for name in self.names], torch.compiler.is_compiling()
        if buffers[0].is_cuda and len(raw) == 2 and not graph:
            kernels.write_slots(buffers[0], buffers[1], slots, raw[0], raw[1], backend=self.backend)
        elif slots.shape[:2] == (1, 1):
            for buffer, new in zip(buffers, raw, strict=True):
                buffer.index_copy_(2, slots.view(-1), new)
        else:
            index = ((starts.__wrapped__ if graph else starts)(*buffers[0].shape[:3], slots.device) + slots).flatten()
            for buffer, new in zip(buffers, raw, strict=True):
                buffer.view(-1, buffer.shape[-1]).index_copy_(0, index, new.reshape(-1, new.shape[-1]))

    # What is made of these.

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first slots."""
        return self.keys[:, :, :used], self.values[:, :, :used]

    def rebuild(self, index: Slots | None, new: Raw | None, used: int, most: int) -> None:
        """Keep some of the tokens in slots and of new, encoded ones behind these, by their index; None: all. No slot is encoded again."""
        raw = self.held(used) if used else ()
        if new is not None:
            raw = tuple(torch.cat(parts, 2) for parts in zip(raw, new, strict=True)) if raw else new
        self.hold(raw if index is None else tuple(pick(tensor, index) for tensor in raw), most)

    def reserve(self, slots: int, most: int) -> None:
        """Make room for a number of slots."""
        if slots > self.capacity:
            for name in self.names:
                setattr(self, name, extended(getattr(self, name), max(slots, min(most, slots + slots // 2))))

    def attend(self, query: torch.Tensor, used: int, scaling: float, **options: Any) -> Attended:
        """Attention of one query a row over the first slots; options as in `slot_attention`."""
        backend: Backend = "torch" if torch.compiler.is_compiling() else self.backend
        return kernels.slot_attention(query, *self.read(used), scaling, backend=backend, **options)

    # Memory and rows.

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, torch.Tensor)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace all tensors that belong to it alone; dimension 0 is the batch."""
        for name, tensor in Flat.tensors(self).items():
            setattr(self, name, function(tensor))

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.map(function)

    def clear(self) -> None:
        for name in Flat.tensors(self):
            setattr(self, name, None)

    def trim(self, kept: torch.Tensor) -> None:
        """Give memory back after tokens were dropped; one buffer a row has none to give."""

    def export(self) -> dict[str, torch.Tensor]:
        """What a file holds: all of `names` and `beside`, or nothing."""
        return {name: tensor.contiguous() for name in (*self.names, *self.beside) if (tensor := getattr(self, name)) is not None}

    def restore(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor, most: int) -> None:
        """Take over what `export` gave, in place of all."""
        self.clear()
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def _slots(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.names]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        Flat.map(copied, torch.clone)  # deepcopy refuses tensors that are part of an autograd graph
        return copied


def read_decoded(storage: Flat, used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`read` of a storage that encodes, or whose slots lie elsewhere."""
    return storage.decode(storage.held(used))


@lru_cache(maxsize=16)
def starts(batch: int, heads: int, slots: int, device: torch.device) -> torch.Tensor:
    """The number of each head's first slot among those of all rows and heads, (batch, heads, 1)."""
    with torch.inference_mode(False):
        return torch.arange(0, batch * heads * slots, slots, device=device).view(batch, heads, 1)


def extended(tensor: torch.Tensor, slots: int) -> torch.Tensor:
    """A buffer that begins with a tensor's slots; the others are zeros, because what is masked is still multiplied by zero."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return torch.nn.functional.pad(tensor, (0, 0, 0, slots - tensor.shape[2])).contiguous()
    buffer = tensor.new_zeros((*tensor.shape[:2], slots, tensor.shape[-1]))
    buffer[:, :, : tensor.shape[2]] = tensor
    return buffer


def pick(tensor: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Copies of what is in some slots, (batch, kv_heads, tokens, width)."""
    row, head = (torch.arange(size, device=tensor.device) for size in tensor.shape[:2])
    return tensor[row[:, None, None], head[:, None], slots]  # in rows: `gather` would look up each number
