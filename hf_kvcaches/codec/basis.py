"""What the forms of a codec share: a layer's sizes, and the transform of keys and values into coefficients whose errors cost the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.errors import ArtifactError, UnsupportedError

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
        """How many bases there are."""
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

    @classmethod
    def rounded(cls, shape: Shape, mean: torch.Tensor, transform: torch.Tensor) -> Self:
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
        """That of the heads of a process."""
        groups, span = self.groups_of(shard), shard.span(self.shape.heads)
        shape = self.shape._replace(heads=span.stop - span.start)
        return replace(self, shape=shape, mean=self.mean[groups], rows=self.rows[groups], scales=self.scales[groups])

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


class Maker:
    """Keeps what was made of it once, such as coders for a device, which is not pickled with it."""

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_made"}
