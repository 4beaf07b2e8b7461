"""In which order and by which tables the integers of a token of one layer are coded.

First comes the token's level, then the low bits of directions whose integers are large, then the integers: alone those of the directions
with the largest deviations, in pairs those of the next, in fours the rest. Which table a group has depends on its deviation in steps, in 32
levels of a quarter of an octave, and on the level of the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_kvcaches.codec.entropy import SIZES, TOKEN_LEVELS, TableRows, Tables, tables_of, uniform_tables
from hf_kvcaches.errors import ArtifactError

LEVELS = 32
LEVEL_OF_ONE = 12
MOST_LOW_BITS = 7
TOKEN_BITS = 4
COARSE = 10.0  # deviation, in steps, from which on low bits are coded as they are
ROUNDING = 0.1  # a coefficient is brought nearer to 0 by so much of a step before it is rounded
_COUNTED = 0.25  # deviation, in steps, of directions that say how large a token is
# The levels of directions whose integers are coded in groups of each size, and the first table of each: behind those of low bits, for these
# levels and all tokens.
_RANGES = {1: range(13, LEVELS), 2: range(7, 13), 4: range(7)}
_FIRST = {1: 8, 2: 42, 4: 63}
TABLES = 85
"""How many tables there are."""


def tables_from(shares: torch.Tensor, shifts: torch.Tensor) -> tuple[Tables, torch.Tensor]:
    """Return all tables, and the bits of an integer at each level in groups of the level's size, (levels, levels): of a direction, and of
    the direction in a token.

    Args:
        shares: Of the integers from -127 to 127 at each level, (32, 255).
        shifts: How far coefficients lie beyond their integers at each level, (32,).
    """
    parts: list[TableRows] = [uniform_tables(MOST_LOW_BITS + 1)]
    sizes, of_tables, bits = [1] * (MOST_LOW_BITS + 1), [torch.zeros(MOST_LOW_BITS + 1)], torch.empty(LEVELS, LEVELS)
    for size in SIZES:
        own, span = tables_of(shares, size), _RANGES[size]
        first = span.start - TOKEN_LEVELS // 2
        levels = torch.arange(first, span.stop + TOKEN_LEVELS // 2 - 1).clamp(0, LEVELS - 1)
        parts.append(TableRows(*(tensor[levels] for tensor in own)))
        sizes += [size] * len(levels)
        of_tables.append(shifts[levels])
        bits[span.start : span.stop] = own.bits.float()
    integers, frequencies = torch.cat([part.integers for part in parts]), torch.cat([part.frequencies for part in parts])
    return Tables(integers, frequencies, torch.tensor(sizes, dtype=torch.uint8), torch.cat(of_tables)), bits


def low_bits_of(deviations: torch.Tensor) -> torch.Tensor:
    """How many bits of their integers are coded as they are, by deviation in steps; int64."""
    return (deviations / COARSE).log2().ceil().clamp(0, MOST_LOW_BITS).long()


def levels_of_deviations(deviations: torch.Tensor) -> torch.Tensor:
    """The levels of directions, int64, by the deviation in steps of what is left of them without low bits."""
    levels = 4 * (deviations / 2.0 ** low_bits_of(deviations)).clamp_min(2.0**-8).log2() + LEVEL_OF_ONE
    return levels.round().clamp(0, LEVELS - 1).long()


def token_weights(deviations: torch.Tensor) -> torch.Tensor:
    """By which the squares of a token's coefficients are added up to tell its level, for each of the directions."""
    counted = deviations > _COUNTED
    return torch.where(counted, 1 / (deviations.square() * counted.sum().clamp_min(1)), 0.0)


