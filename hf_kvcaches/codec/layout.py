"""Where the bits of a token lie: planes of codes of 8, 4, 2 and 1 bits, all heads together.

A direction with another number of bits has a code in two planes: 3 bits are 2 and 1, 5 are 4 and 1, 6 are 4 and 2, 16 twice 8. Each
part of a code is a level of its own for whoever decodes, with its own column of the decoding matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PLANES = (8, 4, 2, 1)
# The parts of a width's code, with the number of bits below each.
_PARTS = {1: ((1, 0),), 2: ((2, 0),), 3: ((2, 1), (1, 0)), 4: ((4, 0),), 5: ((4, 1), (1, 0)), 6: ((4, 2), (2, 0)), 8: ((8, 0),)}
_PARTS |= {16: ((8, 8), (8, 0)), 24: ((8, 16), (8, 8), (8, 0))}


@dataclass(frozen=True, eq=False)
class Layout:
    """The levels of one side of a layer, plane after plane.

    Args:
        counts: Codes in each of `PLANES`, in whole bytes.
        heads: Of each level its head, (levels,).
        directions: And its direction; 0 for those that fill up a byte.
        shifts: How many bits of the direction's code are below it.
        bits: Of each level.
        real: False for those that fill up a byte.
        row_heads: With `separate`, the head of each byte, (rows,).
    """

    counts: tuple[int, int, int, int]
    heads: torch.Tensor
    directions: torch.Tensor
    shifts: torch.Tensor
    bits: torch.Tensor
    real: torch.Tensor
    row_heads: torch.Tensor

    @classmethod
    def of(cls, widths: torch.Tensor, separate: bool = False) -> Layout:
        """The layout for directions with these bits, (kv_heads, d).

        Args:
            separate: Whether a byte belongs to one head, for tokens that lie elsewhere in each head. That takes a few bytes more.
        """
        counts, levels, rows = [], [], []
        for plane in PLANES:
            parts = [
                torch.nn.functional.pad((widths == width).nonzero(), (0, 1), value=shift)
                for width, own in _PARTS.items()
                for bits, shift in own
                if bits == plane
            ]
            found = torch.nn.functional.pad(torch.cat(parts), (0, 1), value=1)
            found = found[found[:, 0].argsort(stable=True)]
            groups = [found[found[:, 0] == head] for head in range(len(widths))] if separate else [found]
            # A byte has a level of each of as many parts of a group.
            slots = torch.cat([_filled(group, 8 // plane, head) for head, group in enumerate(groups)], 1)
            rows.append(slots[0, :, 0])
            counts.append(slots.shape[0] * slots.shape[1])
            levels.append(torch.nn.functional.pad(slots.flatten(0, 1), (0, 1), value=plane))
        heads, directions, shifts, real, bits = torch.cat(levels).unbind(1)
        return cls((counts[0], counts[1], counts[2], counts[3]), heads, directions, shifts, bits, real.bool(), torch.cat(rows))

    def by_head(self, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The levels of each head, (heads, most of a head), and which of these there are."""
        own = [((self.heads == head) & self.real).nonzero()[:, 0] for head in range(heads)]
        most = max(map(len, own))
        index = torch.stack([torch.nn.functional.pad(levels, (0, most - len(levels))) for levels in own])
        return index, torch.arange(most) < torch.tensor([len(levels) for levels in own])[:, None]


def packed_bytes(widths: torch.Tensor) -> int:
    """Bytes of one token whose directions have these bits, (kv_heads, d)."""
    codes = dict.fromkeys(PLANES, 0)
    for width, count in enumerate(torch.bincount(widths.flatten()).tolist()):
        for bits, _ in _PARTS.get(width, ()) if count else ():
            codes[bits] += count
    return sum(-(-bits * count // 8) for bits, count in codes.items())


def _filled(levels: torch.Tensor, parts: int, head: int) -> torch.Tensor:
    """Levels in as many parts of one length, (parts, length, 4).

    Args:
        levels: (levels, 4): head, direction, shift, and 1.
        head: Of levels that are added.
    """
    fill = levels.new_tensor([head, 0, 0, 0]).expand(-len(levels) % parts, -1)
    return torch.cat([levels, fill]).view(parts, -1, 4)
