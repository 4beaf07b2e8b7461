"""Slots of a stream: keys as the model rotated them, and sinks that follow the newest token."""

from __future__ import annotations

import torch

from hf_kvcaches.equip.rotation import Turn
from hf_kvcaches.equip.storage import Flat


class Streamed(Flat):
    """`Flat`, whose first slots hold the sinks once a token was evicted.

    Attributes:
        sink_keys: Keys of the sinks as the model rotated them, (batch, kv_heads, sinks, head_dim); None until then.
    """

    sink_keys: torch.Tensor | None = None
    moved: bool = False
    """Whether the slots hold them rotated."""

    def keep_sinks(self, sinks: int) -> None:
        """Keep the keys in the first slots as the model rotated them, unless that was done."""
        if self.sink_keys is None and self.keys is not None:
            self.sink_keys = self.keys[:, :, :sinks].clone()

    def follow(self, turn: Turn | None) -> None:
        """Rotate the sinks, or put them back."""
        assert self.keys is not None
        assert self.sink_keys is not None
        self.keys[:, :, : self.sink_keys.shape[2]] = self.sink_keys if turn is None else turn(self.sink_keys)
        self.moved = turn is not None

    def as_rotated(self) -> torch.Tensor:
        """All keys as the model rotated them, (batch, kv_heads, slots, head_dim)."""
        assert self.keys is not None
        if self.sink_keys is None:
            return self.keys
        return torch.cat([self.sink_keys, self.keys[:, :, self.sink_keys.shape[2] :]], 2)

    def export(self) -> dict[str, torch.Tensor]:
        return super().export() | ({} if self.sink_keys is None else {"sink_keys": self.sink_keys})
