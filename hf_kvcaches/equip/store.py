"""Where the keys and values of slots lie: one buffer a row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from hf_kvcaches.equip.rotation import RotatingPass, SlotRotation, swap_pairs
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.arguments import RotationTables
from hf_kvcaches.kernels.launch import Backend

# How many keys a processor rotates at a time.
_PIECE = 4096
# Slots of every row and head: (batch, 1 or kv_heads, tokens).
Slots = torch.Tensor


class FlatStore:
    """Keys and values of slots, (batch, kv_heads, slots, head_dim) each; what is empty is zeros.

    Args:
        rotation: How keys are rotated.
        backend: Of the kernels.
    """

    in_graphs = True
    """Whether compiled graphs may write to it."""
    per_slot: tuple[str, ...] = ("keys", "values")
    """The tensors of slots, in the order of what `encode` gives, (batch, kv_heads, slots, any number) each."""
    exported: tuple[str, ...] = per_slot
    """The tensors that `export` gives."""

    def __init__(self, rotation: SlotRotation, backend: Backend) -> None:
        self.rotation, self.backend = rotation, backend
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """How many slots there are by now."""
        tensor = self._slots()[0]
        return 0 if tensor is None else tensor.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and KV heads; zeros before the first token."""
        return (0, 0) if self.keys is None else (self.keys.shape[0], self.keys.shape[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, torch.Tensor)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces all tensors; dimension 0 is the batch."""
        for name, tensor in self.tensors().items():
            setattr(self, name, function(tensor))

    def own(self, owned: Callable[[torch.Tensor], torch.Tensor], needs_graph: bool) -> None:
        """Makes sure that tensors may be written in place.

        Args:
            owned: Clones a tensor where that is needed.
            needs_graph: Whether an autograd graph holds on to what is there.
        """
        self.map(owned)

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Picks rows."""
        self.map(function)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuses new tokens that can't follow those in the store, (batch, kv_heads, tokens, head_dim)."""
        for old, new in ((self.keys, keys), (self.values, values)):
            if old is not None and (self.shape[0] != new.shape[0] or old.dtype != new.dtype):
                raise wrong_rows(self.shape[0], old.dtype, new)

    def space_for(self, rows: int, running: RotatingPass, block: int) -> AbstractContextManager[None]:
        """Within it there is memory for the new tokens of a pass: for all layers, or the first of them refuses and nothing has changed.

        Args:
            block: How many of the tokens are one block.
        """
        return nullcontext()

    def clear(self) -> None:
        """Forgets everything."""
        self.map(lambda tensor: None)  # type: ignore[arg-type,return-value]

    def install(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, most: int, source: torch.Tensor | None = None) -> None:
        """Makes these the first slots, and all others empty.

        Args:
            keys: (batch, kv_heads, slots in use, head_dim).
            kept: How many of these hold a token, the first ones, (batch, 1 or kv_heads, 1).
            most: How many slots there may ever be.
            source: The slots that they were read from, (batch, 1 or kv_heads, slots in use); -1 for new tokens. None: all are new.
        """
        self.fill(self.encode(keys, values), kept, most)

    def fill(self, tensors: Sequence[torch.Tensor], kept: torch.Tensor, most: int) -> None:
        """Makes what `encode` gave the first slots, and all others empty; arguments as in `install`."""
        self.hold(tensors, room_for(tensors[0].shape[2], most))

    def hold(self, tensors: Sequence[torch.Tensor], slots: int) -> None:
        """Makes what `encode` gave the first of so many slots."""
        for name, tensor in zip(self.per_slot, tensors, strict=True):
            setattr(self, name, extended(tensor, slots))

    def reserve(self, slots: int, most: int) -> None:
        """Makes room for a number of slots, of at most `most`."""
        if slots > self.capacity:
            self.hold(self._slots(), room_for(slots, most))

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first slots, as they are kept."""
        keys, values = self.encoded(used)[:2]
        return keys, values

    def encoded(self, used: int) -> tuple[torch.Tensor, ...]:
        """What is in the first slots, as `encode` gives it."""
        return tuple(tensor[:, :, :used] for tensor in self._slots())

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values as they are kept, (batch, kv_heads, tokens, any number) each."""
        return keys, values

    def at(self, slots: Slots) -> tuple[torch.Tensor, ...]:
        """Copies of what is in some slots, as `encode` gives it."""
        return tuple(in_slots(tensor, slots) for tensor in self._slots())

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        """Overwrites slots, in one indexed write.

        Args:
            *states: What `encode` or `at` gave.
        """
        keys, values = states
        assert self.keys is not None
        assert self.values is not None
        backend: Backend = "torch" if torch.compiler.is_compiling() else self.backend
        kernels.write_slots(self.keys, self.values, slots, keys, values, backend=backend)

    def rotate_down(self, which: torch.Tensor) -> None:
        """Rotates keys back by one position.

        Args:
            which: True for those, (batch, 1 or kv_heads, slots).
        """
        assert self.keys is not None
        keys = self.keys = self.keys.contiguous()
        which = torch.nn.functional.pad(which, (0, self.capacity - which.shape[-1])).expand(keys.shape[:3])
        # Whole tokens of one long list: several times faster than an index for rows, heads and slots each.
        self.rotate_tokens_down(keys.view(-1, keys.shape[-1]), which.flatten().nonzero()[:, 0])

    def rotate_tokens_down(self, keys: torch.Tensor, index: torch.Tensor) -> None:
        """Rotates some of the keys in a list, (tokens, head_dim), back by one position."""
        rotate = self.rotation.down_by_one(keys.device)
        # Pieces stay in a processor's cache.
        for part in index.split(_PIECE if keys.device.type == "cpu" else max(1, len(index))):
            keys.index_copy_(0, part, rotate(keys.index_select(0, part)[None, None])[0, 0])

    def attend(
        self, query: torch.Tensor, used: int, scaling: float, *, ranks: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one query a row over the first slots.

        Args:
            query: (batch, heads, 1, head_dim).
            ranks: To which position to rotate each key, (batch or 1, 1 or kv_heads, slots); None for keys that are rotated.
            **options: As in `slot_attention`.
        """
        keys, values = self.read(used)
        tables = None if ranks is None else self.tables(ranks)
        backend: Backend = "torch" if torch.compiler.is_compiling() else self.backend
        return kernels.slot_attention(query, keys, values, scaling, rotation=tables, backend=backend, check=False, **options)

    def tables(self, ranks: torch.Tensor) -> RotationTables:
        """Rotations to ranks, which are below the number of slots, as kernels take them."""
        table = self.rotation.table(self.capacity, ranks.device)
        return RotationTables(ranks, *table.halves(), table.layout)

    def export(self) -> dict[str, torch.Tensor]:
        """What a file holds."""
        return self.tensors()

    def take(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None, most: int) -> None:
        """Takes over what `export` gave.

        Args:
            kept: How many slots of each row are in use, (batch, 1 or kv_heads, 1).
            most: How many slots there may ever be.
        """
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def snapshot(self) -> Any:
        """All that it holds, as it is now; `restore` may be given it once."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def restore(self, snapshot: Any) -> None:
        """Goes back to a snapshot."""
        self.clear()
        for name, tensor in snapshot.items():
            setattr(self, name, tensor)

    def trim(self, kept: torch.Tensor | None) -> None:
        """Gives memory back after tokens were dropped; one buffer a row has none to give.

        Args:
            kept: How many slots of each row are in use, the first ones, (batch, 1 or kv_heads, 1), or None where there are no rows.
        """

    def _slots(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.per_slot]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.map(torch.clone)  # deepcopy refuses tensors that are part of an autograd graph
        return copied


class RotatedKeysStore(FlatStore):
    """Beside each key the key with the dimensions of each pair exchanged: the paper's second cache.

    A rotated key is `key * cos + swapped * sin`, so that reading rotates without a permutation, for half as much memory again.
    """

    in_graphs = False
    per_slot = exported = ("keys", "values", "swapped")

    def __init__(self, rotation: SlotRotation, backend: Backend) -> None:
        super().__init__(rotation, backend)
        self.swapped: torch.Tensor | None = None

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        geometry = self.rotation.geometry
        assert geometry is not None
        return keys, values, swap_pairs(keys[..., : geometry.rotary_dim], geometry.layout)

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        kernels.put_in_slots(self._slots(), slots, states)

    def attend(
        self, query: torch.Tensor, used: int, scaling: float, *, ranks: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert ranks is not None
        assert self.swapped is not None
        keys, values = self.read(used)
        table = self.rotation.table(self.capacity, ranks.device)[ranks]
        rotary = table.cos.shape[-1]
        rotated = torch.addcmul(keys[..., :rotary] * table.cos, self.swapped[:, :, :used], table.sin).to(keys.dtype)
        keys = rotated if rotary == keys.shape[-1] else torch.cat([rotated, keys[..., rotary:]], -1)
        return kernels.slot_attention(query, keys, values, scaling, backend=self.backend, check=False, **options)


def wrong_rows(rows: int, dtype: torch.dtype | None, new: torch.Tensor) -> ConfigError:
    """The error for new tokens of another batch or dtype."""
    return ConfigError(
        f"The cache holds {rows} rows of {dtype}, and the model came with {new.shape[0]} rows of {new.dtype}. "
        "Use a new cache, or reset() this one; batch_repeat_interleave and batch_select_indices change its rows."
    )


def room_for(slots: int, most: int) -> int:
    """How many slots to make room for, of at most `most`."""
    # A budget may be far more than is ever needed; half as many again each time copies a token three times at most.
    return max(slots, min(most, max(64, slots + slots // 2)))


def extended(tensor: torch.Tensor, slots: int) -> torch.Tensor:
    """A buffer that begins with a tensor's slots; the others are zeros, because what is masked is still multiplied by zero."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return torch.nn.functional.pad(tensor, (0, 0, 0, slots - tensor.shape[2]))
    buffer = tensor.new_zeros((*tensor.shape[:2], slots, tensor.shape[-1]))
    buffer[:, :, : tensor.shape[2]] = tensor
    return buffer


def in_slots(tensor: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Copies of what is in some slots, (batch, kv_heads, tokens, width)."""
    batch, heads, _, width = tensor.shape
    if torch.is_grad_enabled() and tensor.requires_grad:
        tensor = tensor.clone()  # the gradient of `gather` looks at all of it, and slots are overwritten before that
    return tensor.gather(2, slots[..., None].expand(batch, heads, slots.shape[-1], width))
