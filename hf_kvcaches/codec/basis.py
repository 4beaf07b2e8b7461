"""The transform of a layer's keys and values into coefficients whose errors all cost the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from hf_kvcaches.codec.shape import Shape
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.errors import ArtifactError, UnsupportedError


@dataclass(frozen=True, eq=False)
class Basis:
    """A vector x of a group has the coefficients `transform @ (x - mean)`. Rounded rows are as good as others: the inverse is theirs.

    Args:
        shape: Of the layer.
        mean: (groups, size), float32.
        rows: Of the transform, the directions with the largest coefficients first, (groups, size, size), float16, up to 1.
        scales: By which the rows are multiplied, (groups, size), float32.
    """

    shape: Shape
    mean: torch.Tensor
    rows: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def rounded(cls, shape: Shape, mean: torch.Tensor, transform: torch.Tensor) -> Self:
        """From a transform in full precision."""
        scales = transform.abs().amax(2).float()
        rows = (transform / scales[..., None]).half()
        return cls(shape, *(tensor.cpu().contiguous() for tensor in (mean.float(), rows, scales)))

    @property
    def transform(self) -> torch.Tensor:
        """(groups, size, size), float64."""
        return self.rows.double() * self.scales[..., None]

    @property
    def inverse(self) -> torch.Tensor:
        """(groups, size, size), float64."""
        return torch.linalg.inv(self.rows.double()) / self.scales[:, None].double()

    def groups_of(self, shard: HeadShard) -> slice:
        """The groups of heads that a process has under tensor parallelism; none may be shared with another process."""
        span, group = shard.span(self.shape.heads), self.shape.group
        if span.start % group or span.stop % group:
            raise UnsupportedError(
                f"codec: {group} heads share a basis, and under tensor parallelism each of {shard.size} processes has "
                f"{span.stop - span.start} heads. Calibrate with shards={shard.size}."
            )
        return slice(span.start // group, span.stop // group)

    def of_heads(self, shard: HeadShard) -> Self:
        """That of the heads that a process has."""
        groups, span = self.groups_of(shard), shard.span(self.shape.heads)
        shape = self.shape._replace(heads=span.stop - span.start)
        return type(self)(shape, self.mean[groups], self.rows[groups], self.scales[groups])

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        return {"mean": self.mean, "rows": self.rows, "scales": self.scales}

    @classmethod
    def of(cls, shape: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> Self:
        """From `tensors`, if they fit each other."""
        basis = cls(Shape(*shape), tensors["mean"], tensors["rows"], tensors["scales"])
        groups, size = basis.shape.groups, basis.shape.size
        if [tensor.shape for tensor in basis.tensors().values()] != [(groups, size), (groups, size, size), (groups, size)]:
            raise ArtifactError("The tensors of a basis don't fit each other. Calibrate anew.")
        return basis
