"""What a codec is made of: moments of a layer's keys and values, what errors of them cost, and a sample of tokens.

What an error costs is described in `codec/metric.py` and `stakes.py`. With the metric "loss" it is measured at keys and values themselves,
everything that follows included. Errors of codes are those of single tokens and independent of each other; a metric at the outputs of
attention, where errors of many tokens add up, had twice the divergence at equal bytes.

The first `EXACT` tokens of a sequence are left out: caches keep them exactly, and their norms are unlike all others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_kvcaches.codec.metric import Metric, Sizes, before_rotation, output_metric
from hf_kvcaches.codec.moments import Moments
from hf_kvcaches.codec.sides import EXACT
from hf_kvcaches.codec.stakes import AttentionMeter
from hf_kvcaches.core.rope import RotaryGeometry

SAMPLE_TOKENS = 4096
SAMPLE_OF_BLOCK = 128
# Of a head's mean square.
_LEAST_VARIANCE = 1e-12


class Pick(NamedTuple):
    """Tokens of one block that are in the sample.

    Args:
        positions: Sorted, 1-D.
    """

    row: int
    block: int
    positions: torch.Tensor


class Sampler:
    """Chooses blocks for the sample, the same ones in whatever order and in whichever process they are read.

    Every block has a priority that follows from its number; those with the smallest stay, as many as make `SAMPLE_TOKENS` tokens.
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[float, int]] = {}  # block -> priority, tokens

    def pick(self, blocks: Sequence[int], length: int) -> list[Pick]:
        """The sampled tokens of a batch."""
        picks = []
        for row, block in enumerate(blocks):
            source, first = random.Random(block), min(EXACT, length - 1)
            priority, size = source.random(), min(length - first, SAMPLE_OF_BLOCK)
            picks.append(Pick(row, block, torch.tensor(sorted(source.sample(range(first, length), size)))))
            self.kept[block] = (priority, size)
        self.trim()
        return [pick for pick in picks if pick.block in self.kept]

    def trim(self) -> None:
        """Forgets the blocks that are too many."""
        total = 0
        for block, (_, size) in sorted(self.kept.items(), key=lambda item: item[1]):
            total += size
            if total > SAMPLE_TOKENS:
                del self.kept[block]


class SideMeter:
    """Sums over the keys, or the values, of one layer.

    Attributes:
        sample: For each sampled block the vectors of its tokens, (kv_heads, tokens, d).
    """

    def __init__(self, heads: int, dim: int, device: torch.device | str) -> None:
        self.moments, self.gradients = Moments((heads,), dim, device), Moments((heads,), dim, device)
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.sample: dict[int, torch.Tensor] = {}

    def sums(self) -> list[torch.Tensor]:
        """Everything that adds up over processes, to be changed in place."""
        return [self.total, *(part for each in (self.moments, self.gradients) for part in (each.total, each.count))]

    def observe(self, vectors: torch.Tensor, picks: Sequence[Pick]) -> None:
        """Adds whole sequences.

        Args:
            vectors: (batch, kv_heads, tokens, d).
        """
        first = min(EXACT, vectors.shape[2] - 1)
        self.moments.add(vectors[:, :, first:])
        self.total += vectors[:, :, first:].sum((0, 2), dtype=torch.float64)
        for pick in picks:
            self.sample[pick.block] = vectors[pick.row][:, pick.positions.to(vectors.device)].float()

    @property
    def mean(self) -> torch.Tensor:
        """(kv_heads, d)."""
        return self.total / self.moments.count.clamp_min(1)

    @property
    def covariance(self) -> torch.Tensor:
        """(kv_heads, d, d)."""
        return self.moments.mean - self.mean[:, :, None] * self.mean[:, None]

    def relative_cost(self) -> torch.Tensor:
        """The metric in which all heads vary alike, (kv_heads, d, d); zeros where a head is always the same."""
        spread, size = (each.diagonal(dim1=-2, dim2=-1).sum(-1) for each in (self.covariance, self.moments.mean))
        # What is less than rounding of the vectors is no variance.
        weight = torch.where(spread > _LEAST_VARIANCE * size, 1 / spread, 0.0)
        return torch.diag_embed(weight[:, None].expand(-1, self.total.shape[-1]))

    def tokens(self) -> torch.Tensor:
        """All of the sample, (kv_heads, tokens, d); summed over in one order, whoever read which block."""
        return torch.cat([self.sample[block] for block in sorted(self.sample)], 1)


