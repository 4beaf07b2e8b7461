"""Second moments of what both models make of the same tokens: all that fits are made of.

No trace is kept. For each layer there is one symmetric matrix over [1, side, own, producer, consumer], to which every prompt adds; a fit
solves on its blocks.
"""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Self

import torch

from hf_kvcaches.core.moments import Moments


class BlockMoments:
    """Mean products of a few blocks of columns."""

    def __init__(self, widths: dict[str, int], device: torch.device | str = "cpu") -> None:
        stops = accumulate(widths.values())
        self.places = {name: slice(stop - width, stop) for (name, width), stop in zip(widths.items(), stops, strict=True)}
        self.sums = Moments((), sum(widths.values()), device)

    @property
    def count(self) -> int:
        """Tokens."""
        return int(self.sums.count)

    def add(self, weights: torch.Tensor | None = None, **blocks: torch.Tensor) -> None:
        """Adds tokens.

        Args:
            weights: How much each counts, (tokens,), 1 in the mean; None for 1.
            **blocks: By name, each (tokens, width).
        """
        assert set(blocks) == set(self.places), (set(blocks), set(self.places))
        device = self.sums.total.device
        rows = torch.cat([blocks[name].to(device, torch.float64) for name in self.places], dim=1)
        self.sums.add(rows if weights is None else rows * weights.to(device, torch.float64).sqrt()[:, None])

    def of(self, first: str, second: str) -> torch.Tensor:
        """The mean products of two blocks, (first's width, second's width)."""
        return self.sums.total[self.places[first], self.places[second]] / self.sums.count

    def spread(self, first: str, second: str) -> torch.Tensor:
        """The same around the means, by the block "one" of ones."""
        return self.of(first, second) - self.of("one", first).T @ self.of("one", second)

    def without(self, block: str, known: str, slopes: torch.Tensor) -> Self:
        """The moments of what is left of a block once `known @ slopes` is taken out of it."""
        left = copy.copy(self)
        left.sums = copy.copy(self.sums)
        left.sums.total = total = self.sums.total.clone()
        own, given = self.places[block], self.places[known]
        total[own] -= slopes.T @ total[given]
        total[:, own] -= total[:, given] @ slopes
        return left
