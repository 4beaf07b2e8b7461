"""Where the keys and values of slots lie: one buffer a row.

Other forms are subclasses: `Streamed` for a stream whose sinks follow it, `ragged.py` for heads of different lengths, `quantized.py`,
`coded.py`, `paged.py`, `latent.py`. They differ in how keys and values are encoded (`encode`, `decode`), and in where the result lies
(`raw`, `gather`, `hold`, `write`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self

import torch

from hf_kvcaches.core.layers import other_rows
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.arguments import Attended, RotationTables
from hf_kvcaches.kernels.launch import Backend

# Slots of every row and head: (batch, 1 or kv_heads, tokens).
Slots = torch.Tensor
# What is kept of tokens: (batch, kv_heads, tokens, any number) each.
Raw = tuple[torch.Tensor, ...]


class Flat:
    """Keys and values, (batch, kv_heads, slots, head_dim) each; what is empty is zeros. None before the first token.

    In all methods `used` is how many slots may hold a token, from the first on; `most` how many there may ever be; and `kept` how many of
    each row do hold one, (batch, 1 or kv_heads, 1).

    Attributes:
        names: The tensors of slots, in the order of what `encode` gives.
        exported: The tensors of rows in a file.
        parts: What else a copy has a copy of.
        in_graphs: Whether compiled graphs may write to it.
        no_gradients: Why there are no gradients, as a sentence; "" where there are.
        full: Whether every slot that a head has is known to hold a token, where heads differ.
        pooled: Whether slots share memory with other caches, so that there may be no room for a token.
    """

    names: ClassVar[tuple[str, ...]] = ("keys", "values")
    exported: ClassVar[tuple[str, ...]] = names
    parts: ClassVar[tuple[str, ...]] = ()
    in_graphs: ClassVar[bool] = True
    no_gradients: ClassVar[str] = ""
    full: bool = False
    pooled: bool = False
    keys: torch.Tensor = None  # type: ignore[assignment]
    values: torch.Tensor = None  # type: ignore[assignment]

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._bases: tuple[tuple[int, ...], torch.Tensor] | None = None

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
        """Within it there is memory for the new tokens of a pass: for all layers, or the first of them refuses and nothing has changed.

        Args:
            valid: True for real tokens, (batch, tokens), or None for all.
            block: How many of the tokens are one block.
            shared: Makes what the layers of a pass share, by name.
        """
        return nullcontext()

    def rewriting(self) -> AbstractContextManager[None]:
        """Within it there is memory to overwrite the slots of this layer and those behind it, or it refuses and nothing has changed."""
        return self.space_for(self.shape[0], 0, None, 1, lambda name, make: make())

    # How tokens are kept.

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Raw:
        """Keys and values as they are kept."""
        return keys, values

    def decode(self, raw: Raw) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, in the model's dtype, from what is kept of them."""
        keys, values = raw
        return keys, values

    # Where they are kept.

    def raw(self, used: int) -> Raw:
        """What is kept in the first slots."""
        return tuple(tensor[:, :, :used] for tensor in self._slots())

    def gather(self, slots: Slots) -> Raw:
        """Copies of what is kept in some slots."""
        return tuple(pick(tensor, slots) for tensor in self.raw(self.capacity))

    def hold(self, raw: Raw, most: int) -> None:
        """Make these the first slots, and all others empty."""
        # A budget may be far more than is ever needed; half as many again each time copies a token three times at most.
        slots = raw[0].shape[2]
        slots = max(slots, min(most, max(64, slots + slots // 2)))
        for name, tensor in zip(self.names, raw, strict=True):
            setattr(self, name, extended(tensor, slots))

    def write(self, slots: Slots, raw: Raw) -> None:
        """Overwrite slots, in one indexed write."""
        buffers = [getattr(self, name) for name in self.names]
        if buffers[0].is_cuda and len(raw) == 2 and not torch.compiler.is_compiling():
            kernels.write_slots(buffers[0], buffers[1], slots, raw[0], raw[1], backend=self.backend)
        elif slots.shape[:2] == (1, 1):
            for buffer, new in zip(buffers, raw, strict=True):
                buffer.index_copy_(2, slots.view(-1), new)
        else:
            index = self._flat_index(slots, buffers[0].shape)
            for buffer, new in zip(buffers, raw, strict=True):
                buffer.view(-1, buffer.shape[-1]).index_copy_(0, index, new.reshape(-1, new.shape[-1]))

    # What is made of these.

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first slots."""
        return self.keys[:, :, :used], self.values[:, :, :used]

    def rebuild(self, index: Slots | None, new: Raw | None, used: int, most: int) -> None:
        """Keep some of the tokens in slots and of new ones, in that order. What stays is not encoded again.

        Args:
            index: Of each slot to come, among the slots in use and the new tokens behind them; None: all.
            new: New tokens, as `encode` gave them.
        """
        raw = self.raw(used) if used else ()
        if new is not None:
            raw = tuple(torch.cat(parts, 2) for parts in zip(raw, new, strict=True)) if raw else new
        self.hold(raw if index is None else tuple(pick(tensor, index) for tensor in raw), most)

    def reserve(self, slots: int, most: int) -> None:
        """Make room for a number of slots."""
        if slots > self.capacity:
            for name, tensor in zip(self.names, self._slots(), strict=True):
                setattr(self, name, extended(tensor, max(slots, min(most, slots + slots // 2))))

    def attend(self, query: torch.Tensor, used: int, scaling: float, *, rotation: RotationTables | None = None, **options: Any) -> Attended:
        """Attention of one query a row over the first slots; arguments as in `slot_attention`."""
        keys, values = self.read(used)
        backend: Backend = "torch" if torch.compiler.is_compiling() else self.backend
        return kernels.slot_attention(query, keys, values, scaling, rotation=rotation, backend=backend, **options)

    # Memory and rows.

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, torch.Tensor)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace all tensors that belong to it alone; dimension 0 is the batch."""
        for name, tensor in Flat.tensors(self).items():
            setattr(self, name, function(tensor))
        self._bases = None

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Pick rows."""
        self.map(function)

    def clear(self) -> None:
        """Forget everything."""
        for name in self.tensors():
            setattr(self, name, None)
        self._bases = None

    def trim(self, kept: torch.Tensor) -> None:
        """Give memory back after tokens were dropped; one buffer a row has none to give."""

    def snapshot(self) -> dict[str, torch.Tensor]:
        """What `export` gives, as it is now; `restore` may be given it once."""
        return {name: tensor.clone() for name, tensor in self.export().items()}

    def export(self) -> dict[str, torch.Tensor]:
        """What a file holds: `exported`, or nothing."""
        return {name: tensor.contiguous() for name in self.exported if (tensor := getattr(self, name)) is not None}

    def restore(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor, most: int) -> None:
        """Take over what `export` gave, in place of all."""
        self.clear()
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def _slots(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.names]

    def _flat_index(self, slots: Slots, shape: torch.Size) -> torch.Tensor:
        """Slots as an index of rows of a contiguous buffer's last dimension."""
        key, graph = (*shape[:3], slots.device.index or 0), torch.compiler.is_compiling()
        bases = None if graph or self._bases is None or self._bases[0] != key else self._bases[1]
        if bases is None:
            bases = torch.arange(0, shape[:3].numel(), shape[2], device=slots.device).view(shape[0], shape[1], 1)
            self._bases = self._bases if graph else (key, bases)
        return (bases + slots).flatten()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        for name in self.parts:
            setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        Flat.map(copied, torch.clone)  # deepcopy refuses tensors that are part of an autograd graph
        return copied


class Streamed(Flat):
    """Slots of a stream: keys as the model rotated them, but for the sinks, which follow the newest token once another was evicted.

    Attributes:
        sink_keys: Keys of the sinks, in the first slots, as the model rotated them, (batch, kv_heads, sinks, head_dim); None until then.
        moved: Whether the slots hold them rotated.
    """

    sink_keys: torch.Tensor | None = None
    moved: bool = False

    def keep_sinks(self, sinks: int) -> None:
        """Keep the keys in the first slots as the model rotated them, unless that was done."""
        if self.sink_keys is None and self.keys is not None:
            self.sink_keys = self.keys[:, :, :sinks].clone()

    def follow(self, turn: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Rotate the sinks, or put them back."""
        if self.sink_keys is not None:
            self.keys[:, :, : self.sink_keys.shape[2]] = self.sink_keys if turn is None else turn(self.sink_keys)
            self.moved = turn is not None

    def export(self) -> dict[str, torch.Tensor]:
        return super().export() | ({} if self.sink_keys is None else {"sink_keys": self.sink_keys})


def read_decoded(storage: Flat, used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`read` of a storage that encodes, or whose slots lie elsewhere."""
    return storage.decode(storage.raw(used))


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
