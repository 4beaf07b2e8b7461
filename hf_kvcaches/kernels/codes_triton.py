"""The Triton kernel behind `codes.py`, with its launcher. Import it inside a function: it needs Triton as soon as it is imported.

A program attends for one row and KV head, with all the query heads that share it, over a run of its tokens. Of each token it reads the
bytes that hold codes of its head, neighbouring tokens together, and takes the codes out of them in registers. Values are summed up as
levels. `combine_kernel` puts the runs together, multiplies by the basis of the values and adds their offset, once.

With a bank of bases a program takes a tile at a time, loads a basis of keys when it changes, and multiplies by a basis of values when it
ends. Keys are decoded on the tensor cores and rotated in registers: where positions count up, the query is
unrotated to the first token of each block, and all that is left are the same few angles in every block.

Options come to the kernel as tuples of a tensor and its strides, or as None, which leaves their code out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.bases_triton import (
    LARGEST,
    bank_of,
    basis_halves,
    basis_number,
    block_size,
    cos_and_sin,
    frequencies_of,
    projected,
    projected_query,
    query_halves,
    rotated_products,
    vector_halves,
    warps,
)
from hf_kvcaches.kernels.code_layout import TILE
from hf_kvcaches.kernels.common_triton import basis_at, capped, combine, decoded, dot, finite, load_option, rotate_pairs, store_part
from hf_kvcaches.kernels.launch import padded, split_tokens, strided, strided_or_none

if TYPE_CHECKING:
    from hf_kvcaches.kernels.attention_parts import KeyRotation, Part
    from hf_kvcaches.kernels.code_layout import CodeMap, CodeOptions

A_TILE = tl.constexpr(TILE)


@triton.jit
def _columns(side, b, h, ranks, RANK: tl.constexpr):
    """Where the codes of a head are, (ranks) each: pointer to the row of bytes, first bit, mask of the bits, code of level 0.

    `side`: a pointer to bytes, the strides of batch and row, a pointer to the index, and how many codes have 8, 4, 2 and 1 bits.
    """
    level = tl.load(side[3] + h * RANK + ranks, mask=ranks < RANK, other=0).to(tl.int32)
    of_8, of_4, of_2, of_1 = side[4], side[5], side[6], side[7]
    is_8, is_4, is_2 = level < of_8, level < of_8 + of_4, level < of_8 + of_4 + of_2
    bits = tl.where(is_8, 8, tl.where(is_4, 4, tl.where(is_2, 2, 1)))
    count = tl.where(is_8, of_8, tl.where(is_4, of_4, tl.where(is_2, of_2, of_1)))
    first = tl.where(is_8, 0, tl.where(is_4, of_8, tl.where(is_2, of_8 + of_4, of_8 + of_4 + of_2)))
    first_row = tl.where(is_8, 0, tl.where(is_4, of_8, tl.where(is_2, of_8 + of_4 // 2, of_8 + of_4 // 2 + of_2 // 4)))
    rows = tl.maximum(count * bits // 8, 1)
    row = first_row + (level - first) % rows
    at = side[0] + b * side[1] + row.to(tl.int64) * side[2]
    return at, (level - first) // rows * bits, (1 << bits) - 1, 1 << (bits - 1)


@triton.jit
def _levels(columns, s, live, ranks, RANK: tl.constexpr, dtype: tl.constexpr):
    """Levels of a block of tokens, (tokens, ranks). Those of tokens that are not live are any of the levels."""
    mask = (ranks < RANK)[:, None] & live[None, :]
    codes = tl.load(columns[0][:, None] + s[None, :], mask=mask, other=0).to(tl.int32)
    codes = (codes >> columns[1][:, None]) & columns[2][:, None]
    return tl.trans((codes - columns[3][:, None]).to(tl.float32).to(dtype))


@triton.jit
def _decoded_values(
    sums, share, b, h, basis, bank, offsets, dims, ranks, DIM: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """Sums of values, (heads, dims), from those of levels, (heads, ranks), and of weights, (heads)."""
    offset = tl.load(basis_at(b, h, basis, offsets) + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    return decoded(sums, b, h, basis, bank, dims, ranks, DIM, RANK) + share[:, None] * offset[None, :]


# Arguments of `attend_kernel`.
# `query`: (batch * heads, DIM). `asked`, `constants`: what of it is multiplied with levels, and with the offset, None or (pointer,
# strides) of (GROUP, RANK) and (GROUP). `keys`, `values`: see `_columns`. Of their tiles: None or (bases, strides). `valid`: None or
# (pointer, strides). `key_bank`, `key_offsets`: of (DIM, RANK) and (DIM), if keys are rotated. `value_bank`, `value_offsets`: of
# (VALUE_DIM, VALUE_RANK) and (VALUE_DIM), if there are several bases. `frequencies`: in 2^-64 of a full circle. `positions`: None, if
# they count up from `start`, or (pointer, stride). `parts`, `stats`: as `combine_kernel` reads them, of width VALUE_RANK, or VALUE_DIM
# with a bank.
@triton.jit
def attend_kernel(
    query, asked, constants, keys, key_basis_of, values, value_basis_of, valid, key_bank, key_offsets, value_bank, value_offsets,
    frequencies, positions, start, attention_scaling, parts, stats, scaling, softcap, tokens, chunk,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, VALUE_RANK: tl.constexpr, VALUE_RANK_PAD: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of one row and KV head over a run of its tokens. Stores a maximum, a total, and sums, which are of levels."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // KV_HEADS, row % KV_HEADS
    dtype: tl.constexpr = query.dtype.element_ty
    heads, ranks, value_ranks = tl.arange(0, HEADS), tl.arange(0, RANK_PAD), tl.arange(0, VALUE_RANK_PAD)
    value_dims, pairs = tl.arange(0, VALUE_PAD), tl.arange(0, PAIRS_PAD)
    begin, end = tl.program_id(1) * chunk, tl.minimum((tl.program_id(1) + 1) * chunk, tokens)
    key_columns, value_columns = _columns(keys, b, h, ranks, RANK), _columns(values, b, h, value_ranks, VALUE_RANK)
    key_basis = row * 0 if key_basis_of is None else basis_number(begin // A_TILE, b, h, key_basis_of)
    value_basis = row * 0 if value_basis_of is None else basis_number(begin // A_TILE, b, h, value_basis_of)
    if asked is not None:
        plain = projected_query(b, h, key_basis, asked, heads, ranks, GROUP, RANK, dtype)
        constant = tl.load(basis_at(b, h, key_basis, constants) + heads, mask=heads < GROUP, other=0.0)
    if key_bank is not None:
        one, two = query_halves(query, row, heads, pairs, attention_scaling, DIM, GROUP, PAIRS, INTERLEAVED)
        frequency = tl.load(frequencies + pairs, mask=pairs < PAIRS, other=0)
        first, second = basis_halves(basis_at(b, h, key_basis, key_bank), pairs, ranks, RANK, PAIRS, INTERLEAVED, dtype)
        offset_one, offset_two = vector_halves(basis_at(b, h, key_basis, key_offsets), pairs, PAIRS, INTERLEAVED)
        if positions is None:
            block_cos, block_sin = cos_and_sin(tl.arange(0, BLOCK).to(tl.int64), frequency)
    highest, total, share = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32), tl.zeros([HEADS], tl.float32)
    sums, done = tl.zeros([HEADS, VALUE_RANK_PAD], tl.float32), tl.zeros([HEADS, VALUE_PAD], tl.float32)
    for from_token in range(begin, end, BLOCK):
        s = from_token + tl.arange(0, BLOCK)
        live = s < end if valid is None else (s < end) & (load_option(s, s < end, b, h, valid) != 0)
        if key_basis_of is not None:
            basis = basis_number(from_token // A_TILE, b, h, key_basis_of)
            if basis != key_basis:
                if asked is not None:
                    plain = projected_query(b, h, basis, asked, heads, ranks, GROUP, RANK, dtype)
                    constant = tl.load(basis_at(b, h, basis, constants) + heads, mask=heads < GROUP, other=0.0)
                if key_bank is not None:
                    first, second = basis_halves(basis_at(b, h, basis, key_bank), pairs, ranks, RANK, PAIRS, INTERLEAVED, dtype)
                    offset_one, offset_two = vector_halves(basis_at(b, h, basis, key_offsets), pairs, PAIRS, INTERLEAVED)
                key_basis = basis
        data = _levels(key_columns, s, s < end, ranks, RANK, dtype)
        scores = tl.zeros([HEADS, BLOCK], tl.float32) if asked is None else dot(plain, tl.trans(data)) + constant[:, None]
        if key_bank is not None:
            key_one, key_two = dot(data, first) + offset_one[None, :], dot(data, second) + offset_two[None, :]
            if positions is None:
                cos, sin = cos_and_sin(tl.full([1], 0, tl.int64) + start + from_token, frequency)
                block_one, block_two = rotate_pairs(one, two, cos, -sin)
                scores += rotated_products(key_one, key_two, block_one, block_two, block_cos, block_sin, dtype)
            else:
                cos, sin = cos_and_sin(tl.load(positions[0] + b * positions[1] + s, mask=live, other=0).to(tl.int64), frequency)
                scores += rotated_products(key_one, key_two, one, two, cos, sin, dtype)
        scores = tl.where(live[None, :], capped(scores * scaling, softcap), float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - finite(higher)[:, None]), tl.exp(highest - finite(higher))
        total, highest = total * shrink + tl.sum(weights, 1), higher
        if value_bank is not None:
            basis = basis_number(from_token // A_TILE, b, h, value_basis_of)
            if basis != value_basis:
                done += _decoded_values(
                    sums, share, b, h, value_basis, value_bank, value_offsets, value_dims, value_ranks, VALUE_DIM, VALUE_RANK
                )
                sums, share = tl.zeros([HEADS, VALUE_RANK_PAD], tl.float32), tl.zeros([HEADS], tl.float32)
                value_basis = basis
            done, share = done * shrink[:, None], share * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + dot(weights.to(dtype), _levels(value_columns, s, s < end, value_ranks, VALUE_RANK, dtype))
    if value_bank is not None:
        done += _decoded_values(sums, share, b, h, value_basis, value_bank, value_offsets, value_dims, value_ranks, VALUE_DIM, VALUE_RANK)
        store_part(row, heads, done, value_dims, highest, total, parts, stats, GROUP, VALUE_DIM)
    else:
        store_part(row, heads, sums, value_ranks, highest, total, parts, stats, GROUP, VALUE_RANK)


def _side(packed: torch.Tensor, code_map: CodeMap) -> tuple[Any, ...]:
    """What `_columns` reads."""
    return packed, *packed.stride()[:2], code_map.index.contiguous(), *code_map.counts


def fits(query: torch.Tensor, key_map: CodeMap, value_map: CodeMap, rotation: KeyRotation | None) -> bool:
    """Whether a program can hold the bases that it needs: those of keys that are rotated, and those of values in a bank."""
    of_keys = 0 if rotation is None else 2 * padded(len(rotation.inv_freq)) * padded(key_map.index.shape[1]) * query.element_size()
    of_values = math.prod(map(padded, value_map.decode.shape[-2:])) * 4 if value_map.decode.ndim == 5 else 0
    return of_keys <= LARGEST[0] and of_values <= LARGEST[1]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_map: CodeMap,
    value_map: CodeMap,
    scaling: float,
    options: CodeOptions,
    *,
    splits: int | None = None,
    block: int | None = None,
) -> Part:
    """`code_attention`, whose arguments these are, checked, and two more.

    Args:
        splits: How many programs share the tokens of a row and KV head; None: enough to fill the GPU.
        block: Tokens that a program takes at a time, a power of two from 16 on; None: what fits into registers. A tile, with a bank.
    """
    valid, rotation, key_basis_of, value_basis_of, softcap = options
    batch, heads, _, dim = query.shape
    (kv_heads, rank), tokens = key_map.index.shape, keys.shape[2]
    value_dim, value_rank = value_map.decode.shape[-2:]
    pairs, positions = (0, None) if rotation is None else (len(rotation.inv_freq), rotation.positions)
    if not fits(query, key_map, value_map, rotation):
        raise UnsupportedError("backend='triton': such large bases, rotated or in a bank, do not fit a GPU. Use backend='torch'.")
    banked = key_basis_of is not None or value_basis_of is not None
    block = TILE if banked else block or block_size(rank, value_rank, pairs)
    chunk, splits = split_tokens(tokens, block, batch * kv_heads, splits, query.device)
    query = query.contiguous()
    key_offsets, value_offsets = (code_map.offset.unsqueeze(-1) for code_map in (key_map, value_map))
    width = value_rank if value_basis_of is None else value_dim
    parts, stats = (query.new_empty(batch * heads * splits * n, dtype=torch.float32) for n in (width, 2))
    attend_kernel[(batch * kv_heads, splits)](
        query,
        projected(query, key_map.decode, kv_heads, 2 * pairs),
        projected(query.float(), key_offsets, kv_heads, 2 * pairs),
        _side(keys, key_map),
        *strided_or_none(key_basis_of),
        _side(values, value_map),
        *strided_or_none(value_basis_of),
        None if valid is None else strided(valid, (batch, kv_heads, tokens)),
        *(None if rotation is None else bank_of(bank) for bank in (key_map.decode, key_offsets)),
        *(None if value_basis_of is None else bank_of(bank) for bank in (value_map.decode, value_offsets)),
        None if rotation is None else frequencies_of(rotation.inv_freq, query.device),
        None if positions is None else (positions.contiguous(), positions.shape[1] if len(positions) == batch else 0),
        *((0, 1.0) if rotation is None else (rotation.start, rotation.attention_scaling)),
        *(parts, stats, scaling, softcap, tokens, chunk),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEADS=padded(heads // kv_heads),
        DIM=dim,
        RANK=rank,
        RANK_PAD=padded(rank),
        VALUE_DIM=value_dim,
        VALUE_PAD=padded(value_dim),
        VALUE_RANK=value_rank,
        VALUE_RANK_PAD=padded(value_rank),
        PAIRS=pairs,
        PAIRS_PAD=padded(pairs),
        INTERLEAVED=rotation is not None and rotation.layout == "interleaved",
        BLOCK=block,
        num_stages=2,
        num_warps=warps(rank, value_rank, query.dtype == torch.float32),
    )
    output = query.new_empty(batch, 1, heads, value_dim)
    decode, offset = (None, None) if value_basis_of is not None else (bank_of(value_map.decode), bank_of(value_offsets))
    return output, combine(parts, stats, decode, output, kv_heads, splits, width, offset)
