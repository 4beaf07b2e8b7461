"""Rotary positions: each pair of a key's dimensions is rotated by the angle position * frequency."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch

Layout = Literal["half", "interleaved"]
Tables = tuple[torch.Tensor, torch.Tensor]


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Rotates the first dimensions of `x`, in place, and returns it. Gradients pass, unless `x` is a leaf.

    Args:
        x: (..., dim). Dimensions beyond those of the tables stay as they are.
        cos: Of each pair's angle, (..., rotary_dim / 2).
        sin: Like `cos`; negated, it rotates back.
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
    """
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if layout == "interleaved" and not torch.compiler.is_compiling() and _is_complex(x):  # a tenth of the time of strided halves
        torch.view_as_complex(x[..., : 2 * half].unflatten(-1, (half, 2))).mul_(torch.complex(cos, sin))
        return x
    first, second = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if layout == "interleaved" else (x[..., :half], x[..., half : 2 * half])
    )
    cross = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(cross)
    return x


def swap_pairs(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Exchanges the dimensions of each pair, (..., rotary_dim)."""
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if layout == "interleaved" else x.roll(x.shape[-1] // 2, -1)


def _is_complex(x: torch.Tensor) -> bool:
    """Whether neighbouring dimensions can be read as complex numbers."""
    return x.stride(-1) == 1 and not any(step % 2 for step in (*x.stride()[:-1], x.storage_offset()))


def cos_sin(inv_freq: torch.Tensor, positions: int | torch.Tensor, dtype: torch.dtype) -> Tables:
    """Cosines and sines, `positions.shape + (rotary_dim / 2,)`, of angles in float64: exact at any position below 2**29.

    Args:
        inv_freq: Angle per position of each pair, (rotary_dim / 2,), float64, on the device of the result.
        positions: A number, or integers of any shape on that device.
    """
    angles = inv_freq * (positions if isinstance(positions, int) else positions.to(torch.float64).unsqueeze(-1))
    # Cosine and sine reduce a float64 argument exactly; a remainder by a rounded 2 pi would add its error once per circle.
    return angles.cos().to(dtype), angles.sin().to(dtype)


def angle_table(inv_freq: torch.Tensor, length: int, dtype: torch.dtype, device: torch.device) -> Tables:
    """`cos_sin` of positions 0 to `length` - 1 and some more, made once for all layers and calls.

    Args:
        inv_freq: As for `cos_sin`, best on the CPU: it is read as numbers.
    """
    return _angle_table(tuple(inv_freq.tolist()), max(512, 1 << (length - 1).bit_length()), dtype, device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
@torch.no_grad()
def _angle_table(frequencies: tuple[float, ...], length: int, dtype: torch.dtype, device: torch.device) -> Tables:
    cos, sin = cos_sin(torch.tensor(frequencies, dtype=torch.float64), torch.arange(length), dtype)
    return cos.to(device), sin.to(device)
