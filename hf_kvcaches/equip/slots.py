"""Which token each slot holds, and what it is worth."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from hf_kvcaches.equip.policies.tokens import UNSCORED
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
    """

    positions: torch.Tensor = None  # type: ignore[assignment]  # (batch, 1 or kv_heads, slots), int32; -1: empty
    # Like `positions`, float32: +inf for sinks and for slots that a head does not have, -inf for empty ones, above `UNSCORED` for tokens
    # that were not scored yet. The lowest is evicted next.
    scores: torch.Tensor = None  # type: ignore[assignment]
    distances: torch.Tensor = None  # type: ignore[assignment]  # tokens of the cache that came since, where keys are rotated by it
    text: torch.Tensor | None = None  # the token's index in the text as it was fed in, int64; None where no row was ever padded
    counts: torch.Tensor | None = None  # real tokens of each row so far, (batch, 1, 1), int32; None where no row was ever padded
    gathering: torch.Tensor | None = None  # what slots got from the queries since the last scoring, (batch, kv_heads, slots), float32
    queries: torch.Tensor | None = None  # these queries, (batch, heads, interval, head_dim), as the model rotated them
    asked: torch.Tensor | None = None  # queries of the context for a later refit, rotated behind its end
    sink_keys: torch.Tensor | None = None  # of a stream's first slots, as the model rotated them; None before they move
    rooms: torch.Tensor | None = None  # how many slots each head has, (batch, kv_heads, 1); None where all have as many
    clock: torch.Tensor | None = None  # `seen` as a tensor, for compiled graphs, which take a number in Python for a constant
    seen: int = 0  # tokens fed in, padding included
    filled: int | None = 0  # slots in use, where these are the first ones of all rows and heads; None where rows or heads differ
    since: int = 0  # steps since the last scoring
    fewest: int = 0  # no row has fewer real tokens than so many
    stale: bool = False  # whether the numbers in Python are older than the clock

    @property
    def used(self) -> int:
        """How many slots, from the first on, may hold a token."""
        if self.positions is None:
            return 0
        return self.positions.shape[-1] if torch.compiler.is_compiling() or self.filled is None else self.filled

    @property
    def count(self) -> int | torch.Tensor:
        """Real tokens of each row so far: a number, or (batch, 1, 1); in a graph a tensor."""
        if self.counts is not None:
            return self.counts
        return self.seen if self.clock is None or not torch.compiler.is_compiling() else self.clock

    def kept(self) -> torch.Tensor:
        """How many tokens are kept, (batch, 1 or kv_heads, 1); no rows before the first token."""
        if self.positions is None:
            return torch.zeros(0, 1, 1, dtype=torch.long)
        return (self.positions >= 0).sum(-1, keepdim=True)

    def text_index(self) -> torch.Tensor:
        """The index in the text of the token in each slot in use, (batch, 1 or kv_heads, slots in use); -1: empty."""
        return (self.positions.long() if self.text is None else self.text)[..., : self.used]

    def insert(self, slot: Slots, real: torch.Tensor | None, sinks: int, first: float | None) -> None:
        """Put the new token of each row, or of those that are `real`, into a slot, (batch, 1 or kv_heads, 1), with its `first` score."""
        graph = torch.compiler.is_compiling()
        seen: Any = self.clock if graph else self.seen
        # By the text's count: only the order within a row matters.
        score: Any = (seen if isinstance(seen, int) else seen.float()) * 2.0**77 + UNSCORED if first is None else first
        count = seen if self.counts is None else self.counts
        if isinstance(count, int):
            score = math.inf if count < sinks else score
        elif graph or self.fewest < sinks:
            score = torch.where(count < sinks, math.inf, score)
        if self.distances is not None:
            nearer = self.distances < self.distances.gather(2, slot)
            self.distances.add_(nearer if real is None else nearer & real)
        for name, value in {"positions": count, "scores": score, "distances": 0, "text": seen, "gathering": 0.0}.items():
            if (tensor := getattr(self, name)) is not None:
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

    def append(self, positions: torch.Tensor, text: torch.Tensor | None) -> None:
        """Put new tokens, (batch, 1, tokens), behind the slots in use. They have no score yet."""
        if used := self.used:
            self.scores = torch.nn.functional.pad(self.scores[..., :used], (0, positions.shape[-1]), value=math.inf)
        for name, tensor in {"positions": positions, "text": text}.items():
            if tensor is not None and used:
                old = getattr(self, name)[..., :used]
                tensor = torch.cat([old, tensor.expand(old.shape[0], old.shape[1], -1)], -1)
            setattr(self, name, tensor)
        self.filled = self.positions.shape[-1] if self.counts is None and self.filled is not None else None

    def install(self, index: Slots | None, lengths: torch.Tensor | None, rooms: torch.Tensor | None, compact: bool) -> None:
        """Make tokens of the slots in use the content of the first slots.

        Args:
            index: Which ones, in order of position, (batch, 1 or kv_heads, tokens); None for all as they are.
            lengths: How many of these count, where heads differ, (batch, kv_heads, 1); `rooms` is how many slots each head has then.
            compact: Whether keys are rotated by their distances.
        """
        used = self.used
        empty = None if index is None or lengths is None else torch.arange(index.shape[-1], device=index.device) >= lengths
        for name in ("positions", "scores", "text"):
            if (tensor := getattr(self, name)) is not None:
                tensor = tensor[..., :used]
                if index is not None:
                    tensor = tensor.expand(-1, max(index.shape[1], tensor.shape[1]), -1).take_along_dim(index, -1)
                if empty is not None:
                    tensor = tensor.masked_fill(empty, _EMPTY[name])
                setattr(self, name, tensor.contiguous())
        self.rooms, self.since = rooms, 0
        if rooms is None and self.filled is not None:
            self.filled = self.positions.shape[-1]
        else:
            self.find_filled()
        self.find_distances(compact)

    def advance(self, tokens: int) -> None:
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
        self.filled = None
        if self.rooms is None:
            low, high = self.kept().aminmax()
            self.filled = int(low) if bool(low == high) else None

    def find_distances(self, compact: bool) -> None:
        """Set the distances of slots in any order from the positions, or leave them out."""
        self.distances = None  # type: ignore[assignment]
        if compact:
            order = self.positions.argsort(-1, descending=True).argsort(-1)
            self.distances = torch.where(self.positions < 0, _EMPTY_DISTANCE, order).to(torch.int32)

    def pad(self, rows: int, device: torch.device) -> None:
        """Count each row's tokens by itself from now on."""
        if self.counts is None:
            self.counts = torch.full((rows, 1, 1), self.seen, dtype=torch.int32, device=device)
            self.text = None if self.positions is None else self.positions.long()
            self.fewest = self.seen

    def reserve(self, capacity: int) -> None:
        """Make room for a number of slots, and where heads differ, for no more."""
        for name, fill in _EMPTY.items():
            if (tensor := getattr(self, name)) is not None:
                missing = capacity - tensor.shape[-1]
                if missing > 0 or (missing and self.rooms is not None):
                    setattr(self, name, torch.nn.functional.pad(tensor, (0, missing), value=fill))
        if self.rooms is not None:
            missing = torch.arange(self.scores.shape[-1], device=self.rooms.device) >= self.rooms
            self.scores = self.scores.masked_fill(missing, math.inf)  # not in place: rows picked by a slice may be from inference mode
            if self.distances is not None:
                self.distances = self.distances.masked_fill(missing, 0)  # steps add no more to it than to that of the oldest token

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], *, rows: bool = False) -> None:
        """Replace all tensors, or with `rows` those that belong to rows."""
        for name, tensor in self.tensors().items():
            if not (rows and name == "clock"):
                setattr(self, name, function(tensor))

    def export(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {name: tensor for name, tensor in self.tensors().items() if name != "clock"}
        return tensors, {name: getattr(self, name) for name in _COUNTERS}

    @classmethod
    def imported(cls, tensors: dict[str, Any], counters: dict[str, Any]) -> SlotTable:
        """What `export` gave."""
        known = {field.name for field in fields(cls)} - {"clock"}
        wrong = (set(tensors) - known) | (set(counters) ^ set(_COUNTERS))
        numbers = [number for name, number in counters.items() if name != "filled" or number is not None]
        if wrong or not all(type(number) is int and 0 <= number < 1 << 40 for number in numbers):
            raise ArtifactError(f"The stored state of an EquipLayer doesn't fit: {sorted(wrong) or counters}. Save the cache again.")
        return cls(**tensors, **counters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.map(torch.clone)  # deepcopy refuses tensors that are part of an autograd graph
        return copied