class LayerMeter:
    """Sums over all tokens of one layer.

    Args:
        geometry: How to undo the rotation of keys; None to take them as they are.
        block: Tokens of the longest sequence.
    """

    def __init__(self, geometry: RotaryGeometry | None, metric: Metric, block: int) -> None:
        self.geometry, self.metric, self.block = geometry, metric, block
        self.sizes: Sizes | None = None
        self.attention: AttentionMeter | None = None

    def open(self, sizes: Sizes, device: torch.device | str, output: torch.Tensor | None = None) -> None:
        """Makes the sums, all zero.

        Args:
            output: As from `output_metric`.
        """
        self.sizes = sizes
        if self.metric == "attention":
            self.attention = AttentionMeter(sizes, self.geometry, output, self.block, device)
        self.keys = SideMeter(sizes.kv_heads, sizes.key_dim, device)
        self.values = SideMeter(sizes.kv_heads, sizes.value_dim, device)

    @property
    def sides(self) -> tuple[SideMeter, SideMeter]:
        """Keys and values."""
        return self.keys, self.values

    def sums(self) -> list[torch.Tensor]:
        """Everything that adds up over processes, to be changed in place."""
        return [*self.keys.sums(), *self.values.sums(), *(self.attention.sums() if self.attention is not None else ())]

    def observe(
        self, module: nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any], picks: list[Pick]
    ) -> None:
        """Adds a batch of whole sequences.

        Args:
            query: (batch, heads, tokens, d), as it meets the keys.
            keys: (batch, kv_heads, tokens, d).
            values: (batch, kv_heads, tokens, e).
            options: What else the model gave its attention.
        """
        if self.sizes is None:
            output = output_metric(module, query.shape[1], values) if self.metric == "attention" else None
            self.open(Sizes.of(query, keys, values, options, output is not None), keys.device, output)
        self.keys.observe(self.unrotated(keys), picks)
        self.values.observe(values, picks)
        if self.attention is not None:
            self.attention.observe(query, keys, values, options)

    def observe_gradients(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds the gradients of a loss at all keys and values of a batch.

        Args:
            keys: At the keys as attention sees them, (batch, kv_heads, tokens, d).
        """
        first = min(EXACT, keys.shape[2] - 1)
        at_keys = before_rotation(self.geometry, keys, torch.arange(keys.shape[2], device=keys.device))
        self.keys.gradients.add(at_keys[:, :, first:])
        self.values.gradients.add(values[:, :, first:])

    def forget(self, sampler: Sampler) -> None:
        """Drops blocks that are no longer in the sample."""
        for side in self.sides:
            side.sample = {block: tokens for block, tokens in side.sample.items() if block in sampler.kept}

    def unrotated(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys of positions from 0 on as the codec sees them, (batch, kv_heads, tokens, d)."""
        if self.geometry is None:
            return keys
        precise = keys if keys.dtype == torch.float64 else keys.float()
        return self.geometry.unrotate(precise, torch.arange(keys.shape[-2], device=keys.device))

    def costs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The metrics of errors of keys and of values, (kv_heads, d, d) each; they compare over heads, layers and sides."""
        if self.metric == "loss":
            return self.keys.gradients.mean, self.values.gradients.mean
        if self.attention is not None:
            return self.attention.metrics()
        return self.keys.relative_cost(), self.values.relative_cost()
