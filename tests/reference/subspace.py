"""What `SubspaceCache` computes with a codec, written down plainly: all keys are kept, and those between the ends pass through codes."""

from typing import Any

import torch
from transformers import DynamicCache

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.rope import RotaryGeometry
from tests.reference.codec import decoded


class SubspaceOracle(DynamicCache):
    """Hands out keys and values for a model's own attention, one softmax over all tokens; `real` is False where a token is padding."""

    def __init__(self, config: Any, codec: KVCodec, *, sinks: int, recent: int, real: torch.Tensor | None = None) -> None:
        super().__init__(config=config)
        self.codec, self.sinks, self.recent, self.real, self.config = codec, sinks, recent, real, config

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        before = self.get_seq_length(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not self.codec.has_codes(layer_idx) or not before:
            return keys, values
        real = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool) if self.real is None else self.real[:, : keys.shape[2]]
        numbers = real.cumsum(1) - 1
        # A single token reads what is left once it is there; several are exact to each other.
        held = real if key_states.shape[2] == 1 else real[:, :before]
        # Whole tiles of 16 tokens behind the sinks are codes.
        tiles = (held.sum(1, keepdim=True) - self.sinks - self.recent).clamp(min=0) // 16
        middle = (numbers >= self.sinks) & (numbers < self.sinks + 16 * tiles)
        starts = numbers - (numbers - self.sinks) % 16
        read_keys, read_values = self._read(keys, values, layer_idx, starts.clamp(min=0))
        return torch.where(middle[:, None, :, None], read_keys, keys), torch.where(middle[:, None, :, None], read_values, values)

    def _read(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated, and values as their codes have them."""
        geometry = RotaryGeometry.from_config(self.config, layer_idx=layer_idx)
        rotates = self.codec.settings.rotation == "aware" and geometry.kind == "rope"
        plain = geometry.unrotate(keys, starts) if rotates else keys
        read_keys, read_values = decoded(self.codec.in_place.layers[layer_idx], plain, values)
        return (geometry.rotate(read_keys, starts) if rotates else read_keys).to(keys.dtype), read_values.to(values.dtype)
