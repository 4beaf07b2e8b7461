"""The PyTorch back-end of `codes.py`: blocks of tokens that are unpacked, decoded and used while they are in cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from hf_kvcaches.kernels.attention_parts import Part, by_kv_head, computing_dtype, exponentials, from_first_position, normalized
from hf_kvcaches.kernels.code_layout import TILE, CodeMap, CodeOptions, Counts, planes
from hf_kvcaches.kernels.rotation import Layout, Tables, rotate_

# Numbers of a block of decoded vectors or levels: 2 MB in float32, so that they are still in cache when they are used.
BLOCK = 2**19
# Tokens a block should have at least, if need be by taking fewer rows: matrix products of few columns are slow.
LONG = 256


class LevelRun(NamedTuple):
    """Some rows and, in `pieces`, tokens that all use one basis in each head: `basis`, (rows, kv_heads), or None where there is one."""

    rows: slice
    pieces: list[slice]
    basis: torch.Tensor | None


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_map: CodeMap,
    value_map: CodeMap,
    scaling: float,
    options: CodeOptions,
) -> Part:
    """`code_attention`, whose arguments these are, checked."""
    valid, rotation, key_basis_of, value_basis_of, softcap = options
    asking = by_kv_head(query, len(key_map.index), scaling)
    if rotation is None:
        scores = _projected_scores(asking, _Side(keys, key_map, asking.dtype), key_basis_of)
    else:
        asking, tables = from_first_position(asking, rotation, valid, keys.shape[2])
        scores = _rotated_scores(asking, _Side(keys, key_map, _product_dtype(query)), key_basis_of, tables, rotation.layout)
    weights, total, highest = exponentials(scores, valid, softcap)
    # Levels are converted faster to float32 than to bfloat16, and products with so few rows are limited by memory.
    sums = _weighted_values(weights, _Side(values, value_map, weights.dtype), value_basis_of)
    return normalized(query, sums, total, highest)


def decode(packed: torch.Tensor, code_map: CodeMap, basis_of: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """`decode_codes`, whose arguments these are, checked."""
    kv_heads, dim = len(code_map.index), code_map.decode.shape[-2]
    vectors = code_map.decode.new_empty(len(packed), kv_heads, packed.shape[2], dim, dtype=dtype)
    side = _Side(packed, code_map, _product_dtype(vectors))
    for run in side.runs(basis_of, max(side.dim, side.rank)):
        bases = side.bases(run, computing_dtype(vectors))
        for tokens in run.pieces:
            vectors[run.rows, :, tokens] = side.vectors(run.rows, tokens, *bases)
    return vectors


def unpacked(packed: torch.Tensor, counts: Counts) -> torch.Tensor:
    """The levels, (batch, sum of counts, tokens), int8, of packed codes: a handful of operations, however many codes and heads."""
    batch, _, tokens = packed.shape
    codes = packed.new_empty(batch, sum(counts), tokens)
    shifts, masks, centers = _bit_tables(counts, packed.device)
    for plane, shift in zip(planes(counts), shifts, strict=True):
        slots = codes[:, plane.level : plane.level + plane.size].view(batch, len(shift), plane.rows, tokens)
        torch.bitwise_right_shift(packed[:, None, plane.row : plane.row + plane.rows], shift, out=slots)
    return codes.bitwise_and_(masks).sub_(centers).view(torch.int8)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _bit_tables(counts: Counts, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The first bits of the slots of each plane, (slots, 1, 1); of each level the largest code and the code of level 0: (levels, 1)."""
    shifts = [torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=device).view(-1, 1, 1) for plane in planes(counts)]
    centers = torch.tensor([1 << plane.bits - 1 for plane in planes(counts) for _ in range(plane.size)], dtype=torch.int64, device=device)
    return shifts, (2 * centers - 1).to(torch.uint8).unsqueeze(1), centers.to(torch.uint8).unsqueeze(1)


