"""The sizes of a layer's keys and values, and how heads are joined into groups that share a basis."""

from __future__ import annotations

from typing import NamedTuple

import torch

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, (..., kv_heads, tokens, dim) each."""


class Shape(NamedTuple):
    """A layer's sizes.

    Args:
        group: How many heads share a basis; it divides `heads`.
    """

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
        """(..., groups, group, tokens, dim) of each side."""
        sides = joined.split([self.group * self.key_dim, self.group * self.value_dim], -1)
        keys, values = (side.unflatten(-1, (self.group, -1)).transpose(-3, -2) for side in sides)
        return keys, values
