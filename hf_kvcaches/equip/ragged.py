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
        rooms: How many slots each head has, (batch, kv_heads, 1); `starts` is where the first one lies.
        index: Where each slot lies, (batch, kv_heads, capacity); a slot that a head lacks is some other one.
        hiding: 0 for slots that a head has, and the lowest number for others, (batch * kv_heads, 1, capacity).
    """

    beside: ClassVar[tuple[str, ...]] = ("rooms",)
    total = 0
    no_gradients = "head_budgets: there are no gradients. Run the model under torch.no_grad(), or pass head_budgets=None."

    read = read_decoded

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.hiding: torch.Tensor = None  # type: ignore[assignment]
        self.lay_out(torch.zeros(0, 0, 1, dtype=torch.long))

    def lay_out(self, rooms: torch.Tensor) -> None:
        """Find where heads with so many slots lie, (batch, kv_heads, 1)."""
        self.rooms, self.starts, self.index, self.total, self.full = rooms, rooms, rooms[..., :0], 0, False
        if not rooms.numel():
            return
        capacity, self.total = torch.stack([rooms.max(), rooms.sum()]).tolist()
        self.starts = rooms.flatten().cumsum(0).view(rooms.shape) - rooms
        self.index = (self.starts + torch.arange(capacity, device=rooms.device).minimum(rooms - 1)).clamp(min=0).int()

    def find_full(self, kept: torch.Tensor) -> None:
        """Find out whether every slot that a head has holds a token, of which it keeps so many, (batch, kv_heads, 1)."""
        if bool((kept == self.rooms).all()):
            missing = torch.arange(self.capacity, device=kept.device) >= self.rooms
            lowest = torch.finfo(self.keys.dtype).min
            self.hiding, self.full = self.keys.new_zeros(missing.shape).masked_fill_(missing, lowest).flatten(0, 1)[:, None], True

    @property
    def capacity(self) -> int:
        return self.index.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        return self.index.shape[0], self.index.shape[1]

    def held(self, used: int) -> Raw:
        return self._at(self.index[..., :used])

    def gather(self, slots: Slots) -> Raw:
        return self._at(self.starts + slots)

    def hold(self, raw: Raw, most: int) -> None:
        self.full, width = False, max(self.capacity, raw[0].shape[2])
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

    def attend(self, query: torch.Tensor, used: int, scaling: float, **options: Any) -> Attended:
        rotation, valid = options.pop("rotation", None), options.pop("valid", None)
        # The kernel has one learned sink for each query head of a row, here each head is a row; and it has no bias.
        by_head = query.is_cuda and options.get("sink_logits") is None and options.get("bias") is None and not torch.compiler.is_compiling()
        in_kernel = by_head and self.names == Flat.names and choose(self.backend, query, self.keys) == "triton"
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
        keys, values = (tensor.view(-1, 1, 1, tensor.shape[-1]) for tensor in self._slots())
        near, tables = query.reshape(count, group, 1, dim), index.reshape(count, used)
        output, weights = kernels.slot_attention(
            near, keys, values, scaling, tables=tables, rotation=rotation, valid=valid, backend="triton", **options
        )
        return output.view(len(query), 1, query.shape[1], -1), None if weights is None else weights.view(index.shape)

    def _attend_full(self, query: torch.Tensor, scaling: float, rotation: RotationTables | None) -> torch.Tensor:
        """Attention where slots that a head lacks are the only ones that are hidden, (batch, 1, heads, value_dim)."""
        keys, values = self.read(self.capacity)
        keys = keys if rotation is None else kernels.rotated_keys(keys, rotation).to(query.dtype)
        near = query.reshape(keys.shape[0] * keys.shape[1], -1, query.shape[-1])
        scores = torch.baddbmm(self.hiding, near, keys.flatten(0, 1).mT, alpha=scaling)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(len(query), 1, query.shape[1], -1)

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.rooms.numel():
            held = tuple(function(tensor) for tensor in self.held(self.capacity))
            for name in self.beside:
                setattr(self, name, function(getattr(self, name)))
            self.lay_out(self.rooms)
            self.hold(held, self.capacity)

    def restore(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor, most: int) -> None:
        super().restore(tensors, kept, most)
        if tensors:
            self.lay_out(self.rooms)

    def clear(self) -> None:
        super().clear()
        self.lay_out(torch.zeros(0, 0, 1, dtype=torch.long))

    def _at(self, index: torch.Tensor) -> Raw:
        return tuple(tensor.index_select(0, index.flatten()).view(*index.shape, -1) for tensor in self._slots())
