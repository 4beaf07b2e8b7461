"""Entropy coding of small integers: rANS whose lanes all take the same step at the same time.

A step codes up to four integers of a token as one symbol of 256. A tile is up to 64 tokens of one layer, and each of its lanes codes two of
them. One step is a handful of tensor operations for all lanes of all tiles, or a few instructions of a warp. A lane whose
state runs low reads the next 16-bit word of its tile, lower lanes first. Tiles are independent, so a span can be read from its middle.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch

TILE = 64
SYMBOLS = 256
GROUP = 4
"""Most integers of a symbol."""
HALVES = {1: 127, 2: 31, 3: 7, 4: 3}
"""For each size of a group the largest integer that can be part of a symbol."""
ESCAPE = 0
"""The symbol of integers that have none of their own, and are stored beside the words."""
PRECISION = 12
_SLOTS = 1 << PRECISION
_LOWEST = 1 << 15  # of a state; the largest is below 2^31, so that states are int32
_WORD = 16
_WORD_MASK = (1 << _WORD) - 1
_RAREST = 2.0**-15  # probability of a symbol: a slot of 4,096 for a rarer one costs the others more than it saves
_ESCAPED_BITS = 16 * GROUP


@dataclass(frozen=True, eq=False)
class Tables:
    """What symbols stand for, and how frequent they are.

    Args:
        digits: The integers of each symbol, (tables, 256, 4), int16; zeros behind the last of a group.
        frequencies: In parts of 4,096, (tables, 256), int32; 0 for symbols that stand for nothing.
        sizes: Integers of a group, (tables,), int32.
    """

    digits: torch.Tensor
    frequencies: torch.Tensor
    sizes: torch.Tensor

    def to(self, device: torch.device) -> Tables:
        """The same on another device."""
        return self if device == self.sizes.device else Tables(*(getattr(self, field.name).to(device) for field in fields(self)))

    @cached_property
    def starts(self) -> torch.Tensor:
        """The first slot of each symbol, (tables, 256), int32."""
        return self.frequencies.cumsum(1, dtype=torch.int32) - self.frequencies

    @cached_property
    def intervals(self) -> torch.Tensor:
        """Of each symbol of each table its first slot (bits from 13 on) and its frequency, int32."""
        return (self.starts << 13 | self.frequencies).flatten()

    @cached_property
    def slots(self) -> torch.Tensor:
        """Of each slot its place in its symbol (bits from 20 on), the symbol's frequency less 1 (from 8 on), the symbol; int32."""
        ends = (self.starts + self.frequencies).contiguous()
        slots = torch.arange(_SLOTS, dtype=torch.int32, device=ends.device).expand(len(ends), -1).contiguous()
        symbols = torch.searchsorted(ends, slots, right=True)
        starts, frequencies = self.starts.gather(1, symbols), self.frequencies.gather(1, symbols)
        return ((slots - starts) << 20 | (frequencies - 1) << 8 | symbols.int()).flatten()

    @cached_property
    def of_sizes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each size of a group `HALVES`, (1 + 4,), and what its integers add to the index in a box, (1 + 4, 4); int32."""
        weights = [[0] * GROUP]
        for size, half in HALVES.items():
            weights.append([(2 * half + 1) ** (size - 1 - digit) if digit < size else 0 for digit in range(GROUP)])
        device = self.sizes.device
        return torch.tensor([0, *HALVES.values()], dtype=torch.int32, device=device), torch.tensor(
            weights, dtype=torch.int32, device=device
        )

    @cached_property
    def boxes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The symbols of all groups of integers up to `HALVES`, table after table, uint8; and the index of zeros, (tables,), int32."""
        halves, weights = (each.long()[self.sizes.long()] for each in self.of_sizes)
        lengths = (2 * halves + 1) ** self.sizes
        zeros = (lengths.cumsum(0) - lengths + lengths // 2).int()
        symbols = torch.full((int(lengths.sum()),), ESCAPE, dtype=torch.uint8, device=lengths.device)
        used = self.frequencies > 0
        used[:, ESCAPE] = False
        table, symbol = used.nonzero(as_tuple=True)
        symbols[zeros[table] + (self.digits[table, symbol] * weights[table]).sum(1)] = symbol.to(torch.uint8)
        return symbols, zeros

    def symbols_of(self, groups: torch.Tensor, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """The symbols of groups of integers, (steps, tokens), uint8.

        Args:
            groups: (4, steps, tokens), int32; zeros behind the last of a group.
            rows: The table of each step and token, (steps, tokens), int32.
            sizes: Integers of a group of each step, (steps,), int64.
        """
        symbols, zeros = self.boxes
        halves, weights = (each[sizes] for each in self.of_sizes)
        index, largest = zeros.index_select(0, rows.flatten()).view(rows.shape), torch.zeros_like(rows)
        for digit, integers in enumerate(groups):
            index = torch.addcmul(index, integers, weights[:, digit, None])
            largest = torch.maximum(largest, integers.abs())
        outside = largest > halves[:, None]
        found = symbols.index_select(0, index.masked_fill_(outside, 0).flatten()).view(rows.shape)
        return found.masked_fill_(outside, ESCAPE)

    def groups_of(self, symbols: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The integers of symbols, (steps, tokens, 4), int16.

        Args:
            symbols: (steps, tokens), uint8.
            rows: The table of each step and token, (steps, tokens), int32.
        """
        index = (rows * SYMBOLS).add_(symbols)
        # Four integers of 16 bits are looked up as one number.
        found = self.digits.view(torch.int64).flatten().index_select(0, index.flatten())
        return found.view(torch.int16).view(*symbols.shape, GROUP)

    def bits(self, symbols: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What symbols take, (steps, tokens); arguments as of `groups_of`."""
        frequencies = self.frequencies.flatten().index_select(0, (rows * SYMBOLS).add_(symbols).flatten())
        return PRECISION - frequencies.view(symbols.shape).float().log2() + _ESCAPED_BITS * (symbols == ESCAPE)


class CodedTiles(NamedTuple):
    """Coded tiles.

    Args:
        states: Of each tile's lanes, (tiles, lanes), int32.
        words: Of the tiles, one after the other, int16.
        counts: The words of each tile, (tiles,), int64.
    """

    states: torch.Tensor
    words: torch.Tensor
    counts: torch.Tensor


def encode(symbols: torch.Tensor, rows: torch.Tensor, tables: Tables) -> CodedTiles:
    """Code symbols.

    Args:
        symbols: (steps, tiles, lanes), uint8.
        rows: The table of each, of the same shape, int32.
    """
    intervals = tables.intervals.index_select(0, (rows * SYMBOLS).add_(symbols).flatten()).view(symbols.shape)
    state = torch.full_like(intervals[0], _LOWEST)
    taken, words = torch.empty_like(symbols, dtype=torch.bool), torch.empty_like(symbols, dtype=torch.int16)
    for step in range(len(symbols) - 1, -1, -1):
        frequency = intervals[step] & (2 * _SLOTS - 1)
        over = torch.ge(state >> (31 - PRECISION), frequency, out=taken[step])
        words[step] = state
        state = torch.where(over, state >> _WORD, state)
        state += (state // frequency).mul_(_SLOTS - frequency).add_(intervals[step] >> 13)
    taken, words = (each.transpose(0, 1).contiguous() for each in (taken, words))
    return CodedTiles(state, words.masked_select(taken), taken.sum((1, 2)))


class TileDecoder:
    """Decodes tiles step by step, since the table of a step may depend on the steps before.

    Args:
        coded: Some tiles.
        tables: As they were coded with.
    """

    def __init__(self, coded: CodedTiles, tables: Tables) -> None:
        self.slots, self.state = tables.slots, coded.states
        self._ends = coded.counts.cumsum(0)
        self._position = (self._ends - coded.counts).int()[:, None] - 1
        self._words = torch.cat([coded.words, coded.words.new_zeros(1)]).int().bitwise_and_(_WORD_MASK)

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        """The next symbol of each lane, in the lowest 8 bits, int32.

        Args:
            rows: Its table, (tiles, lanes) or what broadcasts to it, int32.
        """
        state = self.state
        slot = (state & (_SLOTS - 1)).add_(rows << PRECISION)
        entry = self.slots.index_select(0, slot.flatten()).view(state.shape)
        frequency = (entry >> 8).bitwise_and_(_SLOTS - 1).add_(1)
        state = (state >> PRECISION).mul_(frequency).add_((entry >> 20).bitwise_and_(_SLOTS - 1))
        low = state < _LOWEST
        places = low.cumsum(-1, dtype=torch.int32).add_(self._position)
        self._position = places[..., -1:]
        word = self._words.index_select(0, places.clamp(0, len(self._words) - 1).flatten()).view(state.shape)
        self.state = torch.where(low, (state << _WORD).bitwise_or_(word), state)
        return entry

    def ended(self) -> bool:
        """Whether all that was coded has been decoded, and nothing else."""
        return bool((self.state == _LOWEST).all() & (self._position[:, 0] + 1 == self._ends).all())


class TableRows(NamedTuple):
    """Rows of `Tables` for groups of one size, and the bits of an integer in the mean, (tables,)."""

    digits: torch.Tensor
    frequencies: torch.Tensor
    bits: torch.Tensor


def tables_of(shares: torch.Tensor, size: int) -> TableRows:
    """The tables for groups of integers that all have the same probabilities.

    Args:
        shares: For each table those of the integers from -127 to 127, (tables, 255), float64.
        size: Integers of a group.
    """
    half, middle = HALVES[size], shares.shape[1] // 2
    own = shares[:, middle - half : middle + half + 1]
    joint = own
    for _ in range(size - 1):
        joint = (joint[:, :, None] * own[:, None]).flatten(1)
    probabilities, order = joint.sort(dim=1, descending=True, stable=True)
    probabilities, order = probabilities[:, : SYMBOLS - 1], order[:, : SYMBOLS - 1]
    probabilities = probabilities.where(probabilities > _RAREST, 0.0)
    escape = (1 - probabilities.sum(1, keepdim=True)).clamp_min(0)
    probabilities = torch.nn.functional.pad(torch.cat([escape, probabilities], 1), (0, SYMBOLS - 1 - probabilities.shape[1]))
    used = probabilities > 0
    used[:, ESCAPE] = True
    frequencies = _rounded(probabilities * _SLOTS, used)
    lengths = torch.where(used, PRECISION - frequencies.clamp_min(1).double().log2(), 0.0)
    bits = (probabilities * lengths).sum(1) + probabilities[:, ESCAPE] * _ESCAPED_BITS
    digits = torch.zeros(len(shares), SYMBOLS, GROUP, dtype=torch.int16)
    for digit in range(size - 1, -1, -1):
        digits[:, 1 : 1 + order.shape[1], digit] = (order % own.shape[1] - half).short()
        order = order // own.shape[1]
    return TableRows(digits.masked_fill_(~used[..., None], 0), frequencies, bits / size)


def uniform_tables(most: int) -> TableRows:
    """The tables of integers of 0 to so many bits, all of one probability."""
    symbols, bits = torch.arange(SYMBOLS), torch.arange(most + 1)
    used = (symbols > 0) & (symbols <= 1 << bits[:, None])
    digits = torch.zeros(most + 1, SYMBOLS, GROUP, dtype=torch.int16)
    digits[..., 0] = torch.where(used, symbols - 1, 0)
    return TableRows(digits, torch.where(used, _SLOTS >> bits[:, None], 0).int(), bits.double())


def _rounded(wanted: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Whole numbers close to the wanted ones, (tables, 256), int32: at least 1 where a symbol is used, with the sum 4,096."""
    wanted = torch.where(used, wanted.clamp_min(1), 0)
    # What is too much is taken from all that is above 1, in proportion.
    spare = torch.where(used, wanted - 1, 0)
    excess = wanted.sum(1, keepdim=True) - _SLOTS
    exact = wanted - spare * excess / spare.sum(1, keepdim=True).clamp_min(1e-9)
    whole = exact.floor()
    missing = (_SLOTS - whole.sum(1, keepdim=True)).round()
    rank = (exact - whole).masked_fill(~used, -1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (whole + (rank < missing)).int()
