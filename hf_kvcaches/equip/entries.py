"""Kept and new tokens side by side, before some of them are pruned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hf_kvcaches.equip.frames import rotated_to
from hf_kvcaches.equip.tokens import at_slots, order_of

if TYPE_CHECKING:
    from hf_kvcaches.equip.layer import EquipLayer

_OF_STATE = ("attention", "gathering", "scores")
_PER_TOKEN = ("keys", "values", "positions", "rotated_to", "source", *_OF_STATE)


@dataclass(frozen=True)
class Entries:
    """Tokens that may stay: those kept, slot by slot, then new ones; or in order of position, what is empty or padding last.

    Args:
        keys: (batch, kv_heads, tokens, head_dim), as they are kept.
        values: (batch, kv_heads, tokens, value_dim).
        positions: (batch, 1 or kv_heads, tokens), int32, -1 where there is none.
        rotated_to: To which position keys are rotated, as `positions`; None where they have no rotation of this package.
        source: The slots that they are in, as `positions`, -1 for new tokens; None where all are new.
        attention: (batch, kv_heads, tokens), float32, or None.
        gathering: As in `SlotState`.
        scores: (batch, 1 or kv_heads, tokens), NaN for new tokens; None where nothing was scored yet.
        queries: Of the new tokens, (batch, heads, tokens, head_dim), or None where the policy is shown none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    rotated_to: torch.Tensor | None = None
    source: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    gathering: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    queries: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: EquipLayer) -> Entries:
        """What a layer holds, slot by slot."""
        state, used = layer.state, layer.state.used()
        keys, values = layer.store.read(used)
        slots = {name: tensor[..., :used] for name in _OF_STATE if (tensor := getattr(state, name)) is not None}
        source = torch.arange(used, device=keys.device).expand_as(layer.positions)
        return cls(keys, values, layer.positions, rotated_to(layer), source, **slots)

    def pick(self, index: torch.Tensor) -> Entries:
        """The tokens at some indices, (batch, 1 or kv_heads, tokens to pick)."""
        return self._map(lambda tensor: at_slots(tensor, index))

    def first(self, count: int) -> Entries:
        """The first tokens."""
        return self._map(lambda tensor: tensor[:, :, :count])

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Entries:
        changed = {name: function(tensor) for name in _PER_TOKEN if (tensor := getattr(self, name)) is not None}
        return replace(self, **changed)

    def hide(self, empty: torch.Tensor) -> Entries:
        """With some of the tokens empty, (batch, kv_heads, tokens)."""
        return replace(self, positions=torch.where(empty, -1, self.positions))

    def in_order(self) -> Entries:
        """In order of position, what is empty last."""
        return self.pick(order_of(self.positions))

    def kept(self) -> torch.Tensor:
        """How many there are, (batch, 1 or kv_heads, 1)."""
        return (self.positions >= 0).sum(-1, keepdim=True)

    def behind(self, old: Entries) -> Entries:
        """Old tokens, then these new ones."""
        rows, count = self.keys.shape[0], self.keys.shape[2]
        heads = max(old.positions.shape[1], self.positions.shape[1])

        def joined(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
            return torch.cat([before.expand(rows, heads, -1), after.expand(rows, heads, -1)], -1)

        def padded(tensor: torch.Tensor | None, fill: float) -> torch.Tensor | None:
            return None if tensor is None else torch.nn.functional.pad(tensor, (0, count), value=fill)

        return replace(
            self,
            keys=torch.cat([old.keys, self.keys], 2),
            values=torch.cat([old.values, self.values], 2),
            positions=joined(old.positions, self.positions),
            rotated_to=None if old.rotated_to is None or self.rotated_to is None else joined(old.rotated_to, self.rotated_to),
            source=padded(old.source, -1),
            attention=padded(old.attention, 0.0),
            gathering=padded(old.gathering, 0.0),
            scores=padded(old.scores, torch.nan),
        )
