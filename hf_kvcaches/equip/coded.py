"""Where the keys and values of slots lie in few bits: as integers, or as the codes of a `KVCodec`.

Channels of unrotated keys lie far from zero and differ in size, so for integers each is centered and scaled first, by what a row's first
tokens were, as long as it keeps any token: slots are overwritten one by one. What is left is quantized token by token, as values are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.fixed import LayerCoder
from hf_kvcaches.core.layers import other_rows
from hf_kvcaches.equip.pages import Paged, PagePool
from hf_kvcaches.equip.storage import Flat, Ragged, Raw, Slots, extended, pick, read_decoded
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.launch import Backend
from hf_kvcaches.kernels.quantization import dequantize, quantize

Storage = Literal["int8", "int4"]
BITS: dict[str, int] = {"int8": 8, "int4": 4}
# Consecutive dimensions of a value that share a scale in 4 bits.
_GROUP = 32
# As many imagined tokens, at zero and of the head's mean size, keep the channels of a short prompt from extremes.
_PRIOR = 16


class QuantizedSlots(Flat):
    """Keys and values of slots as integers, two in a byte with "int4". All slots in use are dequantized in each step and layer.

    Beside the numbers, a token of a head takes 4 bytes for the key's scale and zero, and 4 for the value's, with "int4" for each group.
    """

    names = ("keys", "key_scale", "key_zero", "values", "value_scale", "value_zero")
    beside = ("center", "spread")
    in_graphs = False  # the first tokens choose the channels' scales
    no_gradients = "storage: integers have no gradients. Run the model under torch.no_grad(), or leave storage out."

    read = read_decoded
    key_scale = key_zero = value_scale = value_zero = None
    center: torch.Tensor = None  # type: ignore[assignment]  # (batch, kv_heads, 1, head_dim), in the model's dtype
    spread: torch.Tensor = None  # type: ignore[assignment]

    def __init__(self, backend: Backend, storage: Storage) -> None:
        super().__init__(backend)
        self.bits = BITS[storage]

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.center is not None and (self.center.shape[0] != keys.shape[0] or self.center.dtype != keys.dtype):
            raise other_rows(self.center.shape[0], self.center.dtype, keys)
        if self.bits == 4 and (keys.shape[3] | values.shape[3]) % 2:
            raise UnsupportedError("storage: 'int4' holds two numbers in a byte, and this model's heads are of an odd size. Use 'int8'.")

    def prepare(self, keys: torch.Tensor, real: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Choose what channels of keys are centered and scaled by, for rows that keep no token from before."""
        mask, count = real[..., None], real.sum(-1)[..., None, None]
        states = torch.where(mask, keys, 0).float()
        center = (states.sum(2, keepdim=True) / (count + _PRIOR)).to(keys.dtype)
        size = states.square().sum((2, 3), keepdim=True) / (count.clamp(min=1) * keys.shape[3])
        squares = torch.where(mask, states - center, 0).square().sum(2, keepdim=True)
        spread = ((squares + _PRIOR * size) / (count + _PRIOR)).sqrt().to(keys.dtype)
        spread = torch.where(count > 0, spread.clamp(min=torch.finfo(keys.dtype).tiny), 1)
        if self.center is not None and kept is not None:
            empty = (kept == 0).all(1, keepdim=True)[..., None]
            center, spread = torch.where(empty, center, self.center), torch.where(empty, spread, self.spread)
        self.center, self.spread = center, spread

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Raw:
        if self.center is None:
            self.prepare(keys, torch.ones(keys.shape[0], 1, keys.shape[2], dtype=torch.bool, device=keys.device), None)
        # Of about the size 1, which float16 holds well; its scale and zero take four bytes for any dtype of the model.
        limit = torch.finfo(torch.float16).max
        normal = ((keys.float() - self.center) / self.spread).clamp(-limit, limit).to(torch.float16)
        key = quantize(normal, self.bits, check_finite=False)
        value = quantize(values, self.bits, _GROUP if self.bits == 4 else None, check_finite=False)
        return key.data, key.scale, key.zero, value.data, value.scale, value.zero

    def decode(self, raw: Raw) -> tuple[torch.Tensor, torch.Tensor]:
        key, key_scale, key_zero, value, value_scale, value_zero = raw
        dtype, per_byte = self.center.dtype, 8 // self.bits
        compute = torch.promote_types(dtype, torch.float32)
        keys = dequantize(key, key_scale, key_zero, key.shape[3] * per_byte, None, compute)
        keys = keys.mul_(self.spread).add_(self.center).to(dtype)
        group = _GROUP if self.bits == 4 else None
        return keys, dequantize(value, value_scale, value_zero, value.shape[3] * per_byte, group, compute).to(dtype)


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
        # Others share the slot behind the sinks.
        kernels.write_slots(self.keys, self.values, slots.clamp(max=self.sinks), raw[1], raw[2], backend=self.backend)

    def rebuild(self, index: Slots | None, new: Raw | None, used: int, most: int) -> None:
        # The sinks' slots to be hold new tokens exactly, and of slots behind the sinks what their codes say.
        sinks: Raw = () if new is None else new[1:]
        if used:
            old = self.read(min(used, self.sinks) if index is None else used)
            sinks = old if new is None else tuple(torch.cat(pair, 2) for pair in zip(old, sinks, strict=True))
        if index is not None:
            sinks = tuple(pick(part, index[..., : self.sinks]) for part in sinks)
        super().rebuild(index, None if new is None else new[:1], used, most)  # before: an exhausted pool changes nothing
        self.keys, self.values = (extended(part[:, :, : self.sinks], self.sinks + 1) for part in sinks)

    def _coder(self, like: torch.Tensor) -> LayerCoder:
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
