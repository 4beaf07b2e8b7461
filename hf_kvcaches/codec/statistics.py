"""What bases are made of: moments of a layer's keys and values, what their errors cost, and some tokens as they are.

With C the covariance of a group's vectors and M the metric of their errors, the directions of its basis are the eigenvectors of
`M^(1/2) C M^(1/2)`, and a vector x has the coefficients `V M^(1/2) (x - mean)`: an error of them costs the same in every direction, group
and layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_kvcaches.codec.basis import Basis, Shape
from hf_kvcaches.codec.meter import LayerSums, Metric
from hf_kvcaches.codec.moments import descending, root_of
from hf_kvcaches.core.rope import RotaryGeometry

# A direction in which no gradient was seen costs at least this share of the mean.
_DAMPING = 0.02
# Of a head's mean square.
_LEAST_VARIANCE = 1e-12


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """The statistics of one layer, in float64 but for the sample.

    Args:
        mean: (groups, size).
        moment: The mean of outer products, (groups, size, size).
        key_cost: The metric of errors of keys, (heads, key_dim, key_dim), comparable over heads, layers and sides; and `value_cost`. With
            "loss" it is twice the divergence of a prediction. With "plain" all heads vary alike.
        sample: Some tokens, (tokens, groups, size).
    """

    shape: Shape
    mean: torch.Tensor
    moment: torch.Tensor
    key_cost: torch.Tensor
    value_cost: torch.Tensor
    sample: torch.Tensor

    @classmethod
    def of(cls, sums: LayerSums, metric: Metric) -> LayerStatistics:
        statistics = cls(sums.shape, sums.mean, sums.states.mean, sums.keys.mean, sums.values.mean, sums.sample)
        return statistics if metric == "loss" else statistics._costing_alike()

    def _costing_alike(self) -> LayerStatistics:
        by_head = self.in_shape(self.shape._replace(group=1))
        dim, costs = self.shape.key_dim, []
        for part in (slice(None, dim), slice(dim, None)):
            spread, size = (moment[:, part, part].diagonal(dim1=-2, dim2=-1).sum(-1) for moment in (by_head.covariance, by_head.moment))
            # What is less than rounding of the vectors is no variance.
            weight = torch.where(spread > _LEAST_VARIANCE * size, 1 / spread, 0.0)
            costs.append(torch.diag_embed(weight[:, None].expand(-1, by_head.mean[:, part].shape[1])))
        return replace(self, key_cost=costs[0], value_cost=costs[1])

    @property
    def covariance(self) -> torch.Tensor:
        """(groups, size, size)."""
        return self.moment - self.mean[:, :, None] * self.mean[:, None]

    def in_shape(self, shape: Shape) -> LayerStatistics:
        """The statistics of smaller groups."""
        parts = self.shape.group // shape.group
        if parts == 1:
            return self
        sizes, index = (self.shape.key_dim, self.shape.value_dim), torch.arange(self.shape.size, device=self.mean.device)
        sides = index.split([self.shape.group * size for size in sizes])
        of_part = torch.cat([side.view(parts, -1) for side in sides], 1)  # [parts, size of a part]
        blocks = self.moment[:, of_part[:, :, None], of_part[:, None]]  # [groups, parts, size, size]
        return replace(
            self,
            shape=shape,
            mean=self.mean[:, of_part].flatten(0, 1),
            moment=blocks.flatten(0, 1),
            sample=self.sample[:, :, of_part].flatten(1, 2),
        )

    def within_tiles(self, geometry: RotaryGeometry | None, tile: int) -> LayerStatistics:
        """The statistics where keys are rotated from the first of so many tokens to their own place, all places alike."""
        if geometry is None or geometry.kind != "rope":
            return self

        def turned(vectors: torch.Tensor, by: int | torch.Tensor) -> torch.Tensor:
            keys, values = vectors.split([self.shape.group * self.shape.key_dim, self.shape.group * self.shape.value_dim], -1)
            rows = keys.reshape(-1, self.shape.group, self.shape.key_dim).transpose(0, 1)[None]  # [1, group, rows, dim]
            return torch.cat([geometry.shift(rows, by)[0].transpose(0, 1).reshape(keys.shape), values], -1)

        mean, moment, cost = (torch.zeros_like(own) for own in (self.mean, self.moment, self.key_cost))
        for place in range(tile):
            mean += turned(self.mean, place) / tile
            moment += turned(turned(self.moment, place).mT, place).mT / tile
            cost += geometry.shift(geometry.shift(self.key_cost[None], place).mT, place)[0].mT / tile
        of_token = torch.arange(len(self.sample), device=self.sample.device) % tile
        sample = torch.stack([turned(own, of_token) for own in self.sample.unbind(1)], 1)
        return replace(self, mean=mean, moment=moment, key_cost=cost, sample=sample)

    def basis(self) -> tuple[Basis, torch.Tensor]:
        """The transform of each group, and the coefficients of the sample, (groups, tokens, size)."""
        transforms = []
        for group, covariance in enumerate(self.covariance):
            heads = slice(group * self.shape.group, (group + 1) * self.shape.group)
            root = torch.block_diag(*(root_of(cost, _DAMPING) for side in (self.key_cost, self.value_cost) for cost in side[heads]))
            _, directions = descending(root @ covariance @ root)
            transforms.append(directions @ root)
        basis = Basis.rounded(self.shape, self.mean, torch.stack(transforms))
        centered = self.sample.transpose(0, 1).double() - self.mean[:, None]
        return basis, centered @ basis.transform.mT.to(centered.device)
