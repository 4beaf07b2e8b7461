"""Where the keys and values of slots lie in 8 or 4 bits a number.

Channels of unrotated keys lie far from zero and differ in size, so each is centered and scaled first. Slots are overwritten one by one,
which rules out a scale that tokens share: the centers and sizes of channels are those of a row's first tokens, and stay while it keeps
any token. What is left is quantized token by token, as values are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from hf_kvcaches.equip.rotation import SlotRotation
from hf_kvcaches.equip.store import FlatStore, Slots, wrong_rows
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.launch import Backend
from hf_kvcaches.kernels.quantization import dequantize, quantize
from hf_kvcaches.kernels.slots import put_in_slots

Storage = Literal["int8", "int4"]
BITS: dict[str, int] = {"int8": 8, "int4": 4}
# Consecutive dimensions of a value that share a scale in 4 bits.
_GROUP = 32
# As many imagined tokens, at zero and of the head's mean size, keep the channels of a short prompt from extremes.
_PRIOR = 16


class QuantizedStore(FlatStore):
    """Keys and values of slots as integers, two in a byte with "int4".

    **Bytes per token and KV head**, for a model in half precision: `2 * head_dim * bits / 8` for the numbers, 4 for the key's scale and
    zero, and 4 for the value's, with "int4" 4 for each 32 dimensions of it. Once per row and head, two numbers for each channel of keys.

    **Reading** dequantizes all slots in use, in each step and layer: it saves memory between steps, and no time. For that long, one layer's
    keys and values are there in the model's dtype, and one of both in float32. Policies that score while decoding read twice.

    Args:
        storage: How many bits a number has.
    """

    in_graphs = False  # the first tokens choose the channels' scales
    per_slot = ("keys", "key_scale", "key_zero", "values", "value_scale", "value_zero")
    exported = (*per_slot, "center", "spread")

    def __init__(self, rotation: SlotRotation, backend: Backend, storage: Storage) -> None:
        super().__init__(rotation, backend)
        self.bits = BITS[storage]
        self.key_scale: torch.Tensor | None = None
        self.key_zero: torch.Tensor | None = None
        self.value_scale: torch.Tensor | None = None
        self.value_zero: torch.Tensor | None = None
        self.center: torch.Tensor | None = None  # (batch, kv_heads, 1, head_dim), in the model's dtype
        self.spread: torch.Tensor | None = None

    def own(self, owned: Any, needs_graph: bool) -> None:
        if needs_graph:
            raise UnsupportedError("storage: integers have no gradients. Run the model under torch.no_grad(), or leave storage out.")
        super().own(owned, needs_graph)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.center is not None and (self.center.shape[0] != keys.shape[0] or self.center.dtype != keys.dtype):
            raise wrong_rows(self.center.shape[0], self.center.dtype, keys)

    def install(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, most: int, source: torch.Tensor | None = None) -> None:
        real = torch.arange(keys.shape[2], device=keys.device) < kept
        stays = torch.zeros_like(real) if source is None or self.center is None else real & (source >= 0)
        self._fit(keys, real, stays.any(-1)[..., None, None])
        encoded = self.encode(keys, values)
        if source is not None and self.capacity:  # tokens that stay are not quantized again
            before = self.at(source.clamp(min=0))
            encoded = tuple(torch.where(stays[..., None], old, new) for new, old in zip(encoded, before, strict=True))
        self.fill(encoded, kept, most)

    def _fit(self, keys: torch.Tensor, real: torch.Tensor, fitted: torch.Tensor) -> None:
        """Chooses what channels of keys are centered and scaled by, for rows and heads that keep no token from before.

        Args:
            real: True for tokens, (batch, 1 or kv_heads, tokens).
            fitted: True for rows and heads that keep some, (batch, 1 or kv_heads, 1, 1).
        """
        if self.center is not None and bool(fitted.all()):
            return
        mask, count = real[..., None], real.sum(-1)[..., None, None]
        states = torch.where(mask, keys, 0).float()
        center = (states.sum(2, keepdim=True) / (count + _PRIOR)).to(keys.dtype)
        size = states.square().sum((2, 3), keepdim=True) / (count.clamp(min=1) * keys.shape[3])
        squares = torch.where(mask, states - center, 0).square().sum(2, keepdim=True)
        spread = ((squares + _PRIOR * size) / (count + _PRIOR)).sqrt().to(keys.dtype)
        spread = torch.where(count > 0, spread.clamp(min=torch.finfo(keys.dtype).tiny), 1)
        if self.center is not None and self.spread is not None:
            center, spread = torch.where(fitted, self.center, center), torch.where(fitted, self.spread, spread)
        self.center, self.spread = center, spread

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.center is not None
        assert self.spread is not None
        if self.bits == 4 and (keys.shape[3] | values.shape[3]) % 2:
            raise UnsupportedError("storage: 'int4' holds two numbers in a byte, and this model's heads are of an odd size. Use 'int8'.")
        # Of about the size 1, which float16 holds well; its scale and zero take four bytes for any dtype of the model.
        limit = torch.finfo(torch.float16).max
        normal = ((keys.float() - self.center) / self.spread).clamp(-limit, limit).to(torch.float16)
        key = quantize(normal, self.bits, check_finite=False)
        value = quantize(values, self.bits, _GROUP if self.bits == 4 else None, check_finite=False)
        return key.data, key.scale, key.zero, value.data, value.scale, value.zero

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.center is not None
        assert self.spread is not None
        key, key_scale, key_zero, value, value_scale, value_zero = self.encoded(used)
        dtype, per_byte = self.center.dtype, 8 // self.bits
        compute = torch.promote_types(dtype, torch.float32)
        keys = dequantize(key, key_scale, key_zero, key.shape[3] * per_byte, None, compute)
        keys = keys.mul_(self.spread).add_(self.center).to(dtype)
        group = _GROUP if self.bits == 4 else None
        return keys, dequantize(value, value_scale, value_zero, value.shape[3] * per_byte, group, compute).to(dtype)

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        put_in_slots(self._slots(), slots, states)
