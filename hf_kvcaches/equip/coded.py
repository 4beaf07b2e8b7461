"""Where the keys and values of slots lie as the codes of a `KVCodec`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.coder import LayerCoder
from hf_kvcaches.equip.paged import PagedStore
from hf_kvcaches.equip.pages import PageBook
from hf_kvcaches.equip.rotation import RotatingPass, SlotRotation
from hf_kvcaches.equip.store import FlatStore, Slots, in_slots
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.launch import Backend
from hf_kvcaches.kernels.slots import put_in_pages, put_in_slots


class FlatCodes(FlatStore):
    """Codes of slots, (batch, bytes, slots, 1), one buffer a row."""

    per_slot = exported = ("codes",)

    def __init__(self, rotation: SlotRotation, backend: Backend) -> None:
        super().__init__(rotation, backend)
        self.codes: torch.Tensor | None = None

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        put_in_slots(self._slots(), slots, states)


class PagedCodes(PagedStore):
    """Codes of slots on pages of bytes, of which a layer with fewer bytes a slot has more slots.

    Args:
        book: The pages of the layer's cache.
        budget: The layer's slots, or the fraction of the prompt.
        codec: Whose codes they are.
        layer_idx: The layer, which tells the bytes of a slot.
    """

    per_slot = exported = ("codes",)

    def __init__(
        self, rotation: SlotRotation, backend: Backend, book: PageBook, budget: int | float, codec: KVCodec, layer_idx: int
    ) -> None:
        widths = [width or 1 for width in codec.separate_bytes]
        self.codec, self.width = codec, dict(enumerate(widths)).get(layer_idx, 1)
        self.page_bytes = book.pool.page_size * max(widths)
        super().__init__(rotation, backend, book, budget, self.page_bytes // self.width)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._prepare(keys)

    def encoded(self, used: int) -> tuple[torch.Tensor, ...]:
        pages = self.table[:, : self.pages.pages_for(used)].long().clamp(min=0)
        gathered = self._by_slot(self.pool.stores["codes"].index_select(0, pages.flatten())).unflatten(0, pages.shape)
        return (gathered.transpose(1, 2).contiguous().flatten(2, 3)[:, :, :used],)

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        put_in_pages(self._slots(), self.table, slots, states)

    def _prepare(self, *states: torch.Tensor) -> None:
        self.pool.prepare_codes(self.codec, self.page_bytes, states[0].device)

    def _slots(self) -> list[torch.Tensor]:
        return [self._by_slot(self.pool.stores["codes"])]

    def _by_slot(self, pages: torch.Tensor) -> torch.Tensor:
        """A view of pages of bytes as (pages, bytes of a slot, page_size, 1); a rest that is too short for a slot is left out."""
        size = self.pages.page_size
        return pages[:, : self.width * size].unflatten(1, (self.width, size, 1))


class CodedStore(FlatStore):
    """Codes of all slots, in which every byte belongs to one head, and the first slots, those of sinks, exactly besides.

    **Reading** decodes all slots in use, in each step and layer: it saves memory between steps, and no time. For that long, one layer's
    keys and values are there in the model's dtype. Policies that score while decoding read twice.

    Args:
        codes: Where the codes lie.

    Attributes:
        exact_sinks: Keys and values of the sinks, in `sinks` + 1 slots; the last one is anything.
    """

    in_graphs = False
    per_slot = exported = (*FlatCodes.per_slot, *FlatStore.per_slot)

    def __init__(
        self, rotation: SlotRotation, backend: Backend, codec: KVCodec, layer_idx: int, sinks: int, codes: FlatCodes | PagedCodes
    ) -> None:
        super().__init__(rotation, backend)
        self.codec, self.layer_idx, self.sinks = codec, layer_idx, sinks
        self.codes, self.exact_sinks = codes, FlatStore(rotation, backend)

    @property
    def capacity(self) -> int:
        return self.codes.capacity

    @property
    def shape(self) -> tuple[int, int]:
        return self.exact_sinks.shape

    def install(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, most: int, source: torch.Tensor | None = None) -> None:
        codes, *exact = self.encode(keys, values)
        if source is not None and self.capacity:  # tokens that stay are not coded again
            before = self.codes.encoded(self.capacity)[0]
            codes = torch.where(self._by_byte(source >= 0)[..., None], in_slots(before, self._by_byte(source.clamp(min=0))), codes)
        self.codes.fill([codes], kept, most)
        self.exact_sinks.hold([states[:, :, : self.sinks] for states in exact], self.sinks + 1)

    def reserve(self, slots: int, most: int) -> None:
        self.codes.reserve(slots, most)

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = min(self.sinks, used)
        keys, values = self._coder().decode(self.codes.encoded(used)[0][..., 0])
        keys[:, :, :first], values[:, :, :first] = self.exact_sinks.read(first)
        return keys, values

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._coder(keys).encode(keys, values)[..., None], keys, values

    def at(self, slots: Slots) -> tuple[torch.Tensor, ...]:
        return *self.codes.at(self._by_byte(slots)), *self.exact_sinks.at(slots.clamp(max=self.sinks))

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        codes, *exact = states
        self.codes.write(self._by_byte(slots), codes)
        self.exact_sinks.write(slots.clamp(max=self.sinks), *exact)  # tokens that are no sinks share the slot behind these

    # What both stores do, each for itself. Pages come first: a pool that is exhausted changes nothing.

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.codes.tensors() | self.exact_sinks.tensors()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for part in self._parts():
            part.map(function)

    def own(self, owned: Callable[[torch.Tensor], torch.Tensor], needs_graph: bool) -> None:
        if needs_graph:
            raise UnsupportedError("codec: codes are integers, which have no gradients. Call the model under torch.no_grad().")
        for part in self._parts():
            part.own(owned, needs_graph)

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for part in self._parts():
            part.map_rows(function)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for part in self._parts():
            part.check(keys, values)

    def space_for(self, rows: int, running: RotatingPass, block: int) -> AbstractContextManager[None]:
        return self.codes.space_for(rows, running, block)

    def clear(self) -> None:
        for part in self._parts():
            part.clear()

    def export(self) -> dict[str, torch.Tensor]:
        return self.codes.export() | self.exact_sinks.export()

    def take(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None, most: int) -> None:
        for part in self._parts():
            part.take({name: tensors[name] for name in part.exported}, kept, most)

    def snapshot(self) -> Any:
        return [part.snapshot() for part in self._parts()]

    def restore(self, snapshot: Any) -> None:
        for part, content in zip(self._parts(), snapshot, strict=True):
            part.restore(content)

    def trim(self, kept: torch.Tensor | None) -> None:
        self.codes.trim(kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.codes, copied.exact_sinks = copy.deepcopy(self.codes, memo), copy.deepcopy(self.exact_sinks, memo)
        return copied

    def _parts(self) -> tuple[FlatStore, FlatStore]:
        return self.codes, self.exact_sinks

    def _coder(self, like: torch.Tensor | None = None) -> LayerCoder:
        """The layer's coder for a tensor's dtype and device; None: for those of the sinks."""
        like = self.exact_sinks.keys if like is None else like
        assert like is not None
        return self.codec.coder(self.layer_idx, like.dtype, like.device, separate=True)

    def _by_byte(self, slots: torch.Tensor) -> torch.Tensor:
        """Something of each head's slots for each byte, (batch, 1 or bytes, slots).

        Args:
            slots: (batch, 1 or kv_heads, slots).
        """
        return slots if slots.shape[1] == 1 else slots.index_select(1, self._coder().row_heads())
