"""The tokens of each row by their numbers: how many real ones of the row came before.

Rows of a batch are padded differently, and a row's tokens must lie where they would lie if the row were alone. So nothing here knows
columns, but for `Arrival`, which finds the real tokens in what a model feeds in. Where all rows are alike, which is nearly always, a span
is a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_kvcaches.core.growing import append
from hf_kvcaches.kernels.coefficients import TILE

# Buffers have room for one token more for each so many: coefficients are small, and copying them often is cheap.
RESERVE = 32


@dataclass(frozen=True)
class SlotSpan:
    """Neighbouring places, for each row its own."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, starts: Sequence[int], stops: Sequence[int], device: torch.device) -> SlotSpan:
        """A span of at least nothing in each row.

        Args:
            stops: The one after the last, if that is behind the first.
        """
        return cls(tuple(starts), tuple(max(each) for each in zip(starts, stops, strict=True)), device)

    @property
    def longest(self) -> int:
        """Of how many places the longest row's is."""
        return max(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @cached_property
    def same(self) -> bool:
        """Whether all rows' places are the same."""
        return len(set(self.starts)) == 1 and len(set(self.stops)) == 1

    @cached_property
    def aligned(self) -> bool:
        """Whether all rows begin at the same place."""
        return len(set(self.starts)) == 1

    @cached_property
    def even(self) -> bool:
        """Whether all rows have equally many."""
        return len({stop - start for start, stop in zip(self.starts, self.stops, strict=True)}) == 1

    @cached_property
    def index(self) -> torch.Tensor:
        """The places, (batch, longest); a shorter row's go on behind its last."""
        return self.first + torch.arange(self.longest, device=self.device)

    @cached_property
    def inside(self) -> torch.Tensor | None:
        """True where a row has the place of `index`, (batch, longest); None where all rows have all."""
        return None if self.even else self.index < self.last

    @cached_property
    def first(self) -> torch.Tensor:
        """The first place, (batch, 1)."""
        return torch.tensor(self.starts, device=self.device)[:, None]

    @cached_property
    def last(self) -> torch.Tensor:
        """The one after the last, (batch, 1)."""
        return torch.tensor(self.stops, device=self.device)[:, None]

    def moved(self, places: int) -> SlotSpan:
        """As many places, further on."""
        return SlotSpan(tuple(each + places for each in self.starts), tuple(each + places for each in self.stops), self.device)

    def times(self, width: int) -> SlotSpan:
        """The places of what consists of so many of them."""
        return SlotSpan(tuple(each * width for each in self.starts), tuple(each * width for each in self.stops), self.device)

    def evened(self) -> SlotSpan:
        """With as many places for each row as for the longest."""
        longest = self.longest
        return SlotSpan(self.starts, tuple(start + longest for start in self.starts), self.device)

    @cached_property
    def tiles(self) -> SlotSpan:
        """The whole tiles, counted in tiles."""
        return SlotSpan(tuple(each // TILE for each in self.starts), tuple(each // TILE for each in self.stops), self.device)

    @cached_property
    def loose(self) -> SlotSpan:
        """What comes behind the whole tiles."""
        return SlotSpan(tuple(each // TILE * TILE for each in self.stops), self.stops, self.device)

    def take(self, source: torch.Tensor, first: Sequence[int] | int = 0) -> torch.Tensor:
        """These places of a tensor, (batch, heads, longest, d). What a shorter row gets besides is any of its tokens.

        Args:
            source: (batch, heads, places, d).
            first: The place that comes first in it, of each row or of all.
        """
        if self.aligned and (isinstance(first, int) or len(set(first)) == 1):
            begin = self.starts[0] - (first if isinstance(first, int) else first[0])
            return source[:, :, begin : begin + self.longest]
        shift = first if isinstance(first, int) else torch.tensor(first, device=self.device)[:, None]
        return gathered(source, (self.index - shift).clamp(max=source.shape[2] - 1))

    def take_turning(self, ring: torch.Tensor) -> torch.Tensor:
        """Likewise of a ring, where place p is in slot p % (number of slots).

        Args:
            ring: (batch, heads, slots, d).
        """
        if self.aligned:
            return ring.index_select(2, self.index[0] % ring.shape[2])
        return gathered(ring, self.index % ring.shape[2])

    def put(self, buffer: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """A growing buffer with these places written. What a shorter row gets behind its last place will be overwritten.

        Args:
            buffer: (batch, heads, capacity, d), or None for none yet.
            new: (batch, heads, longest, d).
        """
        if self.aligned:
            return append(buffer, new, self.starts[0], RESERVE)
        highest = max(self.starts)
        held = buffer if buffer is not None else new.new_zeros(*new.shape[:2], 0, new.shape[3])
        if highest + self.longest > held.shape[2]:
            more = held.new_zeros(*held.shape[:2], highest + self.longest + max(64, highest // RESERVE) - held.shape[2], held.shape[3])
            held = torch.cat([held, more], 2)
        return scattered(held, self.index, new)

    def put_turning(self, ring: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """A ring with as many of these places written as it can hold, the last ones.

        Args:
            ring: (batch, heads, slots, d).
            new: (batch, heads, longest, d).
        """
        slots = ring.shape[2]
        if self.even:
            most = min(self.longest, slots)
            new, index = new[:, :, self.longest - most :], self.index[:, self.longest - most :] % slots
            return _copied(ring, index[0], new) if self.aligned else scattered(ring, index, new)
        numbers = turning(self.last, slots)
        behind = numbers - self.index[:, :1]
        written = (behind >= 0)[:, None, :, None]
        return torch.where(written, gathered(new, behind.clamp(min=0)), ring)


def latest(ring: torch.Tensor | None, new: torch.Tensor, numbers: SlotSpan, wanted: SlotSpan) -> torch.Tensor:
    """Places that are new or still in a ring, (batch, heads, longest, d).

    Args:
        ring: (batch, heads, slots, d), or None where all that is wanted is new.
        new: (batch, heads, longest new, d).
        wanted: Those to give. What a shorter row gets besides is any of its tokens.
    """
    if ring is None or all(w >= n for w, n in zip(wanted.starts, numbers.starts, strict=True)):
        return wanted.take(new, numbers.starts)
    if not new.shape[2]:
        return wanted.take_turning(ring)
    if not (wanted.same and numbers.same):
        behind = wanted.index - numbers.first
        fresh = gathered(new, behind.clamp(0, new.shape[2] - 1))
        return torch.where((behind >= 0)[:, None, :, None], fresh, wanted.take_turning(ring))
    start, stop, begin = wanted.starts[0], wanted.stops[0], numbers.starts[0]
    earlier = ring.index_select(2, torch.arange(start, min(stop, begin), device=ring.device) % ring.shape[2])
    return torch.cat([earlier, new[:, :, : stop - begin]], 2) if stop > begin else earlier


def resized(ring: torch.Tensor, last: torch.Tensor, slots: int) -> torch.Tensor:
    """A ring with another number of slots, and in it the last places that were in the old one.

    Args:
        ring: (batch, heads, slots, d).
        last: The one after the last place, (batch, 1).
    """
    numbers = turning(last, slots)
    return gathered(ring, numbers % ring.shape[2])


def turning(last: torch.Tensor, slots: int) -> torch.Tensor:
    """Which place is in each slot of a ring, (batch, slots); negative where there is none.

    Args:
        last: The one after the last place, (batch, 1).
    """
    before = last - 1
    return before - (before - torch.arange(slots, device=last.device)) % slots


def gathered(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """source[b, h, index[b, n]], (batch, heads, n, d).

    Args:
        source: (batch, heads, places, d).
        index: (batch, n).
    """
    return source.gather(2, index[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))


def scattered(buffer: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The buffer with buffer[b, h, index[b, n]] = new[b, h, n]; in place where that is allowed.

    Args:
        buffer: (batch, heads, places, d).
        index: (batch, n).
        new: (batch, heads, n, d).
    """
    wide = index[:, None, :, None].expand_as(new)
    return buffer.scatter(2, wide, new) if _lasting(buffer, new) else buffer.scatter_(2, wide, new)


def _copied(buffer: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return buffer.index_copy(2, index, new) if _lasting(buffer, new) else buffer.index_copy_(2, index, new)


def _lasting(buffer: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether a buffer may not be written to: it is part of a graph, or comes from inference mode, which is over."""
    graph = torch.is_grad_enabled() and (buffer.requires_grad or new.requires_grad)
    return graph or (buffer.is_inference() and not torch.is_inference_mode_enabled())


class Arrival:
    """The new tokens of one pass.

    Args:
        valid: True where a new token is real, (batch, tokens), or None for all.

    Attributes:
        numbers: Those of the new real tokens.
        order: Where they are among the new columns, (batch, longest), or None where these are all real.
    """

    def __init__(self, before: Sequence[int], valid: torch.Tensor | None, tokens: int, device: torch.device) -> None:
        came = [tokens] * len(before) if valid is None else valid.sum(1).tolist()
        self.numbers = SlotSpan(tuple(before), tuple(b + c for b, c in zip(before, came, strict=True)), device)
        self.order: torch.Tensor | None = None
        if valid is not None and min(came) < tokens:
            self.order = (~valid).to(torch.uint8).argsort(dim=1, stable=True)[:, : self.numbers.longest]
        self._spans: dict[str, SlotSpan] = {}

    def real(self, new: torch.Tensor) -> torch.Tensor:
        """The real ones of the new columns, in order: (batch, heads, longest, d).

        Args:
            new: (batch, heads, tokens, d).
        """
        return new if self.order is None else gathered(new, self.order)

    def span(self, name: str, count: Callable[[int], int]) -> SlotSpan:
        """What is added to something of which a row with n real tokens has `count(n)`.

        Args:
            name: Under which all layers of a pass find the span.
        """
        if name not in self._spans:
            numbers = self.numbers
            self._spans[name] = SlotSpan.of(list(map(count, numbers.starts)), list(map(count, numbers.stops)), numbers.device)
        return self._spans[name]
