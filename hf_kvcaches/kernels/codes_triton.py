"""The Triton kernels behind `codes.py`, with their launcher. Import it inside a function: it needs Triton as soon as it is imported.

A program works for one row and key head, with queries of all heads that share it, over a run of its tokens, and on LEVELS of the levels,
which it takes out of their bytes in registers. `score_kernel` holds its columns of the basis; for a few tiles at a time it rotates the
queries back, projects them, and multiplies them with the levels of the tokens: a row of its matrices is one query at one tile.
`value_kernel` adds these scores up, and sums up levels by their exponentials. `combine` merges the runs; values are decoded once.

What differs between layers (levels, planes, tokens) is known at run time only, so that a model compiles each kernel once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.attention import AttentionPart
from hf_kvcaches.kernels.code_format import TILE, Counts
from hf_kvcaches.kernels.common_triton import capped, combine, dot, finite, store_part
from hf_kvcaches.kernels.launch import padded, split_tokens, strided
from hf_kvcaches.kernels.rotation import Layout

A_TILE = tl.constexpr(TILE)
# Dimensions of keys whose basis a program can hold, as compiled for sm_80.
MOST = 256
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _bits_of(codes, b, group, levels, count, of_8, of_4, of_2):
    """Of each level a pointer to its row of bytes, its first bit, the mask of its bits, and the part that is level 0."""
    is_8, is_4, is_2 = levels < of_8, levels < of_8 + of_4, levels < of_8 + of_4 + of_2
    bits = tl.where(is_8, 8, tl.where(is_4, 4, tl.where(is_2, 2, 1)))
    size = tl.where(is_8, of_8, tl.where(is_4, of_4, tl.where(is_2, of_2, count - of_8 - of_4 - of_2)))
    first = tl.where(is_8, 0, tl.where(is_4, of_8, tl.where(is_2, of_8 + of_4, of_8 + of_4 + of_2)))
    first_row = tl.where(is_8, 0, tl.where(is_4, of_8, tl.where(is_2, of_8 + of_4 // 2, of_8 + of_4 // 2 + of_2 // 4)))
    rows, part = tl.maximum(size * bits // 8, 1), levels - first
    offsets = ((first_row + part % rows) * codes[3]).to(tl.int32)  # Wider ones take twice the registers; a group is less than 2 GiB.
    return codes[0] + b * codes[1] + group * codes[2], offsets, part // rows * bits, (1 << bits) - 1, 1 << (bits - 1)


@triton.jit
def _levels(bits, s, mask, dtype: tl.constexpr):
    """Levels of a block of tokens, (levels, tokens), by what `_bits_of` gave; 0 where the mask says no."""
    at, offsets, shifts, masks, zeros = bits
    parts = (tl.load(at + (offsets[:, None] + s[None, :]), mask=mask, other=0).to(tl.int32) >> shifts[:, None]) & masks[:, None]
    return tl.where(mask, parts - zeros[:, None], 0).to(tl.float32).to(dtype)


@triton.jit
def _loaded(at, offsets, mask):
    """Numbers of each row, (rows, offsets), in float32."""
    return tl.load(at[:, None] + offsets[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _basis(keys, dims, live, levels, count, dtype: tl.constexpr):
    """Some rows of a basis, (dims, levels), and their numbers for the constant level, (dims)."""
    at = keys + dims * (count + 1)
    basis = tl.load(at[:, None] + levels[None, :], mask=live[:, None] & (levels < count)[None, :], other=0.0)
    return basis.to(dtype), tl.load(at + count, mask=live, other=0.0).to(tl.float32)


# Arguments of both kernels.
# `query`: (batch * kv_heads, ALL, dim), ALL = query heads of a key head * COUNT. `codes`: (pointer, strides), as `code_format` says.
# `keys`: (kv_heads, dim, count + 1). `cos`, `sin`: None, or (pointer, strides) of (batch, tiles, PAIRS). `scores`: before they are
# scaled, of each block of LEVELS, (blocks, batch * kv_heads, ALL, tokens). `visible`: None, or (pointer, strides) of (batch, COUNT,
# tokens). `parts`, `stats`: see `store_part`. `chunk`: tokens of a program.
# The grid: row and key head and block of QUERIES; runs of tokens; blocks of LEVELS. TOKENS: of a row at a time. TILES: in so many tokens;
# 1 without a rotation. PAIRS: that rotate. PAIRS_PAD, REST_PAD: powers of two that hold them and the other dimensions, 0 if there are none.
@triton.jit(do_not_specialize=["count", "of_8", "of_4", "of_2"])
def score_kernel(
    query, codes, keys, cos, sin, scores, rows, tokens, chunk, dim, count, of_8, of_4, of_2,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, QUERIES: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, LEVELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The scores of one row and key head, of HEADS with one basis, over a run of its tokens, as far as LEVELS make them."""
    row, levels = tl.program_id(0).to(tl.int64) % rows, tl.program_id(2) * LEVELS + tl.arange(0, LEVELS)
    b, h = row // KV_HEADS, row % KV_HEADS
    dtype: tl.constexpr = query.dtype.element_ty
    lines = tl.arange(0, TILES * QUERIES)
    q, slot = tl.program_id(0) // rows * QUERIES + lines % QUERIES, lines // QUERIES
    query_at, key_at = query + (row * ALL + q) * dim, keys + h * dim * (count + 1)
    bits = _bits_of(codes, b, h // HEADS, levels, count, of_8, of_4, of_2)
    rest, rest_constant = tl.zeros([TILES * QUERIES, LEVELS], tl.float32), tl.zeros([TILES * QUERIES], tl.float32)
    if REST_PAD > 0:
        dims = 2 * PAIRS + tl.arange(0, REST_PAD)
        states = _loaded(query_at, dims, (q < ALL)[:, None] & (dims < dim)[None, :])
        basis, column = _basis(key_at, dims, dims < dim, levels, count, dtype)
        rest, rest_constant = dot(states.to(dtype), basis), tl.sum(states * column[None, :], 1)
    if PAIRS > 0:
        pair = tl.arange(0, PAIRS_PAD)
        first, second = 2 * pair if INTERLEAVED else pair, 2 * pair + 1 if INTERLEAVED else pair + PAIRS
        mask = (q < ALL)[:, None] & (pair < PAIRS)[None, :]
        one, two = _loaded(query_at, first, mask), _loaded(query_at, second, mask)
        basis_one, column_one = _basis(key_at, first, pair < PAIRS, levels, count, dtype)
        basis_two, column_two = _basis(key_at, second, pair < PAIRS, levels, count, dtype)
    begin, end = tl.program_id(1) * chunk, tl.minimum((tl.program_id(1) + 1) * chunk, tokens)
    for start in range(begin, end, TOKENS):
        projected, constant, s = rest, rest_constant, start + tl.arange(0, TOKENS)
        live = (q < ALL)[:, None] & (s < end)[None, :]
        if PAIRS > 0:
            tile = start // A_TILE + slot
            mask = (tile * A_TILE < end)[:, None] & (pair < PAIRS)[None, :]
            tile_cos = _loaded(cos[0] + b * cos[1] + tile * cos[2], pair * cos[3], mask)
            tile_sin = _loaded(sin[0] + b * sin[1] + tile * sin[2], pair * sin[3], mask)
            first_states, second_states = one * tile_cos + two * tile_sin, two * tile_cos - one * tile_sin
            projected = dot(second_states.to(dtype), basis_two, dot(first_states.to(dtype), basis_one, rest))
            constant += tl.sum(first_states * column_one[None, :] + second_states * column_two[None, :], 1)
            live = live & (s // A_TILE == tile[:, None])
        block = _levels(bits, s, (levels < count)[:, None] & (s < end)[None, :], dtype)
        # Of all programs that share the tokens the first one counts the constant level.
        found = dot(projected.to(dtype), block) + tl.where(tl.program_id(2) == 0, constant, 0.0)[:, None]
        score_at = scores + ((tl.program_id(2) * rows + row) * ALL + q)[:, None] * tokens + s[None, :]
        tl.store(score_at, found, mask=live)


@triton.jit(do_not_specialize=["count", "of_8", "of_4", "of_2"])
def value_kernel(
    scores, codes, visible, parts, stats, scaling, softcap, rows, tokens, chunk, count, of_8, of_4, of_2,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, COUNT: tl.constexpr, QUERIES: tl.constexpr, LEVELS: tl.constexpr,
    TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sums of LEVELS of one row and key head, of HEADS with one basis, by exponentials, over a run of its tokens."""
    row, levels = tl.program_id(0).to(tl.int64) % rows, tl.program_id(2) * LEVELS + tl.arange(0, LEVELS)
    b, h = row // KV_HEADS, row % KV_HEADS
    q = tl.program_id(0) // rows * QUERIES + tl.arange(0, QUERIES)
    bits = _bits_of(codes, b, h // HEADS, levels, count, of_8, of_4, of_2)
    highest, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, LEVELS], tl.float32)
    begin, end = tl.program_id(1) * chunk, tl.minimum((tl.program_id(1) + 1) * chunk, tokens)
    for start in range(begin, end, TOKENS):
        s = start + tl.arange(0, TOKENS)
        live = (q < ALL)[:, None] & (s < end)[None, :]
        if visible is not None:
            seen_at = visible[0] + b * visible[1] + (q % COUNT)[:, None] * visible[2] + s[None, :] * visible[3]
            live = live & (tl.load(seen_at, mask=live, other=0) != 0)
        found = tl.zeros([QUERIES, TOKENS], tl.float32)
        for part in range(tl.num_programs(2)):
            score_at = scores + ((part * rows + row) * ALL + q)[:, None] * tokens + s[None, :]
            found += tl.load(score_at, mask=live, other=0.0)
        found = tl.where(live, capped(found * scaling, softcap), float("-inf"))
        higher = tl.maximum(highest, tl.max(found, 1))
        weights, shrink = tl.exp(found - finite(higher)[:, None]), tl.exp(highest - finite(higher))
        total, highest = total * shrink + tl.sum(weights, 1), higher
        block = _levels(bits, s, (levels < count)[:, None] & (s < end)[None, :], DTYPE)
        sums = dot(weights.to(DTYPE), tl.trans(block), sums * shrink[:, None])
    part = store_part(row, q, sums, levels, highest, total, parts, stats, ALL, count + 1, count)
    tl.store(parts + part * (count + 1) + count, total, mask=q < ALL)  # What the constant level sums up to.


def sizes(queries: int, dim: int, pairs: int, single: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of both kernels with which registers hardly spill and shared memory suffices, as compiled for sm_80, 90 and 100.

    `queries` are those of all heads that share a key head; `single` products are in float32.
    """
    tokens, most = 64, (64 if single else 128) // (2 if dim > 128 else 1)
    tiles = tokens // TILE if pairs else 1
    block = min(32 // tiles, max(16 // tiles, triton.next_power_of_2(queries)))
    rest = dim - 2 * pairs
    score = {"QUERIES": block, "TILES": tiles, "PAIRS": pairs, "PAIRS_PAD": padded(pairs) if pairs else 0}
    score |= {"REST_PAD": padded(rest) if rest else 0, "LEVELS": most, "TOKENS": tokens}
    return score, {"QUERIES": 16, "LEVELS": most, "TOKENS": tokens}


def code_part(
    query: Tensor,
    codes: Tensor,
    code_map: tuple[Counts, Tensor, Tensor],
    scaling: float,
    rotation: tuple[Tensor, Tensor, Layout] | None,
    visible: Tensor | None,
    softcap: float | None,
    splits: int | None = None,
) -> AttentionPart:
    """`codes.code_part`, with normalized sums, by so many programs for each row and key head; None: enough to fill the GPU."""
    counts, keys, values = code_map
    (batch, heads, queries, dim), tokens, levels = query.shape, codes.shape[3], sum(counts)
    kv_heads, width = keys.shape[0] * keys.shape[1], keys.shape[3]
    rows, every = batch * kv_heads, heads // kv_heads * queries
    if dim > MOST:
        raise UnsupportedError(f"backend='triton': keys of {dim} dimensions, more than {MOST}, do not fit a GPU. Use backend='torch'.")
    pairs, single = 0 if rotation is None else rotation[0].shape[2], query.dtype == torch.float32
    for_scores, for_values = sizes(every, dim, pairs, single)
    chunk, splits = split_tokens(tokens, for_scores["TOKENS"], rows, splits, query.device)
    blocks = max(1, triton.cdiv(levels, for_scores["LEVELS"]))
    scores = query.new_empty(blocks * rows, every, tokens, dtype=torch.float32)
    parts, stats = (query.new_empty(rows, splits, every, n, dtype=torch.float32) for n in (width, 2))
    shared = {"KV_HEADS": kv_heads, "HEADS": keys.shape[1], "ALL": every, "num_stages": 2, "num_warps": 8}
    score_kernel[(rows * triton.cdiv(every, for_scores["QUERIES"]), splits, blocks)](
        *(query.contiguous(), strided(codes), keys.contiguous()),
        *(strided(table, (batch, tokens // TILE, pairs)) for table in (rotation[:2] if rotation else (None, None))),
        *(scores, rows, tokens, chunk, dim, levels, *counts[:3]),
        INTERLEAVED=rotation is not None and rotation[2] == "interleaved",
        **for_scores,
        **shared,
    )
    value_kernel[(rows * triton.cdiv(every, for_values["QUERIES"]), splits, blocks)](
        *(scores, strided(codes), strided(visible, (batch, queries, tokens))),
        *(parts, stats, scaling, softcap, rows, tokens, chunk, levels, *counts[:3]),
        COUNT=queries,
        DTYPE=DTYPES[query.dtype],
        **for_values,
        **shared,
    )
    sums = query.new_empty(batch, kv_heads, every, width, dtype=torch.float32)
    highest = combine(parts, stats, sums, splits, torch.float32).view(batch, heads, queries, 1)
    decoded = sums.transpose(0, 1).flatten(1, 2) @ values.flatten(0, 1).float().mT
    decoded = decoded.unflatten(1, (batch, every)).transpose(0, 1).reshape(batch, heads, queries, -1)
    return AttentionPart(decoded, sums[..., -1].reshape(batch, heads, queries, 1), highest.clamp_min_(torch.finfo(torch.float32).min))
