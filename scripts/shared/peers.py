"""Other ways to keep keys and values in few bits, which `SubspaceCache` is compared with.

**KIVI** (A Tuning-Free Asymmetric 2bit Quantization for KV Cache): groups of 32 numbers with a scale and a zero in half precision; keys
by channel over 32 tokens, values by token over 32 channels; the newest tokens, fewer than a group, are exact. **Departs from the paper**:
the first 4 tokens are exact, and values too are coded by 32 tokens at a time.

**Rotation**: each token's key and value of a head as a norm and a randomly rotated direction, whose coordinates are rounded to the levels
with the least squared error for normal numbers: data-free codes such as TurboQuant's, without the part that removes the bias of products.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from shared.past import PastCoding

GROUP = 32


def share(bits: int) -> float:
    """KIVI's bytes of a long text as a share of those in 16 bits: each group has a scale and a zero besides."""
    return (bits + 32 / GROUP) / 16


def quantized(numbers: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """What is read of numbers that were quantized along a dimension, the last group of which may be shorter."""
    parts = []
    for group in numbers.split(GROUP, dim):
        low, high = group.aminmax(dim=dim, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).half().to(group.dtype)
        zero = low.half().to(group.dtype)
        levels = ((group - zero) / scale.where(scale > 0, 1.0)).round().clamp(0, 2**bits - 1)
        parts.append(levels * scale + zero)
    return torch.cat(parts, dim)


class KiviCoding(PastCoding):
    """What is read of such keys and values, for one pass over whole rows."""

    tile = GROUP

    def __init__(self, bits: int, *, sinks: int = 4, recent: int = 0) -> None:
        super().__init__(sinks, recent)
        self.bits = bits

    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        coded = quantized(keys[:, :, self.sinks :], self.bits, 2) if keys.shape[2] > self.sinks else keys[:, :, :0]
        return torch.cat([keys[:, :, : self.sinks], coded], 2), quantized(values, self.bits, 3)


class RotatedCoding(PastCoding):
    """Norms and rotated directions, for one pass over whole rows; `bits` are those of a coordinate."""

    def __init__(self, bits: int, *, sinks: int = 4, recent: int = 0) -> None:
        super().__init__(sinks, recent)
        self.bits = bits

    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(keys), self._read(values)

    def _read(self, states: torch.Tensor) -> torch.Tensor:
        dim, wide = states.shape[-1], states.float()
        rotation, levels = (table.to(states.device) for table in (random_rotation(dim), normal_levels(self.bits)))
        norm = wide.norm(dim=-1, keepdim=True).half().float()
        coordinates = wide @ rotation * (math.sqrt(dim) / norm.clamp(min=1e-9))
        nearest = torch.bucketize(coordinates, (levels[1:] + levels[:-1]) / 2)
        return (levels[nearest] @ rotation.T * (norm / math.sqrt(dim))).to(states.dtype)


@cache
def random_rotation(dim: int) -> torch.Tensor:
    """A rotation of that many dimensions, always the same."""
    return torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(0)))[0]


@cache
def normal_levels(bits: int) -> torch.Tensor:
    """The 2**bits levels with the least squared error for a normal variable, by Lloyd's iteration on a fine grid."""
    grid = torch.linspace(-6, 6, 12001, dtype=torch.float64)
    weights = torch.exp(-(grid**2) / 2)
    levels = torch.linspace(-2, 2, 2**bits, dtype=torch.float64)
    for _ in range(200):
        nearest = torch.bucketize(grid, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros(2, len(levels), dtype=torch.float64).index_add(1, nearest, torch.stack([weights * grid, weights]))
        levels = sums[0] / sums[1].clamp(min=1e-12)
    return levels.float()
