"""Second moments of keys, values, queries and gradients.

Everything here is float64: calibration is not in a hurry, and the square of a vector has twice the digits of the vector. Leading
dimensions (layers, heads) are free, and each index is treated by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvcaches.errors import ConfigError

# Rows that are made float64 at a time, so that a long prompt is never held twice.
_PIECE = 1024


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
        shape = self.total.shape
        if rows.ndim < len(shape) or rows.shape[-1] != shape[-1] or rows.shape[-len(shape) : -2] != shape[:-2]:
            raise ConfigError.of("rows", f"shape (..., {', '.join(map(str, (*shape[:-2], 'n', shape[-1])))})", tuple(rows.shape))
        batch = tuple(range(rows.ndim - len(shape)))
        products = second_moment(rows.detach())
        self.total += products.sum(batch) if batch else products
        self.count += rows.shape[: len(batch)].numel() * rows.shape[-2]


def second_moment(rows: torch.Tensor) -> torch.Tensor:
    """The sum of the outer products of rows (..., n, d), (..., d, d) in float64."""
    total = rows.new_zeros(*rows.shape[:-2], rows.shape[-1], rows.shape[-1], dtype=torch.float64)
    for piece in rows.split(_PIECE, -2):
        wide = piece.double()
        total += wide.mT @ wide
    return total


def root_of(metric: torch.Tensor, damping: float) -> torch.Tensor:
    """M^(1/2) of a damped metric M, symmetric and not negative, (..., d, d), in float64.

    A metric that is 0 in some direction says nothing about it, and could not be taken back. So `damping` times the mean of its diagonal is
    added to that diagonal: such directions are kept last, not lost. A metric of zeros counts as the identity.
    """
    weights, axes = descending(metric)
    weights = weights.clamp_min(0.0)
    mean = weights.mean(-1, keepdim=True)
    weights = torch.where(mean > 0, weights + damping * mean, torch.ones_like(weights))
    return axes.mT @ (weights.sqrt().unsqueeze(-1) * axes)


def descending(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, the largest first, and eigenvectors as rows, in float64."""
    symmetric = symmetric.double()
    values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
    return values.flip(-1), vectors.flip(-1).mT
