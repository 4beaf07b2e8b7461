"""Other ways to keep keys and values in few bits, which `SubspaceCache` is compared with.

**KIVI** (A Tuning-Free Asymmetric 2bit Quantization for KV Cache): groups of 32 numbers with a scale and a zero in half precision; keys
by channel over 32 tokens, values by token over 32 channels. **Departs from the paper**: the first 4 tokens are exact and no others, and the
last keys, fewer than a group, are a group of their own. Numbers are kept as they would be read, and bytes are counted by `share`.

**Rotation**: each token's key and value of a head as a norm and a randomly rotated direction, whose coordinates are rounded to the levels
with the least squared error for normal numbers: data-free codes such as TurboQuant's, without the part that removes the bias of products.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

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


class KiviLayer(DynamicLayer):
    """One layer. A prompt attends exactly to itself.

    Attributes:
        tail: The exact keys of the last group, while that is not full, (batch, kv_heads, tokens, head_dim).
    """

    def __init__(self, bits: int, sinks: int) -> None:
        super().__init__()
        self.bits, self.sinks = bits, sinks

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.tail = key_states[:, :, :0]
        is_prompt = not self.get_seq_length()
        exact = max(0, self.sinks - self.get_seq_length())
        old_keys = self.keys[:, :, : self.get_seq_length() - self.tail.shape[2]]
        tail = torch.cat([self.tail, key_states[:, :, exact:]], 2)
        coded_keys = [quantized(tail, self.bits, 2)] if tail.shape[2] else []
        coded_values = [quantized(value_states[:, :, exact:], self.bits, 3)] if value_states.shape[2] > exact else []
        self.keys = torch.cat([old_keys, key_states[:, :, :exact], *coded_keys], 2)
        self.values = torch.cat([self.values, value_states[:, :, :exact], *coded_values], 2)
        self.tail = tail[:, :, tail.shape[2] // GROUP * GROUP :]
        return (key_states, value_states) if is_prompt else (self.keys, self.values)


class KiviCache(Cache):
    """All layers; the sinks are first tokens that stay exact."""

    def __init__(self, config: PreTrainedConfig, bits: int, sinks: int = 4) -> None:
        super().__init__(layers=[KiviLayer(bits, sinks) for _ in range(config.num_hidden_layers)])


class KiviCoding(PastCoding):
    """What is read of such keys and values, for one pass over whole rows."""

    def __init__(self, bits: int, *, sinks: int = 4, recent: int = 0) -> None:
        super().__init__(sinks, recent)
        self.bits = bits

    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sinks, coded = keys[:, :, : self.sinks], keys[:, :, self.sinks :]
        read_keys = torch.cat([sinks, quantized(coded, self.bits, 2)], 2) if coded.shape[2] else keys
        return read_keys, quantized(values, self.bits, 3)

    def read_open_group(self, keys: torch.Tensor) -> torch.Tensor:
        batch, heads, tokens, dim = keys.shape
        read = keys.new_zeros(batch, heads, tokens, GROUP, dim)
        for start in range(self.sinks, tokens, GROUP):
            group = keys[:, :, start : start + GROUP]
            for count in range(1, group.shape[2] + 1):
                read[:, :, start + count - 1, :count] = quantized(group[:, :, :count], self.bits, 2)
        return read


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
