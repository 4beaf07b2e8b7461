"""Taking tokens back: drafts that were refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

import torch

from hf_kvcaches.errors import UnsupportedError

if TYPE_CHECKING:
    from hf_kvcaches.equip.layer import EquipLayer
    from hf_kvcaches.equip.state import SlotState


@dataclass
class Undo:
    """What a step or a block changed.

    Args:
        tokens: How many it took.
        state: As it was before.
        slot: The slot that a step overwrote, (batch, 1 or kv_heads, 1), with what was in it; None for all of them.
        states: That, or a snapshot of the store.
    """

    tokens: int
    state: SlotState
    slot: torch.Tensor | None
    states: Any

    def apply(self, layer: EquipLayer) -> None:
        """Puts a layer back."""
        if self.slot is None:
            layer.store.restore(self.states)
        else:
            layer.store.write(self.slot, *self.states)
        layer.state = self.state
        layer.state.reserve(layer.store.capacity)


class Recording:
    """What came since the last crop, as a list of changes to undo."""

    def __init__(self) -> None:
        self._undos: list[Undo] = []
        self._before: SlotState | None = None

    @property
    def tokens(self) -> int:
        """How many can be taken back."""
        return sum(undo.tokens for undo in self._undos)

    def begin(self, layer: EquipLayer) -> None:
        """Notes the state before a step."""
        self._before = layer.state.clone()

    def note_slot(self, layer: EquipLayer, slot: torch.Tensor, *, rotates: bool) -> None:
        """Notes what a step is going to overwrite.

        Args:
            rotates: Whether it rotates other keys too.
        """
        assert self._before is not None
        states = layer.store.snapshot() if rotates else layer.store.at(slot)
        self._undos.append(Undo(1, self._before, None if rotates else slot, states))

    def note_drafts(self, layer: EquipLayer, slots: torch.Tensor) -> None:
        """Notes what drafts are going to overwrite, and counts them: one entry each, so that any number can be taken back.

        Args:
            slots: One after the other, (batch, 1, tokens).
        """
        states = layer.store.at(slots)
        for index in range(slots.shape[-1]):
            slot, token = slots[..., index : index + 1], slice(index, index + 1)
            self._undos.append(Undo(1, layer.state.clone(), slot, tuple(tensor[:, :, token] for tensor in states)))
            assert layer.state.positions is not None
            layer.state.positions.scatter_(2, slot, layer.state.seen)
            layer.state.fill_one()
            layer.state.advance(1)

    def note_block(self, layer: EquipLayer, tokens: int) -> None:
        """Notes everything before a block."""
        self._undos.append(Undo(tokens, layer.state.clone(), None, layer.store.snapshot()))

    def covers(self, tokens: int) -> bool:
        """Whether the last tokens are whole entries of the list: steps, or a block with all of its tokens."""
        return tokens in {0, *accumulate(undo.tokens for undo in reversed(self._undos))}

    def take_back(self, layer: EquipLayer, tokens: int) -> None:
        """Undoes the last tokens.

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
            undo.apply(layer)
            tokens -= undo.tokens

    def clear(self) -> None:
        """Forgets everything; what comes is recorded anew."""
        self._undos = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)()
        # What a snapshot holds may be written to once it is restored.
        copied._undos = [copy.deepcopy(undo, memo) for undo in self._undos]
        return copied

    def __reduce__(self) -> tuple[type[Recording], tuple[()]]:
        return Recording, ()
