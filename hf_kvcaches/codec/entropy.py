"""Entropy coding of small integers: rANS whose lanes all code a symbol at the same time.

A symbol is one of 256 and stands for one, two or four integers of a token. A tile is up to 64 tokens of one layer, and each of its lanes
codes two of them. Decoding a symbol takes a handful of tensor operations for all lanes of all tiles, or a few instructions of a warp. A
lane whose state runs low reads the next 16-bit word of its tile, lower lanes first. Tiles are independent, so that a span can be read from
its middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from hf_kvcaches.errors import ArtifactError

TILE, LANES = 64, 32
SYMBOLS = 256
LARGEST = {1: 127, 2: 31, 4: 3}  # by the size of a group of integers, the largest one that can be part of a symbol
SIDES = {size: 2 * largest + 3 for size, largest in LARGEST.items()}  # integers up to the largest, and those beyond as one
SIZES = tuple(LARGEST)
ESCAPE = 0  # the symbol of groups that have none of their own; their integers are stored beside the words
TOKEN_LEVELS = 16  # a token's level says how much larger its coefficients are than in the mean, from 1/4 to almost 4 times
PRECISION = 12
SLOTS = 1 << PRECISION
LOWEST = 1 << 15  # of a state; the largest is below 2^31, so that states are int32
_RAREST = 2.0**-15  # probability of a symbol: a slot of 4,096 for a rarer one costs the others more than it saves


def _int32(number: int) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int32)


# As tensors numbers need no conversion in each operation, which would take a tenth to a third of the time.
_ONE, _SYMBOL_BITS, _PLACE_BITS, _PRECISION_BITS, _WORD_BITS = map(_int32, (1, 8, 20, PRECISION, 16))
_SLOTS, _SLOT_MASK, _FREQUENCY_MASK, _FREQUENCY_BITS = map(_int32, (SLOTS, SLOTS - 1, 2 * SLOTS - 1, PRECISION + 1))
_LOWEST, _SIGN_BITS, _FULL_BITS = map(_int32, (LOWEST, 31, 31 - PRECISION))


@dataclass(frozen=True, eq=False)
class Tables:
    """What symbols stand for, and how frequent they are."""

    integers: torch.Tensor  # of each symbol, (tables, 256, 4), int16; zeros behind the last of a group
    frequencies: torch.Tensor  # in parts of 4,096, (tables, 256), int16; 0 for symbols that stand for nothing
    sizes: torch.Tensor  # integers of a group, (tables,), uint8
    shifts: torch.Tensor  # how far coefficients lie beyond their integers in the mean, (tables,), float32

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"integers": self.integers, "frequencies": self.frequencies, "sizes": self.sizes, "shifts": self.shifts}

    def to(self, device: torch.device) -> Tables:
        return Tables(*(tensor.to(device) for tensor in self.tensors().values()))

    def require_valid(self, count: int) -> None:
        """Refuse tables that a decoder could not rely on."""
        shapes = [tuple(tensor.shape) for tensor in self.tensors().values()]
        fits = shapes == [(count, SYMBOLS, 4), (count, SYMBOLS), (count,), (count,)] and set(self.sizes.tolist()) <= set(SIZES)
        if not fits or bool((self.frequencies < 0).any() | (self.frequencies.int().sum(1) != SLOTS).any()):
            raise ArtifactError("The tables of packed codes make no sense. Calibrate anew.")

    @cached_property
    def _starts(self) -> torch.Tensor:
        """The first slot of each symbol, (tables, 256), int32."""
        frequencies = self.frequencies.int()
        return frequencies.cumsum(1, dtype=torch.int32) - frequencies

    @cached_property
    def slots(self) -> torch.Tensor:
        """For each slot its place in its symbol (bits from 20 on), the symbol's frequency less 1 (from 8 on), the symbol; int32."""
        frequencies = self.frequencies.int()
        slots = torch.arange(SLOTS, dtype=torch.int32, device=frequencies.device).expand(len(frequencies), -1).contiguous()
        symbols = torch.searchsorted((self._starts + frequencies).contiguous(), slots, right=True)
        places = slots - self._starts.gather(1, symbols)
        return (places << 20 | (frequencies.gather(1, symbols) - 1) << 8 | symbols.int()).flatten()

    @cached_property
    def values(self) -> torch.Tensor:
        """What each digit of each symbol stands for, (4, 2 * tables * 256), float32: with shifts, and as plain integers behind these."""
        integers = self.integers.float()
        shifted = integers + integers.sign() * self.shifts[:, None, None]
        return torch.cat([shifted, integers]).flatten(0, 1).T.contiguous()

    @cached_property
    def boxes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The intervals of all groups of integers, and where those of zeros are, (tables,); int32.

        An interval is a symbol's first slot (bits from 13 on) and its frequency. Integers beyond the largest by more than 1 have none.
        """
        sides = torch.tensor([SIDES.get(size, 0) for size in range(5)], device=self.sizes.device)[self.sizes.long()]
        lengths = sides ** self.sizes.long()
        centers = lengths.cumsum(0) - lengths + lengths // 2
        intervals = self._starts << (PRECISION + 1) | self.frequencies.int()
        boxes = intervals[:, ESCAPE].repeat_interleave(lengths)
        used = self.frequencies > 0
        used[:, ESCAPE] = False
        table, symbol = used.nonzero(as_tuple=True)
        index = torch.zeros_like(table)
        for digit in range(4):
            inside = self.sizes[table] > digit
            index = torch.where(inside, index * sides[table] + self.integers[table, symbol, digit], index)
        boxes[centers[table] + index] = intervals[table, symbol]
        return boxes, centers.int()


def levels_of(symbols: torch.Tensor) -> torch.Tensor:
    """The levels of tokens from their first symbols, int32; damaged ones are brought into range."""
    return (symbols.int() - 1).clamp_(0, TOKEN_LEVELS - 1)


def encode(intervals: torch.Tensor, tiles: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Code symbols by their intervals, (symbols, 2, tiles, lanes), int32, of records of so many tiles.

    Return for each record the states of the lanes, (tiles, 32), all words, and how many of these each tile has.
    """
    steps = intervals.flatten(0, 1)
    state = torch.full_like(steps[0], LOWEST)
    taken, words = torch.empty_like(steps, dtype=torch.bool), torch.empty_like(steps, dtype=torch.int16)
    for step in range(len(steps) - 1, -1, -1):
        interval = steps[step]
        frequency = interval & _FREQUENCY_MASK
        full = torch.ge(state >> _FULL_BITS, frequency, out=taken[step])
        words[step] = state
        state >>= full.int().mul_(_WORD_BITS)
        state += (state // frequency).mul_(_SLOTS - frequency).add_(interval >> _FREQUENCY_BITS)
    coded = []
    for states, *parts in zip(state.split(tiles), taken.split(tiles, 1), words.split(tiles, 1), strict=True):
        mask, own = (part.transpose(0, 1).contiguous() for part in parts)
        # On a CPU, NumPy needs half of the time of PyTorch, which first makes the mask int64.
        selected = torch.from_numpy(own.numpy()[mask.numpy()]) if own.device.type == "cpu" else own.masked_select(mask)
        coded.append((states, selected, mask.sum((1, 2), dtype=torch.int32)))
    return coded


class CodedTiles(NamedTuple):
    """Tiles of some records."""

    lanes: torch.Tensor  # how many lanes code a first token, and how many a second one, (tiles, 2), int32
    states: torch.Tensor  # of the lanes, (tiles, 32), int32
    words: torch.Tensor  # int16, of the tiles one after the other
    escaped: torch.Tensor  # integers, int16, likewise
    counts: torch.Tensor  # words and escaped integers of each tile, (tiles, 2), int32


def decode(coded: CodedTiles, rows: torch.Tensor, follows: torch.Tensor, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """The symbols, (symbols, 2, tiles, lanes), uint8, the first of which is a token's level plus 1, and whether the words are a code's.

    `rows` is the table of each symbol at level 0, and `follows` 1 where it is as many rows further on as the token's level, else 0; int32,
    (symbols, tiles).
    """
    state, device = coded.states.clone(), coded.states.device
    symbols = torch.empty(len(rows), 2, *state.shape, dtype=torch.uint8, device=device)
    ends = coded.counts[:, 0].cumsum(0, dtype=torch.int32)
    position = (ends - coded.counts[:, 0])[:, None]
    words = torch.cat([coded.words.new_zeros(1), coded.words]).int().bitwise_and_(0xFFFF)
    last = torch.tensor(len(words) - 1, dtype=torch.int32)
    whole = bool((coded.lanes == LANES).all())
    present = (torch.arange(LANES, device=device) < coded.lanes.T[..., None]).int()
    rows, levels = (rows << PRECISION)[..., None], [torch.zeros_like(state)] * 2
    for number, (row, follow) in enumerate(zip(rows, follows[..., None], strict=True)):
        for half in range(2):
            slot = (levels[half] * follow).add_(row)
            if not whole:
                slot *= present[half]  # in table 0 one symbol has all of the probability, and codes nothing
            entry = tables.slots.index_select(0, slot.add_(state & _SLOT_MASK).flatten()).view_as(state)
            symbols[number, half] = entry
            if not number:
                levels[half] = levels_of(symbols[0, half]) << PRECISION
            frequency = (entry >> _SYMBOL_BITS).bitwise_and_(_SLOT_MASK).add_(_ONE)
            place = entry.bitwise_right_shift_(_PLACE_BITS).bitwise_and_(_SLOT_MASK)
            state = state.bitwise_right_shift_(_PRECISION_BITS).mul_(frequency).add_(place)
            # -1 for lanes that read a word, which are numbered from the first on, else 0.
            low = (state - _LOWEST).bitwise_right_shift_(_SIGN_BITS)
            places = position - low.cumsum(-1, dtype=torch.int32)
            position = places[..., -1:]
            # The others read the 0 before all words; what is behind the last word is no code.
            word = words.index_select(0, torch.minimum(places & low, last).flatten()).view_as(state)
            state = state.bitwise_left_shift_(low.bitwise_and_(_WORD_BITS)).bitwise_or_(word)
    return symbols, (state == LOWEST).all() & (position[:, 0] == ends).all()


def tables_of(shares: torch.Tensor, shifts: torch.Tensor, size: int) -> tuple[Tables, torch.Tensor]:
    """The tables for groups of so many integers, and the bits of an integer in the mean, (tables,).

    Shares are those of the integers from -127 to 127, (tables, 255), float64.
    """
    half, middle = LARGEST[size], shares.shape[1] // 2
    single = shares[:, middle - half : middle + half + 1]
    joint = single
    for _ in range(size - 1):
        joint = (joint[:, :, None] * single[:, None]).flatten(1)
    probabilities, order = (each[:, : SYMBOLS - 1] for each in joint.sort(dim=1, descending=True, stable=True))
    probabilities = probabilities.where(probabilities > _RAREST, 0.0)
    escape = (1 - probabilities.sum(1, keepdim=True)).clamp_min(0)
    probabilities = pad(torch.cat([escape, probabilities], 1), (0, SYMBOLS - 1 - probabilities.shape[1]))
    used = probabilities > 0
    used[:, ESCAPE] = True
    frequencies = _rounded(probabilities * SLOTS, used)
    lengths = torch.where(used, PRECISION - frequencies.clamp_min(1).double().log2(), 0.0)
    bits = (probabilities * lengths).sum(1) / size + probabilities[:, ESCAPE] * 16
    integers = torch.zeros(len(shares), SYMBOLS, 4, dtype=torch.int16)
    for digit in range(size - 1, -1, -1):
        integers[:, 1 : 1 + order.shape[1], digit] = (order % single.shape[1] - half).short()
        order = order // single.shape[1]
    sizes = torch.full((len(shares),), size, dtype=torch.uint8)
    return Tables(integers.masked_fill_(~used[..., None], 0), frequencies, sizes, shifts), bits


def uniform_tables(count: int) -> Tables:
    """The tables of integers of 0 bits, of 1 bit and so on, all of one probability."""
    symbols, bits = torch.arange(SYMBOLS), torch.arange(count)
    used = (symbols > 0) & (symbols <= 1 << bits[:, None])
    integers = torch.zeros(count, SYMBOLS, 4, dtype=torch.int16)
    integers[..., 0] = torch.where(used, symbols - 1, 0)
    frequencies = torch.where(used, SLOTS >> bits[:, None], 0).short()
    return Tables(integers, frequencies, torch.ones(count, dtype=torch.uint8), torch.zeros(count))


def _rounded(wanted: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Whole numbers close to the wanted ones, (tables, 256), int16: at least 1 where a symbol is used, with the sum 4,096."""
    wanted = torch.where(used, wanted.clamp_min(1), 0)
    # What is too much is taken from all that is above 1, in proportion.
    spare = torch.where(used, wanted - 1, 0)
    excess = wanted.sum(1, keepdim=True) - SLOTS
    exact = wanted - spare * excess / spare.sum(1, keepdim=True).clamp_min(1e-9)
    whole = exact.floor()
    missing = (SLOTS - whole.sum(1, keepdim=True)).round()
    rank = (exact - whole).masked_fill(~used, -1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (whole + (rank < missing)).short()
