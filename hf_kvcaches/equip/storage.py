"""Where slots lie: one buffer a row."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hf_kvcaches.core.layers import TensorLayer
from hf_kvcaches.equip.frames import Frames, swap_pairs
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.launch import Backend


class SlotStorage(TensorLayer):
    """Reads and writes slots; knows nothing of who belongs there.

    A slot is an int where it is the same for all rows and heads, else (batch, 1 or kv_heads, 1).

    Attributes:
        frames: How keys are rotated. With `"rotated_keys"` the other half of the rotation is kept too.
        slots: How many there may be.
        backend: Of the kernels.
    """

    has_buffer: ClassVar[bool] = True

    frames: Frames
    slots: int
    backend: Backend
    swapped: torch.Tensor | None

    @property
    def capacity(self) -> int:
        """How many slots there are by now."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def rows(self) -> int:
        """How many sequences; 0 before the first token."""
        return 0 if self.keys is None else self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        """How many heads the keys have; 0 before the first token."""
        return 0 if self.keys is None else self.keys.shape[1]

    @property
    def held_on(self) -> torch.device:
        """Where the slots are."""
        assert self.keys is not None
        return self.keys.device

    def install(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> None:
        """Makes these the first slots, and all others empty.

        Args:
            keys: (batch, kv_heads, slots in use, head_dim).
            kept: How many of these hold a token, the first ones, (batch, 1 or kv_heads, 1).
        """
        self.keys = self.values = None
        self.swapped = None
        room = self._room(keys.shape[2])
        self.keys, self.values = _extended(keys, room), _extended(values, room)
        if self.frames.scheme == "rotated_keys":
            self.swapped = _extended(self._swap(keys), room)

    def reserve(self, used: int) -> None:
        """Makes room for a number of slots.

        Args:
            used: At most `slots`.
        """
        if used <= self.capacity:
            return
        room = self._room(used)
        for name in ("keys", "values", "swapped"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, _extended(held, room))

    def _room(self, used: int) -> int:
        # A budget may be far more than is ever needed; half as many again each time copies a token three times at most.
        return min(self.slots, max(64, used + used // 2))

    def own(self, needs_graph: bool) -> None:
        """Makes sure that slots may be written in place: not where a graph or inference mode holds on to them."""
        self.leave_inference_mode()
        for name in self.row_tensors if needs_graph else ():
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.clone())

    def snapshot(self) -> dict[str, Any]:
        """All that belongs to the sequence, as it is now."""
        tensors = {name: getattr(self, name) for name in self.row_tensors}
        copies = {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}
        return copies | {name: getattr(self, name) for name in self.counters} | {"is_initialized": self.is_initialized}

    def restore(self, before: dict[str, Any]) -> None:
        """Goes back to a snapshot."""
        for name, value in before.items():
            setattr(self, name, value)

    def recount(self) -> None:
        """Gives memory back after tokens were dropped outside of a forward pass; one buffer a row has none to give."""

    def held(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first slots, as they are kept."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, :used], self.values[:, :, :used]

    def held_swapped(self, used: int) -> torch.Tensor:
        """The keys with the dimensions of each pair exchanged: kept, as in the paper."""
        assert self.swapped is not None
        return self.swapped[:, :, :used]

    def write(self, slot: int | torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrites one slot a row and head.

        Args:
            keys: (batch, kv_heads, 1, head_dim).
        """
        assert self.keys is not None
        assert self.values is not None
        if isinstance(slot, int):
            self.keys.narrow(2, slot, 1).copy_(keys)
            self.values.narrow(2, slot, 1).copy_(values)
            if self.swapped is not None:
                self.swapped.narrow(2, slot, 1).copy_(self._swap(keys))
            return
        kernels.write_slots(self.keys, self.values, slot, keys, values, backend=self.backend)
        if self.swapped is not None:
            index = slot[..., None].expand(*keys.shape[:2], 1, self.swapped.shape[-1])
            self.swapped.scatter_(2, index, self._swap(keys))

    def write_span(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrites neighbouring slots, the same in all rows and heads.

        Args:
            keys: (batch, kv_heads, tokens, head_dim).
        """
        assert self.keys is not None
        assert self.values is not None
        self.keys.narrow(2, start, keys.shape[2]).copy_(keys)
        self.values.narrow(2, start, keys.shape[2]).copy_(values)
        if self.swapped is not None:
            self.swapped.narrow(2, start, keys.shape[2]).copy_(self._swap(keys))

    def write_many(self, to: tuple[torch.Tensor, ...], keys: torch.Tensor, values: torch.Tensor, source: tuple[torch.Tensor, ...]) -> None:
        """Overwrites slots wherever they are, in one indexed write.

        Args:
            to: Rows, heads and slots, each of one shape.
            keys: (batch, kv_heads, tokens, head_dim).
        """
        assert self.keys is not None
        assert self.values is not None
        self.keys[to], self.values[to] = keys[source], values[source]
        if self.swapped is not None:
            self.swapped[to] = self._swap(keys[source])

    def turn_many(self, delta: torch.Tensor) -> None:
        """Turns keys where they are.

        Args:
            delta: By how many positions, (batch, 1 or kv_heads, slots); most are 0.
        """
        assert self.keys is not None
        delta = delta.expand(self.keys.shape[0], self.keys.shape[1], -1)
        which = delta.nonzero(as_tuple=True)
        if which[0].numel():
            turn = self.frames.by(delta[which][None, None])
            self.keys[which] = turn(self.keys[which][None, None])[0, 0]

    def keys_at(self, index: torch.Tensor) -> torch.Tensor:
        """The keys in one slot a row and head, (batch, kv_heads, 1, head_dim).

        Args:
            index: (batch, 1 or kv_heads, 1).
        """
        assert self.keys is not None
        return _at(self.keys, index)

    def values_at(self, index: torch.Tensor) -> torch.Tensor:
        """The values in one slot a row and head.

        Args:
            index: (batch, 1 or kv_heads, 1).
        """
        assert self.values is not None
        return _at(self.values, index)

    def write_keys(self, index: torch.Tensor, keys: torch.Tensor) -> None:
        """Overwrites the keys of one slot a row and head.

        Args:
            index: (batch, 1 or kv_heads, 1).
            keys: (batch, kv_heads, 1, head_dim).
        """
        assert self.keys is not None
        self.keys.scatter_(2, index[..., None].expand_as(keys), keys)

    def turn_back(self, which: torch.Tensor, start: int = 0) -> None:
        """Turns keys back by one position.

        Args:
            which: True for those, (batch, 1 or kv_heads, slots).
        """
        assert self.keys is not None
        if not self.keys.is_contiguous():
            self.keys = self.keys.contiguous()
        batch, heads, capacity, width = self.keys.shape
        # Whole tokens of a list of all: several times faster than an index for rows, heads and slots each.
        numbers = self.frames.numbers(batch * heads, capacity, start, which.shape[-1], self.keys.device)
        tokens = numbers[which.expand(batch, heads, -1).flatten()]
        if tokens.numel():
            keys = self.keys.view(-1, width)
            keys.index_copy_(0, tokens, self.frames.back(keys.device)(keys.index_select(0, tokens)[None, None])[0, 0])

    def token_at(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values in one slot, the same everywhere, (batch, kv_heads, 1, head_dim) each."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys.narrow(2, slot, 1).clone(), self.values.narrow(2, slot, 1).clone()

    def replace_keys(self, keys: torch.Tensor) -> None:
        """Overwrites the keys of the first slots.

        Args:
            keys: (batch, kv_heads, slots, head_dim).
        """
        assert self.keys is not None
        self.keys[:, :, : keys.shape[2]] = keys

    def attend_slots(
        self, query: torch.Tensor, used: int, scaling: float, *, ranks: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one query a row over the first slots.

        Args:
            query: (batch, heads, 1, head_dim).
            ranks: To which position to rotate each key, (batch or 1, 1 or kv_heads, slots); None for keys that are rotated.
        """
        keys, values = self.held(used)
        turn = None
        if ranks is not None:
            table = self.frames.table(self.slots, query.device)
            if self.frames.scheme != "rotated_keys":
                turn = kernels.RotationTables(ranks, *table.halves(), table.layout)
            else:
                rotary = table.cos.shape[-1]
                turned = torch.addcmul(keys[..., :rotary] * table.cos[ranks], self.held_swapped(used), table.sin[ranks]).to(keys.dtype)
                keys = turned if rotary == keys.shape[-1] else torch.cat([turned, keys[..., rotary:]], -1)
        return kernels.slot_attention(query, keys, values, scaling, rotation=turn, backend=self.backend, check=False, **options)

    def _swap(self, keys: torch.Tensor) -> torch.Tensor:
        geometry = self.frames.geometry
        assert geometry is not None
        return swap_pairs(keys[..., : geometry.rotary_dim], geometry.layout)


def _extended(tensor: torch.Tensor, slots: int) -> torch.Tensor:
    """A buffer that begins with a tensor's slots; the others are zeros, because what is masked is still multiplied by zero."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return torch.nn.functional.pad(tensor, (0, 0, 0, slots - tensor.shape[2]))
    buffer = tensor.new_zeros((*tensor.shape[:2], slots, tensor.shape[-1]))
    buffer[:, :, : tensor.shape[2]] = tensor
    return buffer


def _at(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    batch, heads, _, width = tensor.shape
    if torch.is_grad_enabled() and tensor.requires_grad:
        tensor = tensor.clone()  # the gradient of `gather` looks at all of it, and slots are overwritten before that
    return tensor.gather(2, index[..., None].expand(batch, heads, 1, width))
