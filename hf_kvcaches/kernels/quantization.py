"""Numbers in 8 or 4 bits: affine groups, as `core.quantize` stores them, and tiles of coefficients that share a scale."""

from __future__ import annotations

import sys

import torch

from hf_kvcaches.errors import ConfigError

TILE = 16  # Tokens that share a scale and a basis: no matrix product of a GPU takes fewer.


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


def quantize_tiles(coefficients: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients in 8 bits, with one scale for a tile of TILE tokens: coefficients ≈ data * scale, to half a scale.

    Args:
        coefficients: (batch, kv_heads, tokens, rank), whole tiles. Directions should be of one size, or the small ones lose digits.
        scale_dtype: Of the scales. Float16 costs another 6% of half a scale at the largest elements.

    Returns:
        data, int8 of the same shape, and scale, (batch, kv_heads, tiles).
    """
    tokens = coefficients.shape[2]
    if tokens % TILE:
        raise ConfigError.of("coefficients", f"whole tiles of {TILE} tokens", tokens)
    tiles = coefficients.to(torch.promote_types(coefficients.dtype, torch.float32)).unflatten(2, (-1, TILE))
    scale = (tiles.abs().amax((-1, -2)) / 127).to(scale_dtype)
    # A tile of zeros has no scale, and one of numbers next to nothing may have lost it: both become zeros.
    step = scale.to(tiles.dtype).masked_fill(scale == 0, torch.inf)
    data = (tiles / step[..., None, None]).round_().clamp_(-127, 127).to(torch.int8)
    return data.flatten(2, 3), scale
