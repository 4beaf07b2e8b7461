"""The format of codes of fixed widths: how the integers of a token are cut into parts of 8, 4, 2 and 1 bits, and where these lie.

The codes of one layer are a uint8 tensor (batch, groups, rows, tokens): each group of heads has a basis of its own, and all groups have the
same widths in the order of their directions. The rows are four planes one behind the other, of parts with 8, 4, 2 and 1 bits. A plane with
n parts of b bits has R = n * b / 8 rows; part j is in row j % R, from bit b * (j // R) on. A part of b bits that holds the number c is read
as the level c - 2**(b - 1). Levels are numbered in the order of the planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

TILE = 16
"""Tokens whose keys are rotated from one position on: no matrix product of a GPU takes fewer."""
PLANES = (8, 4, 2, 1)
# The parts of a direction's integer, from its high bits down.
PARTS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,), 16: (8, 8), 24: (8, 8, 8)}
WIDTHS = tuple(PARTS)
Counts = tuple[int, int, int, int]
"""How many parts there are of 8, 4, 2 and 1 bits, each a whole number of rows."""


class Plane(NamedTuple):
    """The parts of one width: `size` levels from number `level` on, in `rows` rows from number `row` on."""

    bits: int
    size: int
    level: int
    row: int
    rows: int


@lru_cache(maxsize=4096)
def planes(counts: Counts) -> list[Plane]:
    """The planes that are not empty."""
    found, level, row = [], 0, 0
    for bits, count in zip(PLANES, counts, strict=True):
        rows = count * bits // 8
        if count:
            found.append(Plane(bits, count, level, row, rows))
        level, row = level + count, row + rows
    return found


def packed_bytes(widths: torch.Tensor) -> int:
    """Bytes of one token whose directions have these bits, (directions,)."""
    bits = dict.fromkeys(PLANES, 0)
    for width, count in enumerate(torch.bincount(widths.long()).tolist()):
        for part in PARTS.get(width, ()) if count else ():
            bits[part] += part * count
    return sum(-(-own // 8) for own in bits.values())


@dataclass(frozen=True, eq=False)
class CodeLayout:
    """Which part of which direction's integer each level is.

    Args:
        counts: See `Counts`.
        widths: Of each direction, (directions,), int64.
        directions: Of each level, (levels,), int64; 0 for those that fill up a row.
        shifts: How many bits of the integer lie below the part, (levels,), int64.
        bits: Of the part, (levels,), int64.
        filled: True for levels that fill up a row and belong to no direction, (levels,).
    """

    counts: Counts
    widths: torch.Tensor
    directions: torch.Tensor
    shifts: torch.Tensor
    bits: torch.Tensor
    filled: torch.Tensor

    @classmethod
    def of(cls, widths: torch.Tensor) -> CodeLayout:
        """The layout for directions with these bits, (directions,)."""
        levels: list[tuple[int, int, int, bool]] = []
        counts = []
        for plane in PLANES:
            start = len(levels)
            for direction, width in enumerate(widths.tolist()):
                below = width
                for part in PARTS.get(width, ()):
                    below -= part
                    if part == plane:
                        levels.append((direction, below, plane, False))
            levels += [(0, 0, plane, True)] * ((start - len(levels)) % (8 // plane))
            counts.append(len(levels) - start)
        directions, shifts, bits, filled = torch.tensor(levels, dtype=torch.int64).view(-1, 4).unbind(1)
        return cls((counts[0], counts[1], counts[2], counts[3]), widths.long(), directions, shifts, bits, filled.bool())

    def pack(self, integers: torch.Tensor) -> torch.Tensor:
        """Pack integers from 0 up, (..., directions, tokens), into (..., rows, tokens), uint8."""
        parts = integers.index_select(-2, self.directions) >> self.shifts.to(integers.dtype)[:, None]
        parts &= ((1 << self.bits) - 1).to(integers.dtype)[:, None]
        return pack(parts.to(torch.uint8), self.counts)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The integers, (..., directions, tokens), int32, of what `pack` gave."""
        parts = unpack(packed, self.counts).int() + (1 << self.bits - 1).int()[:, None]
        parts = (parts << self.shifts.int()[:, None]).masked_fill_(self.filled[:, None], 0)
        return parts.new_zeros(*parts.shape[:-2], len(self.widths), parts.shape[-1]).index_add_(-2, self.directions, parts)

    def to(self, device: torch.device) -> CodeLayout:
        """The layout on a device."""
        tensors = (self.widths, self.directions, self.shifts, self.bits, self.filled)
        return CodeLayout(self.counts, *(tensor.to(device) for tensor in tensors))


def pack(parts: torch.Tensor, counts: Counts) -> torch.Tensor:
    """Pack parts, (..., levels, tokens), uint8, each from 0 to 2**bits - 1, into (..., rows, tokens), uint8."""
    rows = []
    for plane in planes(counts):
        shifts = torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=parts.device)[:, None, None]
        slots = parts.narrow(-2, plane.level, plane.size).unflatten(-2, (-1, plane.rows)) << shifts
        rows.append(slots.sum(-3, dtype=torch.uint8))
    return torch.cat(rows, -2) if rows else parts[..., :0, :]


def unpack(packed: torch.Tensor, counts: Counts) -> torch.Tensor:
    """The levels, (..., levels, tokens), int8, of packed codes, (..., rows, tokens), uint8."""
    *lead, _, tokens = packed.shape
    parts = packed.new_empty(*lead, sum(counts), tokens)
    shifts, masks, centers = _bit_tables(counts, packed.device)
    for plane, shift in zip(planes(counts), shifts, strict=True):
        slots = parts.narrow(-2, plane.level, plane.size).unflatten(-2, (-1, plane.rows))
        torch.bitwise_right_shift(packed.narrow(-2, plane.row, plane.rows).unsqueeze(-3), shift, out=slots)
    return parts.bitwise_and_(masks).sub_(centers).view(torch.int8)


# One for each layer of a model, whose entries a step visits in a circle: with fewer, each visit would make one anew.
@lru_cache(maxsize=4096)
@torch.inference_mode(False)
def _bit_tables(counts: Counts, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The first bits of the slots of each plane, (slots, 1, 1); of each level the largest part and the part of level 0: (levels, 1)."""
    shifts = [torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=device).view(-1, 1, 1) for plane in planes(counts)]
    centers = torch.tensor([1 << plane.bits - 1 for plane in planes(counts) for _ in range(plane.size)], dtype=torch.int64, device=device)
    return shifts, (2 * centers - 1).to(torch.uint8).unsqueeze(1), centers.to(torch.uint8).unsqueeze(1)
