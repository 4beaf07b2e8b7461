"""Where the keys and values of slots lie as the codes of a `KVCodec`."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.fixed import LayerCoder
from hf_kvcaches.equip.pages import Paged, PagePool
from hf_kvcaches.equip.ragged import Ragged
from hf_kvcaches.equip.storage import Flat, Raw, Slots, extended, pick, starts
from hf_kvcaches.kernels.launch import Backend


class Coded(Flat):
    """Codes of all slots, of each head by itself, (batch, kv_heads, slots, bytes). All slots in use are decoded in each step and layer.

    `keys` and `values` are exactly those of the first slots, the sinks', (batch, kv_heads, sinks + 1, head_dim); the last one is anything.
    """

    names, beside = ("codes",), Flat.names
    in_graphs = False
    no_gradients = "codec: codes are integers, which have no gradients. Call the model under torch.no_grad()."
    codes: torch.Tensor | None = None

    def __init__(self, codec: KVCodec, layer_idx: int, sinks: int, backend: Backend, *place: Any) -> None:
        self.codec, self.layer_idx, self.sinks = codec, layer_idx, sinks
        super().__init__(backend, *place)

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Raw:
        return self._coder(keys).encode(keys, values).mT, keys, values

    def decode(self, raw: Raw) -> tuple[torch.Tensor, torch.Tensor]:
        codes, *sinks = raw
        keys, values = self._coder(sinks[0]).decode(codes.mT.contiguous(), sinks[0].dtype)
        for states, exact in zip((keys, values), sinks, strict=True):
            states[:, :, : exact.shape[2]] = exact
        return keys, values

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = min(used, self.sinks)
        return self.decode((*self.held(used), self.keys[:, :, :count], self.values[:, :, :count]))

    def gather(self, slots: Slots) -> Raw:
        exact = slots.clamp(max=self.sinks)
        return *super().gather(slots), pick(self.keys, exact), pick(self.values, exact)

    def write(self, slots: Slots, raw: Raw) -> None:
        super().write(slots, raw[:1])
        exact = slots.clamp(max=self.sinks)  # others share the slot behind the sinks
        index = (starts(*self.keys.shape[:3], slots.device) + exact).flatten()
        for buffer, new in zip((self.keys, self.values), raw[1:], strict=True):
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, index, new.reshape(-1, new.shape[-1]))

    def rebuild(self, index: Slots | None, new: Raw | None, used: int, most: int) -> None:
        # What a slot behind the sinks held exists as codes alone, new tokens exactly.
        states = [*(self.read(used) if used else ())]
        if new is not None:
            states = [torch.cat(parts, 2) for parts in zip(states, new[1:], strict=True)] if states else [*new[1:]]
        exact = [x[:, :, : self.sinks] if index is None else pick(x, index[..., : self.sinks]) for x in states]
        super().rebuild(index, None if new is None else new[:1], used, most)  # before: an exhausted pool changes nothing
        self.keys, self.values = (extended(x, self.sinks + 1) for x in exact)

    def _coder(self, like: torch.Tensor) -> LayerCoder:
        """The layer's coder for a tensor's dtype and device."""
        return self.codec.slots.coder(self.layer_idx, like.dtype, like.device)


class RaggedCodes(Coded, Ragged):
    """Codes where heads have different numbers of slots, (slots of all rows and heads, bytes)."""

    beside = (*Coded.beside, *Ragged.beside)


class PagedCodes(Coded, Paged):
    """Codes on pages of bytes, of which a layer with fewer bytes a slot has more slots."""

    def __init__(self, codec: KVCodec, layer_idx: int, sinks: int, backend: Backend, pool: PagePool, *place: Any) -> None:
        layers = codec.slots.layers
        self.code_heads, self.width = layers[layer_idx].shape.heads, max(1, layers[layer_idx].nbytes)
        self.page_bytes = pool.page_size * max(1, *(layer.nbytes for layer in layers.values()))
        super().__init__(codec, layer_idx, sinks, backend, pool, *place, self.page_bytes // self.width)

    def _open(self, *states: torch.Tensor) -> None:
        self.pool.open(f"codes of the codec {self.codec.digest[:8]}", {"codes": (self.page_bytes,)}, torch.uint8, states[0].device)

    def _slots(self) -> list[torch.Tensor]:
        """Pages of bytes as (pages, kv_heads, page_size, bytes); a rest that is too short for a slot is left out."""
        size = self.table.size
        return [self.pool.stores["codes"][:, : self.width * size].unflatten(1, (self.code_heads, size, -1))]


def ragged_like(storage: Flat, rooms: torch.Tensor | None = None) -> Flat:
    """An empty store for slots of the same kind, of which each head has as many as `rooms` says, (batch, kv_heads, 1), or `restore`."""
    backend = storage.backend
    ragged = RaggedCodes(storage.codec, storage.layer_idx, storage.sinks, backend) if isinstance(storage, Coded) else Ragged(backend)
    if rooms is not None:
        ragged.lay_out(rooms)
    return ragged
