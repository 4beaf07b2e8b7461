"""Where the tokens of a layer stand: which are real, and to which position their keys are rotated."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.core.call import Call
from hf_kvcaches.core.step import Pass, TokenMask
from hf_kvcaches.equip.rotation import Shifted, Turn, Unrotated
from hf_kvcaches.equip.slot_layer import SlotLayer
from hf_kvcaches.equip.storage import Flat
from hf_kvcaches.equip.streamed import Streamed
from hf_kvcaches.errors import UnsupportedError

# What a step's mask says: which tokens of the text the query may see, (batch or 1, tokens), or None for all; and which rows have a new
# token, (batch or 1, 1, 1), or None for all.
StepMask = tuple[torch.Tensor | None, torch.Tensor | None]


class PositionedLayer(SlotLayer):
    """Knows positions."""

    def enter(self, call: Call, tokens: int, device: torch.device) -> Pass:
        """The pass that a block of new tokens belongs to."""
        table = self.table
        before = table.seen if table.counts is None else table.counts.view(-1, 1).long()
        running = self.passes.enter(call, table.seen, tokens, device, before)
        if running.allowed is not None:
            _require_one(running.allowed)
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

    def read_step(self, mask: Any) -> StepMask:
        """What the mask of a decode step says."""
        if mask is None:
            return None, None
        seen = self.table.seen
        if not isinstance(mask, torch.Tensor):  # flex attention's
            read = TokenMask.read(mask, seen, 1)
            mask = torch.ones(1, 1, device=self.device, dtype=torch.bool) if read.shown is None else read.shown
        if mask.ndim == 4:
            _require_one(mask)
            mask = mask[:, 0, -1]
        allowed = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
        if allowed.shape[1] not in (1, seen + 1):
            raise UnsupportedError(
                f"attention_mask: this cache can't follow a mask over {allowed.shape[1]} tokens behind {seen} others. "
                "Pass a padding mask, (batch, tokens)."
            )
        return allowed if allowed.shape[1] > 1 else None, allowed[:, -1:, None]

    def places(self, positions: torch.Tensor | None) -> torch.Tensor:
        """The model's position of the newest token, (batch or 1, 1); counted where it does not tell."""
        if positions is not None:  # the axes of an image agree for text
            return positions[0, ..., -1:] if positions.ndim == 3 else positions[..., -1:]
        count = self.table.count
        if isinstance(count, int):
            return torch.full((1, 1), count - 1, device=self.device)
        return count.reshape(-1, 1).long() - 1

    def undo_turn(self, positions: torch.Tensor | None) -> Turn:
        """From the model's position of the newest token to none."""
        rotation = self.rotation
        assert isinstance(rotation, Unrotated)
        if torch.compiler.is_compiling():  # a graph would be compiled anew for each cache's `id`
            return rotation.undo(self.places(positions))
        turn: Turn = self.passes.memo(("undo", id(rotation)), positions, lambda: rotation.undo(self.places(positions)))
        return turn

    def follow(self, newest: torch.Tensor | None) -> None:
        storage, rotation, table = self.storage, self.rotation, self.table
        if not isinstance(storage, Streamed) or not isinstance(rotation, Shifted) or storage.sink_keys is None:
            return None
        if torch.compiler.is_compiling():
            assert isinstance(table.count, torch.Tensor)
            return storage.follow(rotation.follow(self.places(newest), table.count.clamp(max=self.slots)))
        if table.seen == table.filled:
            return storage.follow(None) if storage.moved else None
        kept: Any = table.filled
        name = ("follow", id(rotation.otherwise), kept)
        return storage.follow(self.passes.memo(name, newest, lambda: rotation.follow(self.places(newest), kept)))

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
        held = None if table.positions is None else storage.read(table.used)
        if isinstance(storage, Streamed):
            held = None if held is None else (storage.as_rotated()[:, :, : table.used], held[1])
            self.replace_storage(Flat(self.settings.backend))
        if held is not None and table.positions is not None:
            (keys, values), positions = held, table.positions[..., : table.used]
            keys = rotation.undo(positions.clamp(min=0) + ahead)(keys)
            self.storage.prepare(keys, positions >= 0, torch.ones(keys.shape[0], 1, 1, 1, dtype=torch.bool, device=keys.device))
            with self.storage.rewriting():
                self.storage.hold(self.storage.encode(keys, values), self.slots)
                self.storage.reserve(table.positions.shape[-1], self.slots)
            table.find_distances()
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
        assert table.distances is not None
        return (bias.shape[-1] - tokens - 1 - table.distances[..., : table.used]).clamp(min=0)

    def require_pruned(self) -> None:
        """Refuse single tokens behind a context that waits to be pruned."""
        if self.waiting and self.table.seen:
            raise UnsupportedError(
                f"policy: {self.policy.name!r} prunes in cache.compress(model), which has to be called after the context and before the "
                "first token that follows. A context may come in several calls of more than one token each."
            )


def _require_one(mask: torch.Tensor) -> None:
    """Refuse a mask, (batch or 1, heads, tokens, tokens of the text), that differs by head."""
    if mask.shape[1] != 1:
        raise UnsupportedError("attention_mask: EquipCache can't follow a mask that differs by head. Give one for all heads.")
