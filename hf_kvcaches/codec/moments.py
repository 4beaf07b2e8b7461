"""Bases of a layer in which errors cost alike, and the sums over texts that they follow from.

With C the covariance of a group's keys and values and M the metric of their errors, the directions of its basis are the eigenvectors of
`M^(1/2) C M^(1/2)`, and a vector x has the coefficients `V M^(1/2) (x - mean)`: an error of them costs the same in every direction, group
and layer. Moments are float64, since the square of a vector has twice the digits of the vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import torch

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, UnsupportedError

EXACT = 4
"""First tokens of a text that caches keep exactly: they are unlike all others."""
# Tokens of a layer that are kept as they are.
_SAMPLE = 4096
# Rows that are made float64 at a time, so that a long prompt is never held twice.
_PIECE = 1024
# By how much what all queries see counts beside what far ones see, where newest tokens are exact: codes must not be useless without.
_NEAR = 0.04
# A direction in which no gradient was seen costs at least this share of the mean.
_DAMPING = 0.02
# Of a head's mean square.
_LEAST_VARIANCE = 1e-12

Metric = Literal["loss", "plain"]
States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, (..., kv_heads, tokens, dim) each."""


class Shape(NamedTuple):
    """A layer's sizes. Keys and values of `group` heads, which divides `heads`, have one basis."""

    heads: int
    key_dim: int
    value_dim: int
    group: int = 1

    @property
    def groups(self) -> int:
        return self.heads // self.group

    @property
    def size(self) -> int:
        """Numbers of a token in a group: the keys of its heads, then the values."""
        return self.group * (self.key_dim + self.value_dim)

    @property
    def elements(self) -> int:
        """Numbers of a token in all groups."""
        return self.groups * self.size

    def in_groups(self, limit: int) -> Shape:
        """The shape with as many heads in a group as divide the present group and have no more numbers than `limit`, or with one."""
        fitting = (count for count in range(self.group, 1, -1) if not self.group % count)
        one = self.key_dim + self.value_dim
        return self._replace(group=next((count for count in fitting if count * one <= limit), 1))

    def join(self, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(..., groups, tokens, size) of (..., heads, tokens, dim)."""
        lead, tokens = keys.shape[:-3], keys.shape[-2]
        joined = keys.new_empty(*lead, self.groups, tokens, self.size, dtype=dtype)
        for states, side in zip((keys, values), self._sides(joined), strict=True):
            side.copy_(states.unflatten(-3, (self.groups, self.group)))
        return joined

    def split(self, joined: torch.Tensor) -> States:
        """The inverse."""
        keys, values = (side.flatten(-4, -3) for side in self._sides(joined))
        return keys, values

    def _sides(self, joined: torch.Tensor) -> States:
        """Views of keys and values, (..., groups, group, tokens, dim)."""
        sides = joined.split([self.group * self.key_dim, self.group * self.value_dim], -1)
        keys, values = (side.unflatten(-1, (self.group, -1)).transpose(-3, -2) for side in sides)
        return keys, values


@dataclass(frozen=True, eq=False)
class Basis:
    """A vector x of a group has the coefficients `transform @ (x - mean)`. Rounded rows are as good as others: the inverse is theirs."""

    shape: Shape
    mean: torch.Tensor  # (groups, size), float32
    rows: torch.Tensor  # of the transform, the directions with the largest coefficients first, (groups, size, size), float16, up to 1
    scales: torch.Tensor  # by which the rows are multiplied, (groups, size), float32

    @property
    def transform(self) -> torch.Tensor:
        """(groups, size, size), float64."""
        return self.rows.double() * self.scales[..., None]

    @property
    def inverse(self) -> torch.Tensor:
        """(groups, size, size), float64."""
        return torch.linalg.inv(self.rows.double()) / self.scales[:, None].double()

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors."""
        lead = self.shape.groups, self.shape.size
        return {"mean": lead, "rows": (*lead, self.shape.size), "scales": lead}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in self.sizes()}

    @classmethod
    def of(cls, shape: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> Self:
        """From `tensors`, if they fit; an `ArtifactError` otherwise."""
        basis = cls(Shape(*shape), **{name: tensors[name] for name in cls.__dataclass_fields__ if name != "shape"})
        if any(tuple(getattr(basis, name).shape) != size for name, size in basis.sizes().items()):
            raise ArtifactError(f"The tensors {', '.join(basis.sizes())} of a layer don't fit each other. Calibrate anew.")
        return basis

    def of_heads(self, shard: HeadShard) -> Self:
        """That of the heads of a process under tensor parallelism; none of their bases may be shared with another process."""
        span, group = shard.span(self.shape.heads), self.shape.group
        if span.start % group or span.stop % group:
            raise UnsupportedError(
                f"codec: {group} heads share a basis, and under tensor parallelism each of {shard.size} processes has "
                f"{span.stop - span.start} heads. Calibrate with shards={shard.size}."
            )
        part = replace(self, shape=self.shape._replace(heads=span.stop - span.start))
        tensors: dict[str, Any] = self.tensors()
        for name, size in part.sizes().items():
            for dim, count in enumerate(size):
                if tensors[name].shape[dim] > count:
                    tensors[name] = tensors[name].narrow(dim, shard.rank * count, count)
        return replace(part, **tensors)


class Maker:
    """Keeps what was made of it once, such as coders for a device, which is not pickled with it."""

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_made"}


class Moments:
    """Sums of outer products, one for each leading index, such as a head, of vectors that are never held."""

    def __init__(self, lead: Sequence[int], dim: int, device: torch.device | str | None = None) -> None:
        self.total = torch.zeros((*lead, dim, dim), dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def mean(self) -> torch.Tensor:
        """The second moment, (*lead, d, d): the mean outer product, and 0 before the first vector."""
        return self.total / self.count.clamp_min(1)

    def add(self, rows: torch.Tensor) -> None:
        """Add vectors, (..., *lead, n, d); what comes before `lead`, such as a batch, is summed."""
        products = second_moment(rows.detach())
        batch = products.ndim - self.total.ndim
        self.total += products.sum(tuple(range(batch))) if batch else products
        self.count += rows.shape[:batch].numel() * rows.shape[-2]


def second_moment(rows: torch.Tensor) -> torch.Tensor:
    """The sum of the outer products of rows (..., n, d), (..., d, d) in float64."""
    total = rows.new_zeros(*rows.shape[:-2], rows.shape[-1], rows.shape[-1], dtype=torch.float64)
    for piece in rows.split(_PIECE, -2):
        wide = piece.double()
        total += wide.mT @ wide
    return total


def descending(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, the largest first, and eigenvectors as rows, in float64."""
    symmetric = symmetric.double()
    values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
    return values.flip(-1), vectors.flip(-1).mT


def _damped_root(metric: torch.Tensor) -> torch.Tensor:
    """M^(1/2) of a metric M, symmetric and not negative, (d, d), in float64, to whose diagonal a share of the diagonal's mean is added.

    Directions in which the metric is 0 are thus kept last, and not lost. A metric of zeros counts as the identity.
    """
    weights, axes = descending(metric)
    weights = weights.clamp_min(0.0)
    mean = weights.mean(-1, keepdim=True)
    weights = torch.where(mean > 0, weights + _DAMPING * mean, torch.ones_like(weights))
    return axes.mT @ (weights.sqrt().unsqueeze(-1) * axes)


class LayerSums:
    """Sums over the tokens of one layer, but for the first of each sequence; and some of the tokens as they are."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.states = Moments((shape.groups,), shape.size, device)  # of a group's keys and values
        self.total = torch.zeros(shape.groups, shape.size, dtype=torch.float64, device=device)  # of these
        # Of the loss's gradients at keys and at values.
        self.keys, self.values = (Moments((shape.heads,), dim, device) for dim in (shape.key_dim, shape.value_dim))
        # (tokens, groups, size), those with the smallest random numbers, and these, in their order.
        self.sample, self.draws = torch.empty(0, shape.groups, shape.size, device=device), torch.empty(0)

    def observe(self, keys: torch.Tensor, values: torch.Tensor, draws: torch.Tensor) -> None:
        """Add whole sequences of keys, as the codec sees them, and values, (batch, heads, tokens, dim); each token has a random number."""
        first = min(EXACT, keys.shape[2] - 1)
        joined = self.shape.join(keys[:, :, first:], values[:, :, first:], torch.float32)
        self.states.add(joined)
        self.total += joined.sum((0, 2), dtype=torch.float64)
        self.keep(joined.transpose(1, 2).flatten(0, 1), draws[:, first:].flatten())

    def observe_gradients(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Add the loss's gradients at keys and values of whole sequences: what comes from far queries, and from near ones if any."""
        first = min(EXACT, keys[0].shape[2] - 1)
        for moments, gradients in ((self.keys, keys), (self.values, values)):
            far, *near = (gradient[:, :, first:] for gradient in gradients)
            moments.add(far)
            for gradient in near:
                moments.total += _NEAR * second_moment(far + gradient).sum(0)

    def keep(self, tokens: torch.Tensor, draws: torch.Tensor) -> None:
        """Add to the sample; which tokens it holds in the end depends on no order."""
        draws = torch.cat([self.draws, draws])
        smallest = draws.argsort()[:_SAMPLE]
        self.draws, self.sample = draws[smallest], torch.cat([self.sample, tokens])[smallest.to(tokens.device)]

    def sums(self) -> list[torch.Tensor]:
        """Everything that adds up over processes, to be changed in place."""
        return [self.total, *(part for each in (self.states, self.keys, self.values) for part in (each.total, each.count))]

    @property
    def mean(self) -> torch.Tensor:
        """(groups, size), float64."""
        return self.total / self.states.count.clamp_min(1)


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """The statistics of one layer, in float64 but for the sample."""

    shape: Shape
    mean: torch.Tensor  # (groups, size)
    moment: torch.Tensor  # the mean of outer products, (groups, size, size)
    # The metric of errors of keys, (heads, key_dim, key_dim), and of values, comparable over heads, layers and sides. With "loss" it is
    # twice the divergence of a prediction. With "plain" all heads vary alike.
    key_cost: torch.Tensor
    value_cost: torch.Tensor
    sample: torch.Tensor  # some tokens, (tokens, groups, size)

    @classmethod
    def of(cls, sums: LayerSums, metric: Metric) -> LayerStatistics:
        statistics = cls(sums.shape, sums.mean, sums.states.mean, sums.keys.mean, sums.values.mean, sums.sample)
        if metric == "loss":
            return statistics
        by_head, dim, costs = statistics.in_shape(sums.shape._replace(group=1)), sums.shape.key_dim, []
        for part in (slice(None, dim), slice(dim, None)):
            spread, size = (moment[:, part, part].diagonal(dim1=-2, dim2=-1).sum(-1) for moment in (by_head.covariance, by_head.moment))
            # What is less than rounding of the vectors is no variance.
            weight = torch.where(spread > _LEAST_VARIANCE * size, 1 / spread, 0.0)
            costs.append(torch.diag_embed(weight[:, None].expand(-1, by_head.mean[:, part].shape[1])))
        return replace(statistics, key_cost=costs[0], value_cost=costs[1])

    @property
    def covariance(self) -> torch.Tensor:
        """(groups, size, size)."""
        return self.moment - self.mean[:, :, None] * self.mean[:, None]

    def in_shape(self, shape: Shape) -> LayerStatistics:
        """The statistics of smaller groups."""
        parts = self.shape.group // shape.group
        sides = torch.arange(self.shape.size, device=self.mean.device)
        sides = sides.split([self.shape.group * size for size in (self.shape.key_dim, self.shape.value_dim)])
        of_part = torch.cat([side.view(parts, -1) for side in sides], 1)  # [parts, size of a part]
        mean, sample = self.mean[:, of_part].flatten(0, 1), self.sample[:, :, of_part].flatten(1, 2)
        moment = self.moment[:, of_part[:, :, None], of_part[:, None]].flatten(0, 1)
        return replace(self, shape=shape, mean=mean, moment=moment, sample=sample)

    def within_tiles(self, geometry: RotaryGeometry | None, tile: int) -> LayerStatistics:
        """The statistics where keys are rotated from the first of so many tokens to their own place, all places alike."""
        if geometry is None:
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
            root = torch.block_diag(*(_damped_root(cost) for side in (self.key_cost, self.value_cost) for cost in side[heads]))
            _, directions = descending(root @ covariance @ root)
            transforms.append(directions @ root)
        transform = torch.stack(transforms)
        scales = transform.abs().amax(2).float()
        rows = (transform / scales[..., None]).half()
        basis = Basis(self.shape, *(tensor.cpu().contiguous() for tensor in (self.mean.float(), rows, scales)))
        centered = self.sample.transpose(0, 1).double() - self.mean[:, None]
        return basis, centered @ basis.transform.mT.to(centered.device)
