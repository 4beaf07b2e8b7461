"""Which token each slot holds, and what it is worth."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.equip.tokens import order_of
from hf_kvcaches.errors import ArtifactError

# What a slot that is added holds, by field.
_EMPTY: dict[str, float] = {"positions": -1, "ranks": 0, "scores": 0.0, "attention": 0.0, "gathering": 0.0}
_COUNTERS = ("seen", "slots", "recent", "filled", "scaling", "deferring")
_SHARED = ("clock",)


@dataclass
class SlotState:
    """The tokens of one layer, slot by slot. Slots are in no order, but the first ones hold the sinks, in order.

    A token's position is its index among the tokens seen, counted so that the newest has the same in all rows: padding, wherever it was,
    lies before a row's `first`.

    Args:
        positions: (batch, 1 or kv_heads, slots), int32; -1: empty.
        ranks: The slots in order of position, counted from 0, as `positions`; only where keys are rotated to them for each query.
        scores: What the policy said, (batch, 1 or kv_heads, slots); None where the oldest token is evicted, or `attention` is the score.
        attention: What the observed queries gave to each slot, (batch, kv_heads, slots), float32.
        gathering: The same of the observation window that is not yet complete.
        gathered: How many queries are in `gathering`, (batch, 1, 1).
        queries: The last ones, as many as the policy has to see, (batch, heads, queries, head_dim), the newest at the end.
        shares: How many slots each head has, (batch, kv_heads, 1); None where each has `slots`.
        first: The position of each row's first real token, (batch,); None where no row is padded.
        padding: True where a token was real, (batch, tokens seen up to the last padding).
        clock: `seen` as a tensor, for compiled graphs, which take a number in Python for a constant.
        seen: Tokens fed in, padding included.
        slots: How many there may be.
        recent: How many of the newest tokens are protected.
        filled: Slots in use where all rows and heads agree: the first ones. None where they differ, or have different numbers of slots.
        scaling: What the model's attention multiplies scores with.
        deferring: Whether nothing is pruned yet, because the policy waits for `EquipCache.compress`.
        sinks_missing: Whether some of the first tokens, which always stay, were evicted or edited away.
        stale: Whether a compiled graph has moved `clock` since `seen` and `filled` were read from it.
    """

    positions: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    gathering: torch.Tensor | None = None
    gathered: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    first: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    clock: torch.Tensor | None = None
    seen: int = 0
    slots: int = 0
    recent: int = 0
    filled: int | None = 0
    scaling: float = 1.0
    deferring: bool = False
    sinks_missing: bool = False
    stale: bool = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def clone(self) -> Self:
        """A copy that shares no tensor."""
        copied = copy.copy(self)
        copied.map(torch.clone)
        return copied

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], *, rows: bool = False) -> None:
        """Replaces all tensors, or with `rows` those that belong to rows."""
        for name, tensor in self.tensors().items():
            if not (rows and name in _SHARED):
                setattr(self, name, function(tensor))

    def reserve(self, capacity: int) -> None:
        """Makes room for a number of slots."""
        for name, fill in _EMPTY.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[-1] < capacity:
                setattr(self, name, torch.nn.functional.pad(tensor, (0, capacity - tensor.shape[-1]), value=fill))

    def count(self) -> int | torch.Tensor:
        """Tokens seen: a tensor in a compiled graph."""
        if torch.compiler.is_compiling() and self.clock is not None:
            return self.clock
        return int(self.clock) if self.stale and self.clock is not None else self.seen

    def catch_up(self) -> None:
        """Reads the counters anew after compiled steps."""
        if self.stale:
            assert self.clock is not None
            self.seen, self.stale = int(self.clock), False
            self.filled = self.common(self.kept_rows())

    def advance(self, tokens: int) -> None:
        """Counts new tokens, or negative ones that are taken back."""
        if self.clock is not None:
            self.clock.add_(tokens)
        if torch.compiler.is_compiling():
            self.stale = True
        else:
            self.seen += tokens

    def kept_rows(self) -> torch.Tensor:
        """How many tokens are kept, (batch, 1 or kv_heads, 1)."""
        assert self.positions is not None
        return (self.positions >= 0).sum(-1, keepdim=True)

    def kept(self) -> int | torch.Tensor:
        """How many tokens are kept: a number where all rows and heads agree and no graph is compiled, else `kept_rows`."""
        return self.kept_rows() if torch.compiler.is_compiling() or self.filled is None else self.filled

    def most(self) -> Any:
        """How many slots there may be: a number, or (batch, kv_heads, 1)."""
        return self.slots if self.shares is None else self.shares

    def candidates(self) -> torch.Tensor:
        """`positions`, with the greatest number for slots that a head doesn't have, so that they pass for recent and are never chosen."""
        assert self.positions is not None
        if self.shares is None:
            return self.positions
        missing = torch.arange(self.positions.shape[-1], device=self.positions.device) >= self.shares
        return self.positions.masked_fill(missing, torch.iinfo(self.positions.dtype).max)

    def common(self, numbers: torch.Tensor) -> int | None:
        """The number that all entries are, or None."""
        if self.shares is not None:
            return None
        low, high = numbers.aminmax()
        return int(low) if bool(low == high) else None

    def has_room(self) -> bool:
        """Whether an empty slot is known to take the next token everywhere."""
        return not torch.compiler.is_compiling() and self.filled is not None and self.filled < self.slots

    def fill_one(self) -> None:
        """Counts a token that each row has got; a compiled graph leaves that to `catch_up`."""
        if not torch.compiler.is_compiling() and self.filled is not None:
            self.filled = min(self.filled + 1, self.slots)

    def used(self) -> int:
        """How many slots, from the first on, may hold a token."""
        if self.positions is None:
            return 0
        return self.positions.shape[-1] if torch.compiler.is_compiling() or self.filled is None else self.filled

    def holding(self) -> torch.Tensor | None:
        """True for slots in use that hold a token, (batch, 1 or kv_heads, slots in use), or None where all do."""
        whole = not torch.compiler.is_compiling() and self.filled is not None
        return None if whole or self.positions is None else self.positions >= 0

    def row_tokens(self) -> int | torch.Tensor:
        """How many real tokens each row has seen: a number, or (batch, 1, 1)."""
        return self.count() - self.row_start()

    def row_start(self) -> int | torch.Tensor:
        """The position of each row's first token: 0, or (batch, 1, 1)."""
        return 0 if self.first is None else self.first[:, None, None]

    def find_ranks(self) -> torch.Tensor:
        """The slots in use in order of position, counted from 0; empty ones last. (batch, 1 or kv_heads, slots in use)."""
        assert self.positions is not None
        return order_of(self.positions[..., : self.used()]).argsort(-1)

    def pass_over(self, valid: torch.Tensor, tokens: int) -> torch.Tensor:
        """Counts the padding among new tokens to what lies before a row's first token.

        Args:
            valid: True where a token is real, (batch, tokens).

        Returns:
            The new tokens' positions, (batch, 1, tokens), -1 for padding.
        """
        real = valid.sum(-1)
        pads = tokens - real
        if self.positions is not None:
            self.positions = torch.where(self.positions < 0, -1, self.positions + pads[:, None, None].to(self.positions.dtype))
        self.first = pads if self.first is None else self.first + pads
        before = valid.new_ones(valid.shape[0], 0) if self.padding is None else self.padding
        before = torch.nn.functional.pad(before, (0, self.seen - before.shape[1]), value=True)
        self.padding = torch.cat([before, valid], 1)
        positions = self.seen + tokens - real[:, None] + valid.cumsum(-1) - 1
        return torch.where(valid, positions, -1)[:, None]

    def text_positions(self, kv_heads: int) -> torch.Tensor:
        """For each slot the index of its token in the text as it was fed in, padding included, (batch, kv_heads, slots); -1: empty."""
        if self.positions is None:
            return torch.empty(0, 0, 0, dtype=torch.long)
        slots = self.slots if self.shares is None else int(self.shares.max())
        held = self.positions.long()[..., :slots]
        held = torch.nn.functional.pad(held, (0, slots - held.shape[-1]), value=-1)
        if self.first is not None and self.padding is not None:
            width, real = self.padding.shape[1], held - self.first[:, None, None]
            # Real tokens of the padded part first, in order; what came later follows without a gap.
            places = torch.argsort((~self.padding).to(torch.int8), dim=-1, stable=True)
            count = self.padding.sum(-1)[:, None, None]
            inside = torch.take_along_dim(places[:, None], real.clamp(0, width - 1), -1)
            held = torch.where(held < 0, -1, torch.where(real < count, inside, width + real - count))
        return held.expand(-1, kv_heads, -1)

    def note_queries(self, queries: LastQueries, valid: torch.Tensor | None, window: int) -> None:
        """Remembers the last `window` queries.

        Args:
            valid: True where a new token is real, (batch, tokens), or None for all.
        """
        new = queries.states.detach()
        before = new.new_zeros(*new.shape[:2], window, new.shape[3]) if self.queries is None else self.queries
        joined = torch.cat([before, new], 2)
        if valid is not None:
            joined = padding_first(joined, torch.cat([valid.new_ones(valid.shape[0], window), valid], 1))
        self.queries = joined[:, :, -window:]

    def add_attention(self, weights: torch.Tensor, slot: torch.Tensor, window: int | None) -> torch.Tensor | bool:
        """Adds one query's attention to what the policy observes; whether its window is complete, of all rows or (batch, 1, 1).

        Args:
            weights: (batch, kv_heads, slots in use), float32.
            slot: Of the new token, (batch, 1 or kv_heads, 1): what it has is the former token's.
            window: The policy's; None for all queries.
        """
        used = weights.shape[-1]
        assert self.attention is not None
        if window == 1:
            self.attention[..., :used].copy_(weights)
            return True
        slot = slot.expand(*weights.shape[:2], 1)
        self.attention.scatter_(2, slot, 0.0)
        if window is None:
            self.attention[..., :used].add_(weights)
            return True
        assert self.gathering is not None
        assert self.gathered is not None
        self.gathering.scatter_(2, slot, 0.0)
        self.gathering[..., :used].add_(weights)
        self.gathered = self.gathered + 1
        complete = self.gathered >= window
        if not bool(complete.any()):
            return False
        self.attention = torch.where(complete, self.gathering, self.attention)
        self.gathering = torch.where(complete, 0.0, self.gathering)
        self.gathered = torch.where(complete, 0, self.gathered)
        return complete

    def export(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors of rows, and counters, for a file."""
        tensors = {name: tensor for name, tensor in self.tensors().items() if name not in _SHARED}
        return tensors, {name: getattr(self, name) for name in _COUNTERS}

    @classmethod
    def imported(cls, tensors: dict[str, torch.Tensor], counters: dict[str, Any]) -> SlotState:
        """What `export` gave."""
        known = {field.name for field in fields(cls)} - set(_SHARED)
        wrong = (set(tensors) - known) | (set(counters) ^ set(_COUNTERS))
        numbers = [number for name, number in counters.items() if name != "filled" or number is not None]
        if wrong or not all(isinstance(number, int | float) and abs(number) < 1 << 40 for number in numbers):
            raise ArtifactError(f"The stored state of an EquipLayer doesn't fit: {sorted(wrong) or counters}. Save the cache again.")
        values: dict[str, Any] = {**tensors, **counters}
        return cls(**values)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.clone()


def padding_first(states: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """States in order, but for those of padding, which come first.

    Args:
        states: (batch, heads, tokens, head_dim).
        valid: True where a token is real, (batch, tokens).
    """
    order = valid.to(torch.int8).argsort(dim=1, stable=True)
    return states.gather(2, order[:, None, :, None].expand_as(states))
