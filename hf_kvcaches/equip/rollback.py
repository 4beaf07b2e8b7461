"""Taking tokens back: drafts that were refused, and edits that failed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from hf_kvcaches.equip.rotation import KeyRotation
from hf_kvcaches.equip.slots import SlotTable
from hf_kvcaches.equip.storage import Flat, Slots
from hf_kvcaches.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class Undo:
    """What an `EquipLayer` was before a change."""

    tokens: int  # new ones that it took
    slots: Slots | None  # those that a step overwrote, (batch, 1 or kv_heads, 1); None for all
    content: Any
    table: SlotTable
    storage: Flat
    rotation: KeyRotation

    @classmethod
    def of(cls, layer: Any, slots: Slots | None = None, tokens: int = 0) -> Undo:
        """The layer as it is."""
        exported = {name: tensor.clone() for name, tensor in layer.storage.export().items()} if slots is None else None
        content = exported if slots is None else layer.storage.gather(slots)
        return cls(tokens, slots, content, layer.table.clone(), layer.storage, layer.rotation)

    def restore(self, layer: Any) -> None:
        """Make the layer what it was. Of several changes the newest is undone first."""
        layer.table, layer.storage, layer.rotation = self.table, self.storage, self.rotation
        if self.slots is None:
            layer.storage.restore(self.content, self.table.kept(), layer.slots)
        else:
            layer.storage.write(self.slots, self.content)
        layer.table.reserve(layer.storage.capacity)


def take_back(layer: Any, tokens: int) -> None:
    """Take the last tokens of an `EquipLayer` back, or refuse."""
    table, journal = layer.table, layer.journal or []
    if not 0 <= tokens <= layer.seen:
        raise ConfigError.of("tokens_to_remove", f"a number from -{layer.seen} to 0", -tokens, "crop(-n) removes the last n tokens.")
    recorded = [0, *accumulate(undo.tokens for undo in reversed(journal))]  # steps, and blocks with all of their tokens
    if tokens in recorded:
        with layer.storage.rewriting():
            for undo in reversed(journal[len(journal) - recorded.index(tokens) :]):
                undo.restore(layer)
    elif layer.policy.order_only and table.filled == table.seen and table.counts is None:  # every token is there, in order
        table.filled -= tokens
        table.positions[..., table.filled :] = -1
        table.scores[..., table.filled :] = -torch.inf
        table.find_distances(layer.rotation.unrotated)
        table.advance(-tokens)
        table.sink_keys = table.sink_keys if table.seen >= layer.settings.sinks else None
    else:
        why = "tokens were pruned or scored, so EquipCache can take back only what it has recorded"
        if layer.journal is not None:
            why = f"{tokens} tokens are to be taken back, and EquipCache remembers {recorded[-1]}: those since the last crop"
        raise UnsupportedError(
            f"crop: {why}. Call activate_past_recording() before the tokens that may be taken back, or build the cache anew from the "
            "shorter text."
        )
