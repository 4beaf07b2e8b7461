"""Where the keys and values of slots lie: one buffer a row, or heads with different numbers of slots one behind the other.

Subclasses differ in how these are encoded (`encode`, `decode`: `coded.py`), or in where the result lies (`hold`, `write`...: `pages.py`).
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
from hf_kvcaches.kernels.launch import Backend, choose
from hf_kvcaches.kernels.rotation import RotationTables
from hf_kvcaches.kernels.slots import Attended

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
        """Within it all layers have memory for a pass's new tokens, or the first layer refuses and nothing has changed.

        The first tokens are a block, and those that are `valid` count. `shared` makes what layers share, by name.
        """
        return nullcontext()

    def rewriting(self) -> AbstractContextManager[None]:
        """Within it there is memory to overwrite the slots of this layer and those behind it, or it refuses and nothing has changed."""
        return self.space_for(self.shape[0], 0, None, 1, lambda name, make: make())

    # How tokens are kept, and where.

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Raw:
        return keys, values

    def decode(self, raw: Raw) -> tuple[torch.Tensor, torch.Tensor]:
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
        else:  # not with `scatter_`, which takes a thousand times as long in half precision
            # On a GPU another stream may not see yet what was made on one.
            starts = _starts.__wrapped__ if graph or slots.is_cuda else _starts
            index = (starts(*buffers[0].shape[:3], slots.device) + slots).flatten()
            for buffer, new in zip(buffers, raw, strict=True):
                buffer.view(-1, buffer.shape[-1]).index_copy_(0, index, new.reshape(-1, new.shape[-1]))

    # What is made of these.

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, :, :used], self.values[:, :, :used]

    def rebuild(self, index: Slots | None, new: Raw | None, used: int, most: int) -> None:
        """Keep some of the tokens in slots and of new, encoded ones behind these, by their index; None: all. No slot is encoded again."""
        raw = self.held(used) if used else ()
        if new is not None:
            raw = tuple(torch.cat(parts, 2) for parts in zip(raw, new, strict=True)) if raw else new
        self.hold(raw if index is None else tuple(pick(tensor, index) for tensor in raw), most)

    def reserve(self, slots: int, most: int) -> None:
        if slots > self.capacity:
            for name in self.names:
                setattr(self, name, extended(getattr(self, name), max(slots, min(most, slots + slots // 2))))

    def attend(self, query: torch.Tensor, used: int, scaling: float, **options: Any) -> Attended:
        """Attention of one query a row over the first slots; options as in `slot_attention`."""
        backend: Backend = "torch" if torch.compiler.is_compiling() else self.backend
        return kernels.slot_attention(query, *self.read(used), scaling, backend=backend, **options)

    # Memory and rows.

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, torch.Tensor)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace all tensors that belong to it alone; dimension 0 is the batch."""
        for name, tensor in Flat.tensors(self).items():
            setattr(self, name, function(tensor))

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.map(lambda tensor: function(tensor).contiguous())  # a slice of rows may have steps

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


@lru_cache(maxsize=16)
def _starts(batch: int, heads: int, slots: int, device: torch.device) -> torch.Tensor:
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
