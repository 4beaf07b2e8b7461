"""Where slots lie when heads have different numbers of them: one behind the other, without gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from hf_kvcaches.equip.storage import Flat, Raw, Slots, extended, read_decoded
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.arguments import Attended, RotationTables
from hf_kvcaches.kernels.launch import Backend, choose


class Ragged(Flat):
    """`keys` and `values` are (slots of all rows and heads, width): those of row 0 and head 0, then of row 0 and head 1, and so on.

    Triton reads them where they lie, as pages of one slot. Elsewhere, and wherever keys of a whole layer are asked for, the heads are
    copied into one padded tensor for as long as a layer takes.

    Attributes:
        rooms: How many slots each head has, (batch, kv_heads, 1), int64. They stay as they are until `clear`.
        starts: Where the first one lies, like `rooms`.
        index: Where each slot lies, (batch, kv_heads, capacity), int32; a slot that a head lacks is some other one.
    """

    exported = ("keys", "values", "rooms")
    no_gradients = "head_budgets: there are no gradients. Run the model under torch.no_grad(), or pass head_budgets=None."

    read = read_decoded

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.rooms, self.starts, self.index = (torch.zeros(0, 0, size, dtype=torch.long) for size in (1, 1, 0))

    @classmethod
    def of(cls, raw: Raw, rooms: torch.Tensor, backend: Backend) -> Self:
        """Heads with `rooms` slots each, the first of which are those of padded heads, (batch, kv_heads, slots, width)."""
        (storage := cls(backend))._fill(raw, rooms)
        return storage

    @property
    def capacity(self) -> int:
        return self.index.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        return self.index.shape[0], self.index.shape[1]

    def raw(self, used: int) -> Raw:
        return self._at(self.index[..., :used])

    def gather(self, slots: Slots) -> Raw:
        return self._at(self.starts + slots)

    def hold(self, raw: Raw, most: int) -> None:
        self._fill(raw, self.rooms)

    def write(self, slots: Slots, raw: Raw) -> None:
        index = (self.starts + slots).flatten()
        for tensor, new in zip(self._slots(), raw, strict=True):
            tensor.index_copy_(0, index, new.reshape(-1, new.shape[-1]))

    def reserve(self, slots: int, most: int) -> None:
        """Nothing: all slots are there from the start."""

    def attend(self, query: torch.Tensor, used: int, scaling: float, *, rotation: RotationTables | None = None, **options: Any) -> Attended:
        keys, values = self._slots()
        # The kernel has one learned sink for each query head of a row, and here each head is a row.
        by_head = query.is_cuda and options.get("sink_logits") is None and not torch.compiler.is_compiling()
        if not by_head or choose(self.backend, query, keys) != "triton":
            return super().attend(query, used, scaling, rotation=rotation, **options)
        index, dim, options["rotation"] = self.index[..., :used], query.shape[-1], rotation
        count, group = index.shape[:2].numel(), query.shape[1] // index.shape[1]
        valid = options.pop("valid", None)
        valid = torch.arange(used, device=query.device) < self.rooms if valid is None else valid
        options["valid"] = valid.expand(index.shape).reshape(count, 1, used)
        if rotation is not None:
            options["rotation"] = rotation._replace(positions=rotation.positions.expand(index.shape).reshape(count, 1, used))
        if (leading := options.pop("leading_query", None)) is not None:
            options["leading_query"] = leading.reshape(count, group, 1, dim)
        keys, values = (tensor.view(-1, 1, 1, tensor.shape[-1]) for tensor in (keys, values))
        near, tables = query.reshape(count, group, 1, dim), index.reshape(count, used)
        output, weights = kernels.paged_attention(near, keys, values, tables, scaling, backend="triton", check=False, **options)
        return output.view(len(query), 1, query.shape[1], -1), None if weights is None else weights.view(index.shape)

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.keys is not None:
            self._fill(tuple(function(tensor) for tensor in self.raw(self.capacity)), function(self.rooms))

    def take(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None, most: int) -> None:
        super().take(tensors, kept, most)
        self._lay_out(self.rooms)

    def clear(self) -> None:
        Ragged.__init__(self, self.backend)

    def _at(self, index: torch.Tensor) -> Raw:
        return tuple(tensor.index_select(0, index.flatten()).view(*index.shape, -1) for tensor in self._slots())

    def _lay_out(self, rooms: torch.Tensor) -> tuple[int, int]:
        """Find where heads with so many slots lie; return how many slots the longest has, and all."""
        capacity, total = torch.stack([rooms.max(), rooms.sum()]).tolist()
        self.rooms, self.starts = rooms, rooms.flatten().cumsum(0).view(rooms.shape) - rooms
        self.index = (self.starts + torch.arange(capacity, device=rooms.device).minimum(rooms - 1)).clamp(min=0).int()
        return capacity, total

    def _fill(self, raw: Raw, rooms: torch.Tensor) -> None:
        """Give heads so many slots, the first ones from padded heads, all others empty."""
        capacity, total = self._lay_out(rooms)
        width = max(capacity, raw[0].shape[2])
        head = torch.arange(rooms.numel(), device=rooms.device).repeat_interleave(rooms.flatten(), output_size=total)
        source = head * width + torch.arange(total, device=rooms.device) - self.starts.flatten()[head]
        for name, tensor in zip(self.names, raw, strict=True):
            setattr(self, name, extended(tensor, width).flatten(0, 2).index_select(0, source))
