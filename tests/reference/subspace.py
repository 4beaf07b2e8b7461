"""What `SubspaceCache` computes with a codec, written down plainly: all keys are kept, and those between the ends pass through codes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import DynamicCache

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.rope import RotaryGeometry


class SubspaceOracle(DynamicCache):
    """Hands out keys and values for a model's own attention, one softmax over all tokens.

    Args:
        config: The model's.
        sinks: First real tokens of a row that are exact.
        recent: Newest real tokens that are exact.
        real: False where a token is padding, (batch, all tokens); None where none is.
    """

    def __init__(self, config: Any, codec: KVCodec, *, sinks: int, recent: int, real: torch.Tensor | None = None) -> None:
        super().__init__(config=config)
        self.codec, self.sinks, self.recent, self.real, self.config = codec, sinks, recent, real, config

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        before = self.get_seq_length(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.codec.layers[layer_idx] is None or not before:
            return keys, values
        real = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool) if self.real is None else self.real[:, : keys.shape[2]]
        numbers = real.cumsum(1) - 1
        # A single token reads what is left once it is there; several are exact to each other.
        held = real if key_states.shape[2] == 1 else real[:, :before]
        middle = (numbers >= self.sinks) & (numbers < held.sum(1, keepdim=True) - self.recent)
        read_keys, read_values = self._read(keys, values, layer_idx, numbers.clamp(min=0))
        return torch.where(middle[:, None, :, None], read_keys, keys), torch.where(middle[:, None, :, None], read_values, values)

    def _read(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated, and values as their codes have them."""
        geometry = RotaryGeometry.from_config(self.config, layer_idx=layer_idx)
        rotates = self.codec.settings.rotation == "aware" and geometry.kind == "rope"
        one = dataclasses.replace(self.codec, layers=(self.codec.layers[layer_idx],))
        coder = one.coder(0, keys.dtype, keys.device)
        codes = coder.encode(geometry.unrotate(keys, positions) if rotates else keys, values)
        read = coder.decode(codes)
        assert read is not None
        return geometry.rotate(read[0], positions) if rotates else read[0], read[1]
