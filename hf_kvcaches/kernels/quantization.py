"""Numbers in 8 or 4 bits with a scale for each group, as `kernels.quantize` stores them."""

from __future__ import annotations

import sys

import torch


def dequantize(
    data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, length: int, group: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers `level * scale + zero`, (..., length), in a new tensor.

    Args:
        data: int8: level - 127, (..., length). uint8: levels of 4 bits, two to a byte, the first in the low half, (..., ceil(length / 2)).
        scale: (..., groups).
        zero: Like `scale`.
        group: Consecutive elements that share a scale; the last group may be shorter. None: all.
    """
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


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Both halves of each byte, the low one first: a third of the time of stacking them."""
    assert sys.byteorder == "little"
    words = data.flatten().to(torch.int16)
    return (words << 4).bitwise_or_(words).bitwise_and_(0x0F0F).view(torch.uint8).view(*data.shape[:-1], 2 * data.shape[-1])
