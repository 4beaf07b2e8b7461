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

# A pivot of the Cholesky factor below this share of the largest may be rounding, and its column of the solution noise.
_SMALLEST_PIVOT = 1e-5
# An eigenvalue below this share of the largest, times the number of inputs, is rounding.
_SMALLEST_EIGENVALUE = 1e-14


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


def fit_ridge(xx: torch.Tensor, xy: torch.Tensor, lam: float) -> torch.Tensor:
    """The ridge regression from second moments: W of shape (inputs, outputs), in float64, for which `x @ W` is nearest to y.

    Inputs that depend on each other are fine with any `lam`: directions in which there is nothing but rounding get no weight.

    Args:
        xx: `x.T @ x`, (inputs, inputs); a sum or a mean over rows.
        xy: `x.T @ y`, (inputs, outputs), over the same rows.
        lam: Strength as a share of the mean diagonal of `xx`, so that it means the same for any scale and number of rows.
    """
    left, right = xx.double(), xy.double()
    left = (left + left.T) / 2
    left.diagonal().add_(lam * float(left.diagonal().mean()))
    factor, failed = torch.linalg.cholesky_ex(left)
    pivots = factor.diagonal()
    if not int(failed) and float(pivots.min()) > _SMALLEST_PIVOT * float(pivots.max()):
        return torch.cholesky_solve(right, factor)
    values, vectors = torch.linalg.eigh(left)
    kept = values > max(float(values[-1]) * _SMALLEST_EIGENVALUE * len(left), 0.0)
    return vectors[:, kept] @ ((vectors[:, kept].T @ right) / values[kept, None])
