"""Where the keys and values of slots lie as the codes of a `KVCodec`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.fixed import LayerCoder
from hf_kvcaches.equip.paged import Paged
from hf_kvcaches.equip.pages import BlockTable, PagePool
from hf_kvcaches.equip.ragged import Ragged, RaggedCodes
from hf_kvcaches.equip.storage import Flat, Raw, Slots, extended, pick, read_decoded
from hf_kvcaches.kernels.launch import Backend


class FlatCodes(Flat):
    """Codes of slots, (batch, kv_heads, slots, bytes), one buffer a row."""

    names = exported = ("codes",)
    codes: torch.Tensor | None = None


class PagedCodes(Paged):
    """Codes of slots on pages of bytes, of which a layer with fewer bytes a slot has more slots."""

    names = exported = ("codes",)

    def __init__(
        self, backend: Backend, pool: PagePool, tables: list[BlockTable], slots_of: Callable[[int], int], codec: KVCodec, layer_idx: int
    ) -> None:
        layers = codec.slots.layers
        self.kind, self.code_heads = f"codes of the codec {codec.digest[:8]}", layers[layer_idx].shape.heads
        self.width = max(1, layers[layer_idx].nbytes)
        self.page_bytes = pool.page_size * max(1, *(layer.nbytes for layer in layers.values()))
        super().__init__(backend, pool, tables, slots_of, self.page_bytes // self.width)

    def _open(self, *states: torch.Tensor) -> None:
        self.pool.open(self.kind, {"codes": (self.page_bytes,)}, torch.uint8, states[0].device)

    def _slots(self) -> list[torch.Tensor]:
        """Pages of bytes as (pages, kv_heads, page_size, bytes); a rest that is too short for a slot is left out."""
        size = self.table.size
        return [self.pool.stores["codes"][:, : self.width * size].unflatten(1, (self.code_heads, size, -1))]


class Coded(Flat):
    """Codes of all slots, of each head by itself; `keys` and `values` are those of the first slots, the sinks', exactly.

    **Reading** decodes all slots in use, in each step and layer: it saves memory between steps, and no time. For that long, one layer's
    keys and values are there in the model's dtype, where heads have different numbers of slots as many of each as of the longest. Policies
    that score while decoding read twice.

    Attributes:
        codes: Where the codes lie.
        keys: Of the sinks, (batch, kv_heads, sinks + 1, head_dim); the last one is anything.
    """

    exported, parts = (*FlatCodes.names, *Flat.names), ("codes",)
    in_graphs = False
    no_gradients = "codec: codes are integers, which have no gradients. Call the model under torch.no_grad()."

    read = read_decoded

    def __init__(self, backend: Backend, codec: KVCodec, layer_idx: int, sinks: int, codes: FlatCodes | PagedCodes | RaggedCodes) -> None:
        super().__init__(backend)
        self.codec, self.layer_idx, self.sinks, self.codes, self.pooled = codec, layer_idx, sinks, codes, codes.pooled

    @property
    def capacity(self) -> int:
        return self.codes.capacity

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Raw:
        return self._coder(keys).encode(keys, values).mT, keys, values

    def decode(self, raw: Raw) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values from what `raw` gave."""
        keys, values = self._coder(raw[1]).decode(raw[0].mT.contiguous(), raw[1].dtype)
        for states, exact in ((keys, raw[1]), (values, raw[2])):
            states[:, :, : exact.shape[2]] = exact
        return keys, values

    def raw(self, used: int) -> Raw:
        return *self.codes.raw(used), *super().raw(min(used, self.sinks))

    def gather(self, slots: Slots) -> Raw:
        exact = slots.clamp(max=self.sinks)
        return *self.codes.gather(slots), *(pick(tensor, exact) for tensor in self._slots())

    def write(self, slots: Slots, raw: Raw) -> None:
        self.codes.write(slots, raw[:1])
        super().write(slots.clamp(max=self.sinks), raw[1:])  # tokens that are no sinks share the slot behind these

    def rebuild(self, index: Slots | None, new: Raw | None, used: int, most: int) -> None:
        coded, count = (None, 0) if new is None else (new[:1], new[1].shape[2])
        like = self._slots()[0] if new is None else new[1]
        self.codes.rebuild(index, coded, used, most)
        index = torch.arange(used + count, device=like.device)[None, None] if index is None else index
        first = index[..., : self.sinks].expand(*like.shape[:2], -1)
        if not first.shape[-1]:
            return self._hold_sinks(tuple(states[:, :, :0] for states in (self._slots() if new is None else new[1:])))
        # What a slot behind the sinks held exists as codes alone, new tokens exactly.
        exact: Raw = self._coder(like).decode(self.codes.raw(first.shape[-1])[0].mT.contiguous(), like.dtype)
        if used:
            old = (pick(tensor, first.clamp(max=self.sinks)) for tensor in self._slots())
            exact = tuple(torch.where((first < min(used, self.sinks))[..., None], *parts) for parts in zip(old, exact, strict=True))
        if new is not None:
            arrived = (pick(tensor, (first - used).clamp(min=0)) for tensor in new[1:])
            exact = tuple(torch.where((first >= used)[..., None], *parts) for parts in zip(arrived, exact, strict=True))
        return self._hold_sinks(exact)

    def _hold_sinks(self, exact: Raw) -> None:
        self.keys, self.values = (extended(states, self.sinks + 1) for states in exact)

    # What codes and sinks do, each for themselves. Pages come first: a pool that is exhausted changes nothing.

    def reserve(self, slots: int, most: int) -> None:
        self.codes.reserve(slots, most)

    def space_for(self, *args: Any) -> AbstractContextManager[None]:
        return self.codes.space_for(*args)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.codes.tensors() | super().tensors()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.codes.map(function)
        super().map(function)

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.codes.map_rows(function)
        super().map(function)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().check(keys, values)
        self.codes.check(keys, values)

    def clear(self) -> None:
        self.codes.clear()
        super().clear()

    def trim(self, kept: torch.Tensor) -> None:
        self.codes.trim(kept)

    def export(self) -> dict[str, torch.Tensor]:
        return self.codes.export() | {name: tensor.contiguous() for name, tensor in Flat.tensors(self).items()}

    def restore(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor, most: int) -> None:
        self.codes.restore({name: tensors[name] for name in self.codes.exported if name in tensors}, kept, most)
        for name in Flat.names:
            setattr(self, name, tensors.get(name))

    def _coder(self, like: torch.Tensor) -> LayerCoder:
        """The layer's coder for a tensor's dtype and device."""
        return self.codec.slots.coder(self.layer_idx, like.dtype, like.device)


def ragged_like(storage: Flat, rooms: torch.Tensor | None = None) -> Flat:
    """An empty store for slots of the same kind, of which each head has as many as `rooms` says, (batch, kv_heads, 1), or `restore`."""
    ragged = RaggedCodes(storage.backend) if isinstance(storage, Coded) else Ragged(storage.backend)
    if rooms is not None:
        ragged.lay_out(rooms)
    if isinstance(storage, Coded) and isinstance(ragged, RaggedCodes):
        return Coded(storage.backend, storage.codec, storage.layer_idx, storage.sinks, ragged)
    return ragged
