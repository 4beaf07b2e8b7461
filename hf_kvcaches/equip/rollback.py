"""Taking tokens back: drafts that were refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

from hf_kvcaches.equip.rotation import Given
from hf_kvcaches.equip.slots import SlotTable
from hf_kvcaches.equip.storage import Flat, Slots
from hf_kvcaches.errors import UnsupportedError


@dataclass(frozen=True)
class Undo:
    """What a step or a block changed.

    Args:
        tokens: How many it took.
        table: As it was before.
        slot: The slot that a step overwrote, (batch, 1 or kv_heads, 1), with what was in it; None for all of them.
        raw: That, or a snapshot of the storage.
        storage: The one that is restored.
        rotation: As it was before.
    """

    tokens: int
    table: SlotTable
    slot: Slots | None
    raw: Any
    storage: Flat
    rotation: Given


class Journal:
    """What came since the last crop, as a list of changes to undo."""

    def __init__(self) -> None:
        self._undos: list[Undo] = []

    @property
    def tokens(self) -> int:
        """How many can be taken back."""
        return sum(undo.tokens for undo in self._undos)

    def add(self, undo: Undo) -> None:
        """Note a change before it is made."""
        self._undos.append(undo)

    def covers(self, tokens: int) -> bool:
        """Whether the last tokens are whole entries of the list: steps, or a block with all of its tokens."""
        return tokens in {0, *accumulate(undo.tokens for undo in reversed(self._undos))}

    def last(self, tokens: int) -> Iterator[Undo]:
        """The changes that the last tokens made, the newest first; they are forgotten.

        Args:
            tokens: How many.
        """
        if not self.covers(tokens):
            raise UnsupportedError(
                f"crop: {tokens} tokens are to be taken back, and EquipCache remembers {self.tokens}: those since the last crop. "
                "Call activate_past_recording() before the tokens that may be taken back, or build the cache anew from the shorter text."
            )
        while tokens:
            undo = self._undos.pop()
            tokens -= undo.tokens
            yield undo

    def clear(self) -> None:
        """Forget everything; what comes is recorded anew."""
        self._undos = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)()
        # What a snapshot holds may be written to once it is restored.
        copied._undos = [copy.deepcopy(undo, memo) for undo in self._undos]
        return copied

    def __reduce__(self) -> tuple[type[Journal], tuple[()]]:
        return Journal, ()
