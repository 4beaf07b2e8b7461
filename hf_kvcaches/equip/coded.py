"""Where the keys and values of slots lie as the codes of a `KVCodec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_kvcaches.core.codec.codec import KVCodec
from hf_kvcaches.core.codec.coder import LayerCoder
from hf_kvcaches.equip.rotation import SlotRotation
from hf_kvcaches.equip.store import FlatStore, Slots, extended, in_slots, room_for, wrong_rows
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.launch import Backend


class CodedStore(FlatStore):
    """Codes of slots, (batch, bytes, slots, 1), in which every byte belongs to one head; the first slots, those of sinks, exactly besides.

    **Reading** decodes all slots in use, in each step and layer: it saves memory between steps, and no time. For that long, one layer's
    keys and values are there in the model's dtype. Policies that score while decoding read twice.

    Attributes:
        first_keys: The sinks, (batch, kv_heads, sinks + 1, head_dim); the last one is anything. And `first_values`.
    """

    in_graphs = False
    per_slot = ("codes", "first_keys", "first_values")
    exported = per_slot

    def __init__(self, rotation: SlotRotation, backend: Backend, codec: KVCodec, layer_idx: int, sinks: int) -> None:
        super().__init__(rotation, backend)
        self.codec, self.layer_idx, self.sinks = codec, layer_idx, sinks
        self.codes: torch.Tensor | None = None
        self.first_keys: torch.Tensor | None = None
        self.first_values: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        return 0 if self.codes is None else self.codes.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        return (0, 0) if self.first_keys is None else (self.first_keys.shape[0], self.first_keys.shape[1])

    def own(self, owned: Callable[[torch.Tensor], torch.Tensor], needs_graph: bool) -> None:
        if needs_graph:
            raise UnsupportedError("codec: codes are integers, which have no gradients. Call the model under torch.no_grad().")
        super().own(owned, needs_graph)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        held = self.first_keys
        if held is not None and (held.shape[0] != keys.shape[0] or held.dtype != keys.dtype):
            raise wrong_rows(held.shape[0], held.dtype, keys)

    def install(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, most: int, source: torch.Tensor | None = None) -> None:
        codes, *exact = self.encode(keys, values)
        if source is not None and self.codes is not None:  # tokens that stay are not coded again
            stays = self._by_row(source >= 0)[..., None]
            codes = torch.where(stays, in_slots(self.codes, self._by_row(source.clamp(min=0))), codes)
        self._fill((codes, *exact), room_for(keys.shape[2], most))

    def reserve(self, slots: int, most: int) -> None:
        if self.codes is not None and slots > self.capacity:
            self.codes = extended(self.codes, room_for(slots, most))

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.codes is not None
        assert self.first_keys is not None
        assert self.first_values is not None
        keys, values = self._coder(self.first_keys).decode(self.codes[:, :, :used, 0])
        first = min(self.sinks, used)
        keys[:, :, :first], values[:, :, :first] = self.first_keys[:, :, :first], self.first_values[:, :, :first]
        return keys, values

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._coder(keys).encode(keys, values)[..., None], keys, values

    def at(self, slots: Slots) -> tuple[torch.Tensor, ...]:
        codes, first_keys, first_values = self._slots()
        first = slots.clamp(max=self.sinks)
        return in_slots(codes, self._by_row(slots)), in_slots(first_keys, first), in_slots(first_values, first)

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        # Tokens that are no sinks share the slot behind these.
        first = slots.clamp(max=self.sinks)
        for held, index, new in zip(self._slots(), (self._by_row(slots), first, first), states, strict=True):
            held.scatter_(2, index[..., None].expand_as(new), new.to(held.dtype))

    def _fill(self, tensors: Sequence[torch.Tensor], slots: int) -> None:
        codes, *exact = tensors
        self.codes = extended(codes, slots)
        self.first_keys, self.first_values = (extended(each[:, :, : self.sinks], self.sinks + 1) for each in exact)

    def _coder(self, like: torch.Tensor) -> LayerCoder:
        return self.codec.coder(self.layer_idx, like.dtype, like.device, separate=True)

    def _by_row(self, slots: torch.Tensor) -> torch.Tensor:
        """Something of each head's slots for each byte, (batch, bytes, slots).

        Args:
            slots: (batch, 1 or kv_heads, slots).
        """
        assert self.first_keys is not None
        heads = self._coder(self.first_keys).row_heads()
        return slots.expand(-1, len(heads), -1) if slots.shape[1] == 1 else slots.index_select(1, heads)
