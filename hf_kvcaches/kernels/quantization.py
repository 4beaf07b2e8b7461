"""Floating-point tensors in 8 or 4 bits.

Affine, not symmetric: each group of elements along the last axis stores its minimum (`zero`) and a step (`scale`), and
`x ≈ zero + scale * level`. Channels of cached keys sit far off 0, where a symmetric grid leaves half of its levels unused; and a group of
equal elements comes back exactly. Others are off by at most half a step, and the roundings of their dtype.

**Bytes per element**, for groups of g elements: 1 (8 bits) or 1/2 (4 bits), plus 4/g for half types, 8/g for float32, 16/g for float64.
Half types have a bfloat16 scale: float16 has no small ones (steps below 6e-5 lose digits). Rounding the scale up, which keeps the top of
the group in reach, makes it at most 1.2% larger.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.errors import ConfigError

_TOP_LEVEL = {8: 254, 4: 15}


class Quantized(NamedTuple):
    """A quantized tensor of shape (..., length)."""

    data: Tensor  # int8: level - 127, (..., length); uint8: two levels of 4 bits, the first in the low half, (..., ceil(length / 2))
    scale: Tensor  # the step between levels, (..., groups)
    zero: Tensor  # the value of level 0, in the dtype of the original, (..., groups)


class Packed(NamedTuple):
    """Tokens of several layers, (layers, heads, tokens, width), quantized or plain, the last dimension of each tensor contiguous."""

    data: Tensor
    scale: Tensor | None = None  # None for plain data
    zero: Tensor | None = None
    group: int | None = None  # channels that share a scale; None: all


def quantize(x: Tensor, bits: int = 8, group: int | None = None, check_finite: bool = True) -> Quantized:
    """Quantize a tensor to 8 or 4 bits, in groups along its last axis, of which the last may be shorter; None: one group.

    Args:
        check_finite: Whether to look for infinities and NaN, which makes the CPU wait for a GPU. Without the check they spoil their group.
    """
    length, top = x.shape[-1], _TOP_LEVEL[bits]
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale_type = torch.bfloat16 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    grouped = _grouped(x.detach(), group or max(length, 1))
    zero, highest = grouped.amin(-1), grouped.amax(-1)
    spread = highest.to(compute) - zero.to(compute)
    if check_finite and not bool(spread.isfinite().all()):
        raise ConfigError.of("x", "finite values, with a finite difference between any two", "infinities, NaN or a wider range")
    # Rounded up, so that the highest level is never below the highest element; 4 covers the roundings on the way in the same type.
    margin = torch.finfo(scale_type).eps * (1 if scale_type == torch.bfloat16 else 4)
    scale = (spread / top * (1 + margin)).clamp_min(torch.finfo(scale_type).smallest_normal).to(scale_type)
    scale = torch.where(spread > 0, scale, torch.zeros_like(scale))
    step = torch.where(scale > 0, scale, torch.ones_like(scale)).to(compute)
    levels = (grouped.to(compute) - zero.to(compute).unsqueeze(-1)).div_(step.unsqueeze(-1)).round_().clamp_(0, top)
    levels = levels.flatten(-2)[..., :length]
    return Quantized((levels - 127).to(torch.int8) if bits == 8 else _packed(levels.to(torch.uint8)), scale, zero)


def dequantize(data: Tensor, scale: Tensor, zero: Tensor, length: int, group: int | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers `level * scale + zero` of a `Quantized`, (..., length), in a new tensor."""
    scale, zero = scale.to(dtype), zero.to(dtype)
    if data.dtype == torch.int8:
        numbers = data.to(dtype)
        zero = torch.add(zero, scale, alpha=127)  # once a group, not once an element
    else:
        numbers = _nibbles(data)[..., :length].to(dtype)
    if group is None or group >= length:
        return numbers.mul_(scale).add_(zero)
    whole = length // group
    grouped = numbers[..., : whole * group].unflatten(-1, (whole, group))
    grouped.mul_(scale[..., :whole, None]).add_(zero[..., :whole, None])
    if whole < scale.shape[-1]:
        numbers[..., whole * group :].mul_(scale[..., whole:]).add_(zero[..., whole:])
    return numbers


def _grouped(x: Tensor, group: int) -> Tensor:
    """`(..., length)` to `(..., groups, group)`; a short last group is filled with its last element, which leaves its range as it is."""
    missing = -x.shape[-1] % group
    if missing:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1)
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _packed(levels: Tensor) -> Tensor:
    """Two levels of 4 bits to a byte, the first in the low half."""
    if levels.shape[-1] % 2:
        levels = torch.cat((levels, torch.zeros_like(levels[..., :1])), dim=-1)
    # The mask keeps what became of a NaN out of the neighbour's half.
    return (levels[..., ::2] & 15) | (levels[..., 1::2] << 4)


def _nibbles(data: Tensor) -> Tensor:
    """Return both halves of each byte, the low one first: a third of the time of stacking them."""
    assert sys.byteorder == "little"
    words = data.flatten().to(torch.int16)
    return (words << 4).bitwise_or_(words).bitwise_and_(0x0F0F).view(torch.uint8).view(*data.shape[:-1], 2 * data.shape[-1])