class _Side:
    """Packed keys or values, read block by block.

    Args:
        packed: (batch, rows, tokens).
        code_map: What its codes stand for.
        dtype: Of products of levels.
    """

    def __init__(self, packed: torch.Tensor, code_map: CodeMap, dtype: torch.dtype) -> None:
        self.packed, self.map, self.dtype = packed, code_map, dtype
        self.kv_heads, self.rank = code_map.index.shape
        self.dim = code_map.decode.shape[-2]
        index = code_map.index.flatten()
        ordered = len(index) == sum(code_map.counts) and torch.equal(index, torch.arange(len(index), device=index.device))
        self._index = None if ordered else index

    def runs(self, basis_of: torch.Tensor | None, width: int) -> Iterator[LevelRun]:
        """All tokens of some rows, then of the next ones.

        Args:
            width: Numbers of a token and head that should fit in cache.
        """
        batch, _, tokens = self.packed.shape
        one = self.kv_heads * max(1, width)
        rows = min(batch, max(1, BLOCK // (one * min(tokens, LONG))))
        most = max(TILE, BLOCK // (one * rows) // TILE * TILE)
        for row in range(0, batch, rows):
            some = slice(row, min(row + rows, batch))
            for begin, end, basis in _same_bases(None if basis_of is None else basis_of[some], tokens):
                yield LevelRun(some, [slice(first, min(first + most, end)) for first in range(begin, end, most)], basis)

    def bases(self, run: LevelRun, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`decode`, in the dtype of products, and `offset`, in `dtype`: (rows or 1, kv_heads, dim, rank or 1)."""
        decode, offset = self.map.decode, self.map.offset
        if decode.ndim == 3:
            decode, offset = decode.unsqueeze(0), offset.unsqueeze(0)
        elif run.basis is None:
            decode, offset = decode[run.rows].squeeze(2), offset[run.rows].squeeze(2)
        else:
            rows = torch.arange(run.rows.start, run.rows.stop, device=decode.device)[:, None]
            heads = torch.arange(self.kv_heads, device=decode.device)
            decode, offset = decode[rows, heads, run.basis], offset[rows, heads, run.basis]
        return decode.to(self.dtype), offset.to(dtype).unsqueeze(-1)

    def levels(self, rows: slice, tokens: slice) -> torch.Tensor:
        """(rows, kv_heads, rank, tokens)."""
        levels = unpacked(self.packed[rows, :, tokens], self.map.counts)
        if self._index is not None:
            levels = levels.index_select(1, self._index)
        return levels.to(self.dtype).unflatten(1, (self.kv_heads, self.rank))

    def vectors(self, rows: slice, tokens: slice, decode: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """(rows, kv_heads, tokens, dim), in the dtype of `offset`."""
        return (self.levels(rows, tokens).mT @ decode.mT).to(offset.dtype).add_(offset.mT)


def _same_bases(basis_of: torch.Tensor | None, tokens: int) -> Iterator[tuple[int, int, torch.Tensor | None]]:
    """Begin and end of runs of tokens that have one basis in each head, and which, (rows, kv_heads)."""
    if basis_of is None:
        yield 0, tokens, None
        return
    changes = (basis_of[:, :, 1:] != basis_of[:, :, :-1]).flatten(0, 1).any(0).nonzero()[:, 0] + 1
    for tile, end in pairwise([0, *changes.tolist(), basis_of.shape[2]]):
        yield tile * TILE, min(end * TILE, tokens), basis_of[:, :, tile].long()


def _projected_scores(asking: torch.Tensor, side: _Side, basis_of: torch.Tensor | None) -> torch.Tensor:
    """Scores of keys that are not rotated, (batch, kv_heads, group, tokens): the query is projected instead of decoding keys."""
    scores = asking.new_empty(*asking.shape[:3], side.packed.shape[2])
    for run in side.runs(basis_of, side.rank):
        decode, offset = side.bases(run, asking.dtype)
        projected, constant = asking[run.rows] @ decode, asking[run.rows] @ offset
        for tokens in run.pieces:
            scores[run.rows, ..., tokens] = (projected @ side.levels(run.rows, tokens)).add_(constant)
    return scores


def _rotated_scores(asking: torch.Tensor, side: _Side, basis_of: torch.Tensor | None, tables: Tables, layout: Layout) -> torch.Tensor:
    """Scores of keys that are decoded and rotated, (batch, kv_heads, group, tokens)."""
    scores = asking.new_empty(*asking.shape[:3], side.packed.shape[2])
    cos, sin = (table.expand(len(asking), 1, -1, -1) for table in tables)
    # Dimensions in an order that lets each pair be rotated as one complex number, which takes half the time.
    order = torch.arange(side.dim, device=asking.device)
    if layout == "half":
        rotated = 2 * cos.shape[-1]
        order[:rotated] = order[:rotated].view(2, -1).T.flatten()
    asking = asking[..., order]
    for run in side.runs(basis_of, max(side.dim, side.rank)):
        decode, offset = (basis.index_select(2, order) for basis in side.bases(run, asking.dtype))
        for tokens in run.pieces:
            keys = side.vectors(run.rows, tokens, decode, offset)
            rotate_(keys, cos[run.rows, :, tokens], sin[run.rows, :, tokens], "interleaved")
            scores[run.rows, ..., tokens] = asking[run.rows] @ keys.mT
    return scores


def _weighted_values(weights: torch.Tensor, side: _Side, basis_of: torch.Tensor | None) -> torch.Tensor:
    """Sums of values, (batch, kv_heads, group, dim), for weights (batch, kv_heads, group, tokens)."""
    values = weights.new_zeros(*weights.shape[:3], side.dim)
    for run in side.runs(basis_of, side.rank):
        decode, offset = side.bases(run, weights.dtype)
        levels, total = weights.new_zeros(()), weights.new_zeros(())
        for tokens in run.pieces:
            shares = weights[run.rows, ..., tokens]
            levels, total = levels + shares @ side.levels(run.rows, tokens).mT, total + shares.sum(-1, keepdim=True)
        values[run.rows] += levels @ decode.mT + total * offset.mT
    return values


def _product_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which levels are multiplied by a basis: on CPUs, products in float16 take many times as long as in float32."""
    return tensor.dtype if tensor.dtype == torch.bfloat16 else computing_dtype(tensor)
