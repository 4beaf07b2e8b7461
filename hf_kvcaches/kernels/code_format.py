"""The format of codes of fixed widths: how the integers of a token are cut into parts of 8, 4, 2 and 1 bits, and where these lie.

The codes of one layer are a uint8 tensor (batch, groups, rows, tokens): each group of heads has a basis of its own, and all groups have the
same widths in the order of their directions. The rows are four planes one behind the other, of parts with 8, 4, 2 and 1 bits. A plane with
n parts of b bits has R = n * b / 8 rows; part j is in row j % R, from bit b * (j // R) on. A part of b bits that holds the number c is read
as the level c - 2**(b - 1). Levels are numbered in the order of the planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

TILE = 16
"""Tokens whose keys are rotated from one position on: no matrix product of a GPU takes fewer."""
PLANES = (8, 4, 2, 1)
# The parts of a direction's integer, from its high bits down.
PARTS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,), 16: (8, 8), 24: (8, 8, 8)}
WIDTHS = tuple(PARTS)
Counts = tuple[int, int, int, int]
"""How many parts there are of 8, 4, 2 and 1 bits, each a whole number of rows."""


def packed_bytes(widths: Tensor) -> int:
    """Bytes of one token whose directions have these bits, (directions,)."""
    bits = dict.fromkeys(PLANES, 0)
    for width, count in enumerate(torch.bincount(widths.long()).tolist()):
        for part in PARTS.get(width, ()) if count else ():
            bits[part] += part * count
    return sum(-(-own // 8) for own in bits.values())


@dataclass(frozen=True, eq=False)
class CodeLayout:
    """Which part of which direction's integer each level is: (levels,) each."""

    counts: Counts
    directions: Tensor  # 0 for levels that fill up a row
    shifts: Tensor  # bits of the integer below the part
    bits: Tensor  # of the part
    filled: Tensor  # True for levels that fill up a row and belong to no direction

    @classmethod
    def of(cls, widths: Tensor) -> CodeLayout:
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
        return cls((counts[0], counts[1], counts[2], counts[3]), directions, shifts, bits, filled.bool())

    def pack(self, integers: Tensor) -> Tensor:
        """Pack integers from 0 up, (..., directions, tokens), into (..., rows, tokens), uint8."""
        parts = integers.index_select(-2, self.directions) >> self.shifts.to(integers.dtype)[:, None]
        parts &= ((1 << self.bits) - 1).to(integers.dtype)[:, None]
        return pack(parts.to(torch.uint8), self.counts)

    def to(self, device: torch.device) -> CodeLayout:
        return CodeLayout(self.counts, *(own.to(device) for own in (self.directions, self.shifts, self.bits, self.filled)))


def pack(parts: Tensor, counts: Counts) -> Tensor:
    """Pack parts, (..., levels, tokens), uint8, each from 0 to 2**bits - 1, into (..., rows, tokens), uint8."""
    rows = []
    for plane, shifts in zip(parts.split(counts, -2), _tables(counts, parts.device)[0], strict=True):
        slots = plane.unflatten(-2, (len(shifts), plane.shape[-2] // len(shifts)))
        rows.append((slots << shifts).sum(-3, dtype=torch.uint8))
    return torch.cat(rows, -2)


def unpack(packed: Tensor, counts: Counts) -> Tensor:
    """The levels, (..., levels, tokens), int8, of packed codes, (..., rows, tokens), uint8."""
    parts, (shifts, masks, centers) = packed.new_empty(*packed.shape[:-2], sum(counts), packed.shape[-1]), _tables(counts, packed.device)
    sizes = [count // len(own) for count, own in zip(counts, shifts, strict=True)]
    for plane, rows, own in zip(parts.split(counts, -2), packed.split(sizes, -2), shifts, strict=True):
        if rows.shape[-2]:
            torch.bitwise_right_shift(rows.unsqueeze(-3), own, out=plane.unflatten(-2, (len(own), rows.shape[-2])))
    return parts.bitwise_and_(masks).sub_(centers).view(torch.int8)


# One for each layer of a model, whose entries a step visits in a circle: with fewer, each visit would make one anew.
@lru_cache(maxsize=4096)
@torch.inference_mode(False)
def _tables(counts: Counts, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
    """The first bits of the slots of each plane, (slots, 1, 1); of each level the largest part and the part of level 0: (levels, 1)."""
    shifts = [torch.arange(0, 8, bits, dtype=torch.uint8, device=device).view(-1, 1, 1) for bits in PLANES]
    bits = torch.tensor(PLANES, device=device).repeat_interleave(torch.tensor(counts, device=device))[:, None]
    return shifts, ((1 << bits) - 1).to(torch.uint8), (1 << bits - 1).to(torch.uint8)