def token_levels(squares: torch.Tensor) -> torch.Tensor:
    """The levels of tokens, int32, by their weighted sums of squares."""
    return (2 * squares.nan_to_num(0.0).clamp_min(2.0**-16).log2()).round_().add_(TOKEN_LEVELS // 2).clamp_(0, TOKEN_LEVELS - 1).int()


def rounded(coefficients: torch.Tensor, low_bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients in steps, (directions, tokens), as integers without their low bits, and these bits of the first directions, int16.

    Args:
        low_bits: How many the first directions have, (split,).
    """
    split, bits = len(low_bits), low_bits[:, None].int()
    wide = coefficients[:split].round().clamp_(-(2.0**30), 2.0**30).int()
    nearer = torch.nn.functional.softshrink(coefficients[split:], ROUNDING).round_()
    integers = torch.cat([(wide >> bits).float(), nearer]).clamp_(-(2.0**15) + 1, 2.0**15 - 1)
    return integers.short(), (wide & ((1 << bits) - 1)).short()


@dataclass(frozen=True, eq=False)
class Plan:
    """How the integers of a layer's tokens are coded.

    Args:
        order: The directions that are coded, the largest deviation first, (kept,), int64.
        low_bits: Of the first of them, how many bits are coded as they are, (split,), int64.
        levels: Of each group of directions, (groups,), int64.
        counts: Of the groups of each size, as in `SIZES`.
    """

    order: torch.Tensor
    low_bits: torch.Tensor
    levels: torch.Tensor
    counts: tuple[int, int, int]

    @classmethod
    def of_deviations(cls, order: torch.Tensor, deviations: torch.Tensor) -> Plan:
        """The plan for directions of these deviations in steps, the largest first."""
        low_bits, levels = low_bits_of(deviations), levels_of_deviations(deviations)
        # Groups are full: directions that are too few for one go to the next smaller size.
        fours = int((levels < _RANGES[2].start).sum()) // 4
        pairs = (int((levels < _RANGES[1].start).sum()) - 4 * fours) // 2
        counts = (len(order) - 2 * pairs - 4 * fours, pairs, fours)
        parts = levels.split([count * size for count, size in zip(counts, SIZES, strict=True)])
        of_groups = [part.view(-1, size).float().mean(1).round().long() for part, size in zip(parts, SIZES, strict=True)]
        return cls(order, low_bits[low_bits > 0], torch.cat(of_groups), counts)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, in small types."""
        small = {"low_bits": self.low_bits.to(torch.uint8), "levels": self.levels.to(torch.uint8)}
        return {"order": self.order.int(), "counts": torch.tensor(self.counts, dtype=torch.int32)} | small

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], directions: int) -> Plan:
        """From `tensors`, if they make sense for a layer of so many directions."""
        order, low_bits, levels, counts = (tensors[name].long() for name in ("order", "low_bits", "levels", "counts"))
        distinct = len(order.unique()) == len(order) and bool(((order >= 0) & (order < directions)).all())
        known = bool((low_bits <= MOST_LOW_BITS).all() & (low_bits > 0).all() & (levels < LEVELS).all())
        whole = counts.shape == (3,) and bool((counts >= 0).all()) and int((counts * torch.tensor(SIZES)).sum()) == len(order)
        if not (distinct and known and whole and int(counts.sum()) == len(levels) and len(low_bits) <= int(counts[0])):
            raise ArtifactError("The order in which a layer's directions are coded makes no sense. Calibrate anew.")
        ones, pairs, fours = counts.tolist()
        return cls(order, low_bits, levels, (ones, pairs, fours))

    @property
    def split(self) -> int:
        """How many directions have low bits."""
        return len(self.low_bits)

    @property
    def digits(self) -> int:
        """Low bits and integers of a token."""
        return self.split + len(self.order)

    @property
    def lengths(self) -> list[int]:
        """How many directions are coded in groups of each size."""
        return [count * size for count, size in zip(self.counts, SIZES, strict=True)]

    @cached_property
    def ranks(self) -> torch.Tensor:
        """The integers' places in `order`: those alone, the first of all pairs, the second, the first of all fours and so on, (kept,)."""
        parts = torch.arange(len(self.order)).split(self.lengths)
        return torch.cat([part.view(-1, size).T.flatten() for part, size in zip(parts, SIZES, strict=True)])

    @property
    def integers(self) -> torch.Tensor:
        """The direction of each integer, (kept,)."""
        return self.order[self.ranks]

    @cached_property
    def symbols(self) -> torch.Tensor:
        """What each symbol of a token is, (symbols, 6), int32.

        Its table, in tokens of level 0; whether others have the next ones; whether its integers stand for themselves, without shifts; how
        many there are; the number of the first among the digits, and how much further on each next one is.
        """
        rows = [[TOKEN_BITS, 0, 0, 0, 0, 0], *([bits, 0, 0, 1, digit, 0] for digit, bits in enumerate(self.low_bits.tolist()))]
        start = self.split
        for count, size, levels in zip(self.counts, SIZES, self.levels.split(self.counts), strict=True):
            span = _RANGES[size]
            tables = (_FIRST[size] + levels.clamp(span.start, span.stop - 1) - span.start).tolist()
            rows += [[table, 1, size == 1 and place < self.split, size, start + place, count] for place, table in enumerate(tables)]
            start += count * size
        return torch.tensor(rows, dtype=torch.int32)
