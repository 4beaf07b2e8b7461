"""Rotary positions: each pair of a key's dimensions is rotated by the angle position * frequency."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.errors import ConfigError

Layout = Literal["half", "interleaved"]
Tables = tuple[Tensor, Tensor]


class RotationTables(NamedTuple):
    """Rotary positions for keys that are stored without any."""

    positions: Tensor  # row of the tables for each slot, (batch or 1, kv_heads or 1, slots); an invalid slot may have -1
    cos: Tensor  # (rows, rotary_dim / 2), with the model's attention scaling; further dimensions pass unchanged
    sin: Tensor
    layout: Layout
    full: Tensor  # for the torch back-end: the same for each dimension, cosines before signed sines, (rows, 2 * rotary_dim)


def check_layout(name: str, layout: str) -> None:
    """Refuse what is no layout."""
    if layout not in ("half", "interleaved"):
        raise ConfigError.of(name, "'half' or 'interleaved'", layout)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotates the first dimensions of `x`, (..., dim), in place, and returns it. Gradients pass, unless `x` is a leaf.

    Args:
        cos: Of each pair's angle, (..., rotary_dim / 2).
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
    """
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if layout == "interleaved" and not torch.compiler.is_compiling() and _is_complex(x):  # a tenth of the time of strided halves
        torch.view_as_complex(x[..., : 2 * half].unflatten(-1, (half, 2))).mul_(torch.complex(cos, sin))
        return x
    step, others = (2, slice(1, 2 * half, 2)) if layout == "interleaved" else (1, slice(half, 2 * half))
    first, second = x[..., : step * half : step], x[..., others]
    cross = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(cross)
    return x


def rotated_back(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """A rotated copy of `x`, by the negative angles; arguments as for `rotate_`. `x` may be expanded, which costs nothing."""
    half, out = cos.shape[-1], torch.empty_like(x, memory_format=torch.contiguous_format)
    step, others = (2, slice(1, 2 * half, 2)) if layout == "interleaved" else (1, slice(half, 2 * half))
    first, second = x[..., : step * half : step], x[..., others]
    torch.mul(first, cos, out=out[..., : step * half : step]).addcmul_(second, sin)
    torch.mul(second, cos, out=out[..., others]).addcmul_(first, sin, value=-1)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def rotated_by(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Return `x` rotated by tables with one column per dimension, in the wider dtype of both; dimensions beyond the tables are unchanged.

    `sin` is negative in the columns of each pair's first dimension.
    """
    rotary = cos.shape[-1]
    pairs = x if rotary == x.shape[-1] else x[..., :rotary]
    others = pairs.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if layout == "interleaved" else pairs.roll(rotary // 2, -1)
    rotated = torch.addcmul(pairs * cos, others, sin)
    return rotated if rotary == x.shape[-1] else torch.cat([rotated, x[..., rotary:]], -1)


def _is_complex(x: Tensor) -> bool:
    """Whether neighbouring dimensions can be read as complex numbers."""
    return x.stride(-1) == 1 and not any(step % 2 for step in (*x.stride()[:-1], x.storage_offset()))


def cos_sin(inv_freq: Tensor, positions: int | Tensor, dtype: torch.dtype) -> Tables:
    """Cosines and sines, `positions.shape + (rotary_dim / 2,)`, of angles in float64: exact at any position below 2**29.

    Args:
        inv_freq: Angle per position of each pair, (rotary_dim / 2,), float64.
    """
    angles = inv_freq * (positions if isinstance(positions, int) else positions.to(torch.float64).unsqueeze(-1))
    # Cosine and sine reduce a float64 argument exactly; a remainder by a rounded 2 pi would add its error once per circle.
    return angles.cos().to(dtype), angles.sin().to(dtype)
