"""What the Triton kernels for tokens in low-rank bases have in common: loading a basis, projecting the query, rotating decoded keys.

An angle is a whole number of 2^-64 circles, which wraps around by itself: it is exact at any position.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from hf_kvcaches.kernels.code_layout import TILE
from hf_kvcaches.kernels.common_triton import basis_at, dot, rotate_pairs
from hf_kvcaches.kernels.launch import padded

# Bytes of bases of keys and of values that a program can hold beside what else it needs, as compiled for sm_80.
LARGEST = 32 * 1024, 64 * 1024


@triton.jit
def cos_and_sin(positions, frequencies):
    """Cosines and sines, (positions, pairs), for frequencies in 2^-64 of a full circle."""
    angles = ((positions[:, None] * frequencies[None, :]) >> 32).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    return tl.cos(angles), tl.sin(angles)


@triton.jit
def basis_halves(at, pairs, ranks, RANK: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, dtype: tl.constexpr):
    """The rows of a basis for the first and the second dimensions of all pairs, transposed: (ranks, pairs) each."""
    first = pairs * 2 if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else pairs + PAIRS
    mask = (ranks < RANK)[:, None] & (pairs < PAIRS)[None, :]
    one = tl.load(at + first[None, :] * RANK + ranks[:, None], mask=mask, other=0.0)
    two = tl.load(at + second[None, :] * RANK + ranks[:, None], mask=mask, other=0.0)
    return one.to(dtype), two.to(dtype)


@triton.jit
def vector_halves(at, pairs, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second dimensions of all pairs of a vector, (pairs) each, in float32."""
    at += pairs * 2 if INTERLEAVED else pairs
    one = tl.load(at, mask=pairs < PAIRS, other=0.0)
    two = tl.load(at + (1 if INTERLEAVED else PAIRS), mask=pairs < PAIRS, other=0.0)
    return one.to(tl.float32), two.to(tl.float32)


@triton.jit
def basis_number(tile, b, h, basis_of):
    return tl.load(basis_of[0] + b * basis_of[1] + h * basis_of[2] + tile * basis_of[3]).to(tl.int64)


@triton.jit
def projected_query(b, h, basis, asked, heads, ranks, GROUP: tl.constexpr, RANK: tl.constexpr, dtype: tl.constexpr):
    """The query in coefficients of one basis, (heads, ranks)."""
    at = basis_at(b, h, basis, asked) + heads[:, None] * RANK + ranks[None, :]
    return tl.load(at, mask=(heads < GROUP)[:, None] & (ranks < RANK)[None, :], other=0.0).to(dtype)


@triton.jit
def query_halves(
    query, row, heads, pairs, factor, DIM: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """The first and the second dimensions of all pairs of the query, times a factor, (heads, pairs) each, in float32."""
    at = query + (row * GROUP + heads)[:, None] * DIM + (pairs * 2 if INTERLEAVED else pairs)[None, :]
    mask = (heads < GROUP)[:, None] & (pairs < PAIRS)[None, :]
    one, two = tl.load(at, mask=mask, other=0.0), tl.load(at + (1 if INTERLEAVED else PAIRS), mask=mask, other=0.0)
    return one.to(tl.float32) * factor, two.to(tl.float32) * factor


@triton.jit
def rotated_products(key_one, key_two, one, two, cos, sin, dtype: tl.constexpr):
    """Rotates keys, (tokens, pairs) twice, and multiplies them with the halves of the query: (heads, tokens)."""
    key_one, key_two = rotate_pairs(key_one, key_two, cos, sin)
    products = dot(one.to(dtype), tl.trans(key_one.to(dtype)))
    return products + dot(two.to(dtype), tl.trans(key_two.to(dtype)))


def bank_of(decode: torch.Tensor) -> tuple[Any, ...]:
    """A basis or a bank of them, contiguous within, and the strides of row, head and basis."""
    if not decode[(0,) * (decode.ndim - 2)].is_contiguous():
        decode = decode.contiguous()
    return (decode, 0, decode.stride(0), 0) if decode.ndim == 3 else (decode, *decode.stride()[:3])


def frequencies_of(inv_freq: torch.Tensor, device: torch.device) -> torch.Tensor:
    """In 2^-64 of a full circle a position, int64. More than half a circle is less than half a circle back."""
    circles = inv_freq.to(device) / (2 * math.pi)
    return ((circles - circles.round()) * 2.0**64).to(torch.int64)


def projected(query: torch.Tensor, decode: torch.Tensor, kv_heads: int, rotated: int) -> tuple[Any, ...] | None:
    """The query in coefficient space, but for its first `rotated` dimensions; strides of row, head and basis. None if none are left."""
    batch, heads, _, dim = query.shape
    if rotated == dim:
        return None
    asking = query.view(batch, kv_heads, heads // kv_heads, dim)[..., rotated:]
    decode = decode[..., rotated:, :].to(query.dtype)
    asked = torch.matmul(asking if decode.ndim == 3 else asking.unsqueeze(2), decode)
    return (asked, *asked.stride()[:2], 0) if decode.ndim == 3 else (asked, *asked.stride()[:3])


def block_size(rank: int, value_rank: int, pairs: int) -> int:
    """So many tokens at a time that registers hardly spill and shared memory suffices, as compiled for sm_80 and sm_90."""
    widest = max(padded(rank), padded(value_rank))
    most = 8192 // widest if not pairs else min(4096 // widest, 2048 // padded(pairs))
    return min(128, max(TILE, most))


def warps(rank: int, value_rank: int, single: bool) -> int:
    """So many warps that registers hardly spill; `single`: whether products are in float32."""
    return 8 if single or max(rank, value_rank) > 64 else 4
