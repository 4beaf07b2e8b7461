"""Which token each slot holds, and what it is worth."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from hf_kvcaches.equip.policies.tokens import UNSCORED, unscored
from hf_kvcaches.equip.storage import Slots
from hf_kvcaches.errors import ArtifactError

_EMPTY_DISTANCE = 1 << 30
# What a slot that is added holds, by field.
_EMPTY: dict[str, float] = {"positions": -1, "scores": -math.inf, "distances": _EMPTY_DISTANCE, "text": -1, "gathering": 0.0}
_COUNTERS = ("seen", "filled", "since", "fewest")


@dataclass
class SlotTable:
    """The tokens of one layer, slot by slot, in any order; after a block in order of position.

    A token's position is the number of real tokens before it in its row: padding is not counted. Tensors are None before the first token.

    Args:
        positions: (batch, 1 or kv_heads, slots), int32; -1: empty.
        scores: (batch, 1 or kv_heads, slots), float32: +inf for sinks and for slots that a head does not have, -inf for empty ones, above
            `UNSCORED` for tokens that were not scored yet. The lowest is evicted next.
        distances: Tokens of the cache that came since, as `positions`; only where keys are rotated by it.
        text: The index of a token in the text as it was fed in, as `positions`, int64; None where no row was ever padded.
        counts: Real tokens of each row so far, (batch, 1, 1), int32; None where no row was ever padded.
        gathering: What the queries since the last scoring gave to each slot, (batch, kv_heads, slots), float32.
        queries: These queries, (batch, heads, interval, head_dim), as the model rotated them.
        asked: Queries of the context, rotated behind its end, that a later refit needs, (batch, heads, queries, head_dim).
        rooms: How many slots each head has, (batch, kv_heads, 1); None where all have as many.
        clock: `seen` as a tensor, for compiled graphs, which take a number in Python for a constant.
        seen: Tokens fed in, padding included.
        filled: Slots in use where these are the first ones of all rows and heads; None where rows or heads differ.
        since: Steps since the last scoring.
        fewest: No row has fewer real tokens than so many.
    """

    positions: torch.Tensor = None  # type: ignore[assignment]
    scores: torch.Tensor = None  # type: ignore[assignment]
    distances: torch.Tensor = None  # type: ignore[assignment]
    text: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    gathering: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    asked: torch.Tensor | None = None
    rooms: torch.Tensor | None = None
    clock: torch.Tensor | None = None
    seen: int = 0
    filled: int | None = 0
    since: int = 0
    fewest: int = 0
    stale: bool = False

    @property
    def used(self) -> int:
        """How many slots, from the first on, may hold a token."""
        if self.positions is None:
            return 0
        whole = torch.compiler.is_compiling() or self.filled is None
        return self.positions.shape[-1] if whole else self.filled  # type: ignore[return-value]

    @property
    def count(self) -> int | torch.Tensor:
        """Real tokens of each row so far: a number, or (batch, 1, 1); in a graph a tensor."""
        if self.counts is not None:
            return self.counts
        return self.clock if torch.compiler.is_compiling() and self.clock is not None else self.seen

    def kept(self) -> torch.Tensor:
        """How many tokens are kept, (batch, 1 or kv_heads, 1); no rows before the first token."""
        if self.positions is None:
            return torch.zeros(0, 1, 1, dtype=torch.long)
        return (self.positions >= 0).sum(-1, keepdim=True)

    def insert(self, slot: Slots, real: torch.Tensor | None, sinks: int, first: float | None) -> None:
        """Say that the new token of each row is in a slot, and count it.

        Args:
            slot: (batch, 1 or kv_heads, 1).
            real: Which rows have a new token, (batch, 1, 1), or None for all.
            sinks: How many of a row's first tokens always stay.
            first: The score of a token that has just come; None: it has none.
        """
        graph = torch.compiler.is_compiling() and self.clock is not None
        seen: int | torch.Tensor = self.clock if graph else self.seen  # type: ignore[assignment]
        # By the text's count: only the order within a row matters.
        score: Any = first
        if first is None:
            score = unscored(seen) if isinstance(seen, torch.Tensor) else seen * 2.0**77 + UNSCORED
        count = seen if self.counts is None else self.counts
        if isinstance(count, int):
            score = math.inf if count < sinks else score
        elif graph or self.fewest < sinks:
            score = torch.where(count < sinks, math.inf, score)
        written: list[tuple[torch.Tensor, float | torch.Tensor]] = [(self.positions, count), (self.scores, score)]
        if self.distances is not None:
            nearer = self.distances < self.distances.gather(2, slot)
            self.distances.add_(nearer if real is None else nearer & real)
            written.append((self.distances, 0))
        if self.text is not None:
            written.append((self.text, seen))
        if self.gathering is not None:
            written.append((self.gathering, 0.0))
        for tensor, value in written:
            at = slot.expand(-1, tensor.shape[1], -1)
            if real is not None:
                value = torch.where(real, value, tensor.gather(2, at))
            tensor.scatter_(2, at, value.to(tensor.dtype).expand(at.shape) if isinstance(value, torch.Tensor) else value)
        if self.counts is not None:
            self.counts = self.counts + (1 if real is None else real)
        if self.clock is not None:
            self.clock.add_(1)
        if graph:
            self.stale = True
        else:
            self.seen += 1
            self.fewest += real is None

    def advance(self, tokens: int) -> None:
        """Count tokens that were fed in."""
        self.seen += tokens
        if self.clock is not None:
            self.clock.fill_(self.seen)

    def catch_up(self) -> None:
        """Read the counters anew after compiled steps."""
        if self.stale:
            assert self.clock is not None
            self.seen, self.stale = int(self.clock), False
            self.find_filled()

    def find_filled(self) -> None:
        """Set `filled` from the positions."""
        kept = self.kept()
        low, high = kept.aminmax()
        self.filled = int(low) if self.rooms is None and bool(low == high) else None

    def pad(self, rows: int, device: torch.device) -> None:
        """Count each row's tokens by itself from now on."""
        if self.counts is None:
            self.counts = torch.full((rows, 1, 1), self.seen, dtype=torch.int32, device=device)
            self.text = None if self.positions is None else self.positions.long()
            self.fewest = self.seen

    def text_index(self) -> torch.Tensor:
        """For each slot in use the index of its token in the text, (batch, 1 or kv_heads, slots in use); -1: empty."""
        return (self.positions.long() if self.text is None else self.text)[..., : self.used]

    def reserve(self, capacity: int) -> None:
        """Make room for a number of slots."""
        for name, fill in _EMPTY.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[-1] < capacity:
                setattr(self, name, torch.nn.functional.pad(tensor, (0, capacity - tensor.shape[-1]), value=fill))

    def find_distances(self, rotated_by_them: bool) -> None:
        """Set the distances of slots in any order from the positions, or leave them out."""
        self.distances = None  # type: ignore[assignment]
        if rotated_by_them:
            order = self.positions.argsort(-1, descending=True).argsort(-1)
            self.distances = torch.where(self.positions < 0, _EMPTY_DISTANCE, order).to(torch.int32)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], *, rows: bool = False) -> None:
        """Replace all tensors, or with `rows` those that belong to rows."""
        for name, tensor in self.tensors().items():
            if not (rows and name == "clock"):
                setattr(self, name, function(tensor))

    def clone(self) -> Self:
        """A copy that shares no tensor."""
        copied = copy.copy(self)
        copied.map(torch.clone)
        return copied

    def export(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors of rows, and counters, for a file."""
        tensors = {name: tensor for name, tensor in self.tensors().items() if name != "clock"}
        return tensors, {name: getattr(self, name) for name in _COUNTERS}

    @classmethod
    def imported(cls, tensors: dict[str, torch.Tensor], counters: dict[str, Any]) -> SlotTable:
        """What `export` gave."""
        known = {field.name for field in fields(cls)} - {"clock"}
        wrong = (set(tensors) - known) | (set(counters) ^ set(_COUNTERS))
        numbers = [number for name, number in counters.items() if name != "filled" or number is not None]
        if wrong or not all(type(number) is int and 0 <= number < 1 << 40 for number in numbers):
            raise ArtifactError(f"The stored state of an EquipLayer doesn't fit: {sorted(wrong) or counters}. Save the cache again.")
        values: dict[str, Any] = {**tensors, **counters}
        return cls(**values)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.clone()
