"""The PyTorch back-end of `codes.py`: blocks of tokens that are unpacked, decoded and used while they are in cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch

from hf_kvcaches.kernels.attention_parts import Part, by_kv_head, computing_dtype, exponentials, from_first_position, normalized
from hf_kvcaches.kernels.code_layout import TILE, CodeMap, CodeOptions, Counts, planes
from hf_kvcaches.kernels.rotation import Layout, Tables, rotate_

# Numbers of a block of decoded vectors or levels: 2 MB in float32, so that they are still in cache when they are used.
BLOCK = 2**19
# Tokens a block should have at least, if need be by taking fewer rows: matrix products of few columns are slow.
LONG = 256


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
        scores = _projected_scores(asking, _Side(keys, key_map, key_basis_of, asking.dtype, asking.dtype))
    else:
        asking, tables = from_first_position(asking, rotation, valid, keys.shape[2])
        order = _paired(asking, tables, rotation.layout)
        side = _Side(keys, key_map, key_basis_of, _product_dtype(query), asking.dtype, order)
        scores = _rotated_scores(asking[..., order], side, tables)
    weights, total, highest = exponentials(scores, valid, softcap)
    # Levels are converted faster to float32 than to bfloat16, and products with so few rows are limited by memory.
    sums = _weighted_values(weights, _Side(values, value_map, value_basis_of, weights.dtype, weights.dtype))
    return normalized(query, sums, total, highest)


def decode(packed: torch.Tensor, code_map: CodeMap, basis_of: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """`decode_codes`, whose arguments these are, checked."""
    kv_heads, dim = len(code_map.index), code_map.decode.shape[-2]
    vectors = code_map.decode.new_empty(len(packed), kv_heads, packed.shape[2], dim, dtype=dtype)
    side = _Side(packed, code_map, basis_of, _product_dtype(vectors), computing_dtype(vectors))
    for block in side.blocks(max(side.dim, side.rank)):
        vectors[block.rows, :, block.tokens] = side.vectors(block)
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


# As many as there are sides of layers, whose entries a step visits in a circle: with fewer, each visit would make one anew.
@lru_cache(maxsize=4096)
@torch.inference_mode(False)
def _bit_tables(counts: Counts, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The first bits of the slots of each plane, (slots, 1, 1); of each level the largest code and the code of level 0: (levels, 1)."""
    shifts = [torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=device).view(-1, 1, 1) for plane in planes(counts)]
    centers = torch.tensor([1 << plane.bits - 1 for plane in planes(counts) for _ in range(plane.size)], dtype=torch.int64, device=device)
    return shifts, (2 * centers - 1).to(torch.uint8).unsqueeze(1), centers.to(torch.uint8).unsqueeze(1)


class _Block(NamedTuple):
    """Some rows and tokens, whole tiles unless these are the last ones."""

    rows: slice
    tokens: slice


class _Run(NamedTuple):
    """Tokens of a block that use one basis, of one row and head, or of all where there is one basis each.

    Args:
        place: Row, head, ... and tokens in the block.
        basis: Row, head and number in the bank.
    """

    place: tuple[Any, ...]
    basis: tuple[Any, ...]


