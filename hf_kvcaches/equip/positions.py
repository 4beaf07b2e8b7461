"""Where the tokens of a layer stand: which are real, and to which position their keys are rotated."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.core.call import Call
from hf_kvcaches.core.step import Pass
from hf_kvcaches.equip.rotation import Shifted, Unrotated
from hf_kvcaches.equip.slot_layer import SlotLayer
from hf_kvcaches.equip.storage import Flat, Streamed
from hf_kvcaches.errors import UnsupportedError


class PositionedLayer(SlotLayer):
    """Knows positions."""

    def enter(self, call: Call, tokens: int, device: torch.device) -> Pass:
        """The pass that a block of new tokens belongs to."""
        table = self.table
        before = table.seen if table.counts is None else table.counts.view(-1, 1).long()
        running = self.passes.enter(call, table.seen, tokens, device, before)
        if running.allowed is not None:
            require_one(running.allowed)
        self.choose_angles(running.positions, bool(table.seen))
        return running

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        super().import_state(tensors, values)
        self.choose_angles(lambda: self.table.seen - 1, False)

    def choose_angles(self, positions: Any, begun: bool) -> None:
        """Follow a model whose angles depend on how far a text reaches; refuse a text that passes from the ones to the others.

        Args:
            positions: Makes the model's positions of the new tokens, or the largest one.
            begun: Whether there are keys that were rotated by the angles chosen before.
        """
        rotation = self.rotation
        if self.geometry.changes_at is None or not isinstance(rotation, Unrotated | Shifted):
            return
        now = self.geometry.at(positions(), rotation.geometry if begun else None)
        if not now.rotates_like(rotation.geometry):
            self.rotation = rotation.by(now)

    def regularise(self, like: torch.Tensor, padded: bool, bias: torch.Tensor | None) -> None:
        """Give up what only holds for a stream without padding.

        Args:
            like: Has the rows and the device of the layer.
        """
        if padded:
            self.table.pad(like.shape[0], like.device)
        if padded or self.table.counts is not None or bias is not None:
            self.unshift()

    def unshift(self) -> None:
        """Of a stream, rotate keys on the way from now on: what is evicted next need not be the oldest token, or rows differ."""
        if isinstance(self.rotation, Shifted):
            self.unrotate(0)

    def unrotate(self, ahead: int | torch.Tensor) -> None:
        """Rotate keys on the way from now on, and count positions within the cache.

        Args:
            ahead: How far the model's positions are ahead of the row's own count of tokens, a number or (batch or 1, 1, 1).
        """
        table, storage, rotation = self.table, self.storage, self.rotation.otherwise
        if rotation is None:
            return
        self.record(None, 0)
        if isinstance(storage, Streamed):
            self.own()
            storage.follow(None)
        held = None if table.positions is None else storage.read(table.used)
        if isinstance(storage, Streamed):
            self.replace_storage(Flat(self.settings.backend))
        if held is not None:
            (keys, values), positions = held, table.positions[..., : table.used]
            keys = rotation.undo(positions.clamp(min=0) + ahead)(keys)
            self.storage.prepare(keys, positions >= 0, torch.ones(keys.shape[0], 1, 1, 1, dtype=torch.bool, device=keys.device))
            with self.storage.rewriting():
                self.storage.hold(self.storage.encode(keys, values), self.slots)
                self.storage.reserve(table.positions.shape[-1], self.slots)
            table.find_distances(True)
            table.reserve(self.storage.capacity)
        self.rotation = rotation

    def replace_storage(self, storage: Flat) -> None:
        """Have keys and values lie elsewhere; the storage until now gives its memory back."""
        self.storage.clear()
        self.storage = storage

    def holding(self) -> torch.Tensor | None:
        """True for slots in use that hold a token, (batch, 1 or kv_heads, slots in use), or None where all do."""
        whole = not torch.compiler.is_compiling() and self.table.filled is not None
        return None if whole or self.table.positions is None else self.table.positions >= 0

    def columns(self, bias: torch.Tensor, tokens: int) -> torch.Tensor:
        """The columns of a bias by position that belong to slots in use, (batch, 1 or kv_heads, slots in use).

        Args:
            tokens: How many of its last columns belong to tokens that are in no slot.
        """
        table = self.table
        if not self.rotation.unrotated:
            return table.text_index().clamp(min=0)
        return (bias.shape[-1] - tokens - 1 - table.distances[..., : table.used]).clamp(min=0)

    def require_pruned(self) -> None:
        """Refuse single tokens behind a context that waits to be pruned."""
        if self.waiting and self.table.seen:
            raise UnsupportedError(
                f"policy: {self.policy.name!r} prunes in cache.compress(model), which has to be called after the context and before the "
                "first token that follows. A context may come in several calls of more than one token each."
            )


def require_one(mask: torch.Tensor) -> None:
    """Refuse a mask, (batch or 1, heads, tokens, tokens of the text), that differs by head."""
    if mask.shape[1] != 1:
        raise UnsupportedError("attention_mask: EquipCache can't follow a mask that differs by head. Give one for all heads.")
