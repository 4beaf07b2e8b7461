"""Where slots lie when heads have different numbers of them: one behind the other, without gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

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
        hiding: 0 for slots that a head has, and the lowest number for others, (batch * kv_heads, 1, capacity), in the dtype of keys.
    """

    exported: ClassVar[tuple[str, ...]] = ("keys", "values", "rooms")
    no_gradients = "head_budgets: there are no gradients. Run the model under torch.no_grad(), or pass head_budgets=None."

    read = read_decoded

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.hiding: torch.Tensor = None  # type: ignore[assignment]
        self._lay_out_nothing()

    def find_full(self, kept: torch.Tensor) -> None:
        """Find out whether every slot that a head has holds a token, of which it keeps so many, (batch, kv_heads, 1)."""
        if bool((kept == self.rooms).all()):
            missing = torch.arange(self.index.shape[2], device=kept.device) >= self.rooms
            lowest = torch.finfo(self.keys.dtype).min
            self.hiding, self.full = self.keys.new_zeros(missing.shape).masked_fill_(missing, lowest).flatten(0, 1)[:, None], True

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
        """Make these the first slots of padded heads, (batch, kv_heads, slots, width), and all others empty."""
        self.full, width = False, max(self.index.shape[2], raw[0].shape[2])
        head = torch.arange(self.rooms.numel(), device=self.rooms.device).repeat_interleave(self.rooms.flatten(), output_size=self.total)
        source = head * width + torch.arange(self.total, device=head.device) - self.starts.flatten()[head]
        for name, tensor in zip(self.names, raw, strict=True):
            setattr(self, name, extended(tensor, width).flatten(0, 2).index_select(0, source))

    def write(self, slots: Slots, raw: Raw) -> None:
        index = (self.starts + slots).flatten()
        for tensor, new in zip(self._slots(), raw, strict=True):
            tensor.index_copy_(0, index, new.reshape(-1, new.shape[-1]))

    def reserve(self, slots: int, most: int) -> None:
        """Nothing: all slots are there from the start."""

    def attend(
        self,
        query: torch.Tensor,
        used: int,
        scaling: float,
        *,
        rotation: RotationTables | None = None,
        valid: torch.Tensor | None = None,
        **options: Any,
    ) -> Attended:
        keys, values = self._slots()
        # The kernel has one learned sink for each query head of a row, here each head is a row; and it has no bias.
        by_head = query.is_cuda and options.get("sink_logits") is None and options.get("bias") is None and not torch.compiler.is_compiling()
        in_kernel = by_head and choose(self.backend, query, keys) == "triton"
        if valid is None and not in_kernel and all(value is None or value is False for value in options.values()):
            return self._attend_full(query, scaling, rotation), None
        valid = torch.arange(used, device=query.device) < self.rooms if valid is None else valid
        if not in_kernel:
            return super().attend(query, used, scaling, rotation=rotation, valid=valid, **options)
        index, dim = self.index[..., :used], query.shape[-1]
        count, group = index.shape[:2].numel(), query.shape[1] // index.shape[1]
        valid = valid.expand(index.shape).reshape(count, 1, used)
        if rotation is not None:
            rotation = rotation._replace(positions=rotation.positions.expand(index.shape).reshape(count, 1, used))
        keys, values = (tensor.view(-1, 1, 1, tensor.shape[-1]) for tensor in (keys, values))
        near, tables = query.reshape(count, group, 1, dim), index.reshape(count, used)
        output, weights = kernels.slot_attention(
            near, keys, values, scaling, tables=tables, rotation=rotation, valid=valid, backend="triton", **options
        )
        return output.view(len(query), 1, query.shape[1], -1), None if weights is None else weights.view(index.shape)

    def _attend_full(self, query: torch.Tensor, scaling: float, rotation: RotationTables | None) -> torch.Tensor:
        """Attention where slots that a head lacks are the only ones that are hidden, (batch, 1, heads, value_dim)."""
        keys, values = self.raw(self.capacity)
        keys = keys if rotation is None else kernels.rotated_keys(keys, rotation).to(query.dtype)
        near = query.reshape(keys.shape[0] * keys.shape[1], -1, query.shape[-1])
        scores = torch.baddbmm(self.hiding, near, keys.flatten(0, 1).mT, alpha=scaling)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(len(query), 1, query.shape[1], -1)

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.rooms.numel():
            raw, rooms = tuple(function(tensor) for tensor in self.raw(self.capacity)), function(self.rooms)
            self.lay_out(rooms)
            self.hold(raw, self.capacity)

    def restore(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor, most: int) -> None:
        super().restore(tensors, kept, most)
        if tensors:
            self.lay_out(self.rooms)

    def clear(self) -> None:
        super().clear()
        self._lay_out_nothing()

    def _lay_out_nothing(self) -> None:
        self.rooms, self.starts, self.index = (torch.zeros(0, 0, size, dtype=torch.long) for size in (1, 1, 0))
        self.full, self.total = False, 0

    def _at(self, index: torch.Tensor) -> Raw:
        return tuple(tensor.index_select(0, index.flatten()).view(*index.shape, -1) for tensor in self._slots())

    def lay_out(self, rooms: torch.Tensor) -> None:
        """Find where heads with so many slots lie, (batch, kv_heads, 1)."""
        capacity, self.total = torch.stack([rooms.max(), rooms.sum()]).tolist()
        self.rooms, self.starts = rooms, rooms.flatten().cumsum(0).view(rooms.shape) - rooms
        self.index = (self.starts + torch.arange(capacity, device=rooms.device).minimum(rooms - 1)).clamp(min=0).int()


class RaggedCodes(Ragged):
    """Codes of slots, (slots of all rows and heads, bytes); see `coded.py`."""

    names = ("codes",)
    exported = ("codes", "rooms")
    codes: torch.Tensor | None = None