class _Side:
    """Packed keys or values, read block by block.

    Args:
        packed: (batch, rows, tokens).
        code_map: What its codes stand for.
        basis_of: Which basis each tile uses, or None.
        product: The dtype of products of levels.
        dtype: Of sums and vectors.
        order: Of dimensions, if not their own.

    Attributes:
        decode: The bank of bases, (batch, kv_heads, bases, dim, rank), in the dtype of products.
        offset: (batch, kv_heads, bases, 1, dim), in that of sums.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        code_map: CodeMap,
        basis_of: torch.Tensor | None,
        product: torch.dtype,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
    ) -> None:
        self.packed, self.basis_of, self.counts = packed, basis_of, code_map.counts
        self.kv_heads, self.rank = code_map.index.shape
        self.dim = code_map.decode.shape[-2]
        self._index = code_map.index.flatten()
        decode, offset = code_map.decode.to(product), code_map.offset.to(dtype)
        if order is not None:
            decode, offset = decode.index_select(-2, order), offset.index_select(-1, order)
        if decode.ndim == 3:
            decode, offset = (basis[None, :, None].expand(len(packed), -1, -1, *basis.shape[1:]) for basis in (decode, offset))
        self.decode, self.offset = decode, offset.unsqueeze(-2)

    def blocks(self, width: int) -> Iterator[_Block]:
        """All tokens of some rows, then of the next ones.

        Args:
            width: Numbers of a token and head that should fit in cache.
        """
        batch, _, tokens = self.packed.shape
        one = self.kv_heads * max(1, width)
        rows = min(batch, max(1, BLOCK // (one * min(tokens, LONG))))
        most = max(TILE, BLOCK // (one * rows) // TILE * TILE)
        for row, token in product(range(0, batch, rows), range(0, tokens, most)):
            yield _Block(slice(row, min(row + rows, batch)), slice(token, min(token + most, tokens)))

    def runs(self, block: _Block) -> Iterator[_Run]:
        """The tokens of a block by their basis."""
        rows, tokens = block
        if self.basis_of is None:
            yield _Run((...,), (rows, slice(None), 0))
            return
        basis_of = self.basis_of[rows, :, tokens.start // TILE : -(-tokens.stop // TILE)]
        begins = torch.nn.functional.pad(basis_of[..., 1:] != basis_of[..., :-1], (1, 0), value=True)
        found = list(zip(begins.nonzero().tolist(), basis_of[begins].tolist(), strict=True))
        # Each head begins with tile 0: where that comes next, a run reaches the end of the block.
        for ((row, head, tile), basis), ((_, _, end), _) in pairwise([*found, ((0, 0, 0), 0)]):
            yield _Run((row, head, ..., slice(tile * TILE, end * TILE or None)), (rows.start + row, head, basis))

    def levels(self, block: _Block) -> torch.Tensor:
        """(rows, kv_heads, rank, tokens)."""
        levels = unpacked(self.packed[block.rows, :, block.tokens], self.counts).index_select(1, self._index)
        return levels.to(self.decode.dtype).unflatten(1, (self.kv_heads, self.rank))

    def vectors(self, block: _Block) -> torch.Tensor:
        """(rows, kv_heads, tokens, dim)."""
        levels = self.levels(block).mT
        if self.basis_of is None:
            decode, offset = self.decode[block.rows, :, 0].mT, self.offset[block.rows, :, 0]
            if decode.dtype != offset.dtype:
                return (levels @ decode).to(offset.dtype).add_(offset)
            return torch.baddbmm(offset.flatten(0, 1), levels.flatten(0, 1), decode.flatten(0, 1)).view(*levels.shape[:-1], self.dim)
        vectors = self.offset.new_empty(*levels.shape[:-1], self.dim)
        for place, basis in self.runs(block):
            own = vectors.mT[place].mT
            own.copy_(levels.mT[place].mT @ self.decode[basis].mT)
            own.add_(self.offset[basis])
        return vectors


def _paired(asking: torch.Tensor, tables: Tables, layout: Layout) -> torch.Tensor:
    """Dimensions in an order that lets each pair be rotated as one complex number, which takes half the time."""
    order = torch.arange(asking.shape[-1], device=asking.device)
    if layout == "half":
        rotated = 2 * tables[0].shape[-1]
        order[:rotated] = order[:rotated].view(2, -1).T.flatten()
    return order


def _projected_scores(asking: torch.Tensor, side: _Side) -> torch.Tensor:
    """Scores of keys that are not rotated, (batch, kv_heads, group, tokens): the query is projected instead of decoding keys."""
    scores = asking.new_empty(*asking.shape[:3], side.packed.shape[2])
    projected, constant = asking.unsqueeze(2) @ side.decode, asking.unsqueeze(2) @ side.offset.mT
    for block in side.blocks(side.rank):
        levels, own = side.levels(block), scores[block.rows, ..., block.tokens]
        for place, basis in side.runs(block):
            own[place] = (projected[basis] @ levels[place]).add_(constant[basis])
    return scores


def _rotated_scores(asking: torch.Tensor, side: _Side, tables: Tables) -> torch.Tensor:
    """Scores of keys that are decoded and rotated, (batch, kv_heads, group, tokens)."""
    scores = asking.new_empty(*asking.shape[:3], side.packed.shape[2])
    cos, sin = (table.expand(len(asking), 1, -1, -1) for table in tables)
    for block in side.blocks(max(side.dim, side.rank)):
        rows, tokens = block
        keys = rotate_(side.vectors(block), cos[rows, :, tokens], sin[rows, :, tokens], "interleaved")
        scores[rows, ..., tokens] = asking[rows] @ keys.mT
        del keys  # The next block gets their memory, which is still in cache.
    return scores


def _weighted_values(weights: torch.Tensor, side: _Side) -> torch.Tensor:
    """Sums of values, (batch, kv_heads, group, dim), for weights (batch, kv_heads, group, tokens)."""
    (batch, kv_heads, group, _), bases = weights.shape, side.decode.shape[2]
    sums, totals = weights.new_zeros(batch, kv_heads, bases, group, side.rank), weights.new_zeros(batch, kv_heads, bases, group, 1)
    for block in side.blocks(side.rank):
        levels, shares = side.levels(block), weights[block.rows, ..., block.tokens]
        for place, basis in side.runs(block):
            own = shares[place]
            sums[basis].add_(own @ levels[place].mT)
            totals[basis].add_(own.sum(-1, keepdim=True))
        del levels  # As keys above.
    return (sums @ side.decode.mT + totals * side.offset).sum(2)


def _product_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which levels are multiplied by a basis: on CPUs, products in float16 take many times as long as in float32."""
    return tensor.dtype if tensor.dtype == torch.bfloat16 else computing_dtype(tensor)
