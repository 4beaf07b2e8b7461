"""How codes of 8, 4, 2 and 1 bits are packed into bytes, and what they stand for.

One side (keys or values) of one layer is a uint8 tensor (batch, rows, tokens), with the codes of all heads. Its rows are four
planes one behind the other, of codes with 8, 4, 2 and 1 bits. A plane with n codes of b bits has R = n * b / 8 rows; code j is in row
j % R, from bit b * (j // R) on. The level of a code is code - 2**(b - 1). Levels are numbered in the order of the planes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from hf_kvcaches.kernels.attention_parts import KeyRotation

BITS = (8, 4, 2, 1)
TILE = 16  # Tokens that share a basis: no matrix product of a GPU takes fewer.
Counts = tuple[int, int, int, int]


class CodeMap(NamedTuple):
    """How packed codes become vectors: the vector of a token is decode[h] @ levels[index[h]] + offset[h].

    Args:
        counts: How many codes there are of 8, 4, 2 and 1 bits, each a whole number of rows. Codes that only fill a row are used by nobody.
        index: Which level each column of a head's `decode` is for, (kv_heads, rank), int64. A head with fewer columns has zeros in
            `decode` and any valid number here.
        decode: (kv_heads, dim, rank): one basis a head; or (batch, kv_heads, bases, dim, rank): a bank, from which tiles choose.
        offset: Like `decode`, without the rank.
    """

    counts: Counts
    index: torch.Tensor  # type: ignore[assignment]  # hides the method of tuples
    decode: torch.Tensor
    offset: torch.Tensor


class CodeOptions(NamedTuple):
    """What `code_attention` may be given by name, which is described there."""

    valid: torch.Tensor | None = None
    rotation: KeyRotation | None = None
    key_basis_of: torch.Tensor | None = None
    value_basis_of: torch.Tensor | None = None
    softcap: float | None = None


class Plane(NamedTuple):
    """The codes of one width: `size` levels from number `level` on, in `rows` rows from number `row` on."""

    bits: int
    size: int
    level: int
    row: int
    rows: int


def planes(counts: Counts) -> Iterator[Plane]:
    """The planes that are not empty."""
    level = row = 0
    for bits, count in zip(BITS, counts, strict=True):
        rows = count * bits // 8
        if count:
            yield Plane(bits, count, level, row, rows)
        level, row = level + count, row + rows


def packed_rows(counts: Counts) -> int:
    """Bytes of a token."""
    return sum(plane.rows for plane in planes(counts))
