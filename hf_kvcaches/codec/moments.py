"""Second moments of keys, values, queries and gradients, with and without their rotation.

Everything here is float64: calibration is not in a hurry, and the square of a vector has twice the digits of the vector. Leading
dimensions (layers, heads) are free, and each index is treated by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError

# Rows that are made float64 at a time, so that a long prompt is never held twice.
_PIECE = 1024


class Moments:
    """Sums of outer products, one for each leading index, of vectors that are never held.

    Args:
        lead: The leading dimensions, such as (heads,).
    """

    def __init__(self, lead: Sequence[int], dim: int, device: torch.device | str | None = None) -> None:
        self.total = torch.zeros((*lead, dim, dim), dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def mean(self) -> torch.Tensor:
        """The second moment, (*lead, d, d): the mean outer product, and 0 before the first vector."""
        return self.total / self.count.clamp_min(1)

    def add(self, rows: torch.Tensor) -> None:
        """Adds vectors.

        Args:
            rows: (..., *lead, n, d); what comes before `lead`, such as a batch, is summed.
        """
        shape = self.total.shape
        if rows.ndim < len(shape) or rows.shape[-1] != shape[-1] or rows.shape[-len(shape) : -2] != shape[:-2]:
            raise ConfigError.of("rows", f"shape (..., {', '.join(map(str, (*shape[:-2], 'n', shape[-1])))})", tuple(rows.shape))
        batch = tuple(range(rows.ndim - len(shape)))
        products = second_moment(rows.detach())
        self.total += products.sum(batch) if batch else products
        self.count += rows.shape[: len(batch)].numel() * rows.shape[-2]


def second_moment(rows: torch.Tensor) -> torch.Tensor:
    """The sum of the rows' outer products, (..., d, d) in float64.

    Args:
        rows: (..., n, d).
    """
    wide = rows[..., :_PIECE, :].double()
    total = wide.mT @ wide
    for start in range(_PIECE, rows.shape[-2], _PIECE):
        wide = rows[..., start : start + _PIECE, :].double()
        total += wide.mT @ wide
    return total


def roots(metric: torch.Tensor, damping: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """M^(1/2), and its inverse, of a damped metric M; (..., d, d) each, in float64.

    A metric that is 0 in some direction says nothing about it, and could not be taken back. So `damping` times the mean of its diagonal is
    added to that diagonal: such directions are kept last, not lost. A metric of zeros counts as the identity.

    Args:
        metric: Symmetric and not negative, (..., d, d).
        damping: Relative to the mean of the metric's diagonal; above 0.
    """
    weights, axes = descending(metric)
    weights = weights.clamp_min(0.0)
    mean = weights.mean(-1, keepdim=True)
    weights = torch.where(mean > 0, weights + damping * mean, torch.ones_like(weights))
    return axes.mT @ (weights.sqrt().unsqueeze(-1) * axes), axes.mT @ (weights.rsqrt().unsqueeze(-1) * axes)


def rotation_average(
    moment: torch.Tensor, geometry: RotaryGeometry, distances: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The metric for keys before rotation: a moment of queries before rotation, averaged over the angles at which they meet.

    A query `distance` tokens after a key meets it as if it had been turned that far and the key not at all, so this is the sum of
    `weight * R(distance) moment R(distance)'`. In the plane of a pair of dimensions, as complex numbers, each 2 x 2 block of the moment is
    `z -> a z + b conj(z)`; a turn on both sides multiplies a and b by one number each. So only the mean of those numbers is needed, and no
    distance is looked at twice. `attention_scaling`, which multiplies all logits alike, is left out.

    Args:
        moment: (..., d, d), of queries without rotation, in the order of the key's dimensions.
        distances: Positions of queries minus those of the keys, 1-D integers: 0 and up for what a causal model sees.
        weights: How much each distance counts. None: 1 / n each.
    """
    dim = geometry.head_dim
    if moment.shape[-2:] != (dim, dim):
        raise ConfigError.of("moment", f"shape (..., {dim}, {dim})", tuple(moment.shape))
    if distances.ndim != 1 or not len(distances):
        raise ConfigError.of("distances", "one dimension of at least one integer", tuple(distances.shape))
    if weights is None:
        weights = torch.full(distances.shape, 1 / len(distances), dtype=torch.float64)
    elif weights.shape != distances.shape:
        raise ConfigError.of("weights", f"shape {tuple(distances.shape)}, as distances", tuple(weights.shape))
    cos, sin = geometry.cos_sin(distances, torch.float64, moment.device)
    first, second = _pairs(geometry, moment.device)
    # Dimensions that are not turned form pairs that turn by nothing; an odd one out gets a partner of zeros.
    still = torch.zeros(len(cos), len(first) - cos.shape[-1], dtype=torch.float64, device=cos.device)
    turns = torch.complex(torch.cat((cos, still + 1), -1), torch.cat((sin, still), -1))
    weighted = turns * weights.to(turns.device, torch.float64).unsqueeze(-1)
    same, opposite = weighted.mT @ turns.conj(), weighted.mT @ turns
    padded = torch.nn.functional.pad(moment.double(), (0, dim % 2, 0, dim % 2))
    rows, columns = (padded[..., first, :], padded[..., second, :]), (first, second)
    (xx, xy), (yx, yy) = ([row[..., column] for column in columns] for row in rows)
    a = torch.complex(xx + yy, yx - xy) / 2 * same
    b = torch.complex(xx - yy, yx + xy) / 2 * opposite
    turned = torch.cat(
        (torch.cat(((a + b).real, (b - a).imag), -1), torch.cat(((a + b).imag, (a - b).real), -1)),
        -2,
    )
    order = torch.cat((first, second)).argsort()[:dim]
    return turned[..., order, :][..., order]


def _pairs(geometry: RotaryGeometry, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The dimensions of each pair, those that are not turned at the end; an odd number of dimensions is made even."""
    half, even = geometry.rotary_dim // 2, geometry.head_dim + geometry.head_dim % 2
    turned = torch.arange(2 * half, device=device)
    turned = turned.view(half, 2).mT if geometry.layout == "interleaved" else turned.view(2, half)
    rest = torch.arange(2 * half, even, device=device).view(-1, 2).mT
    first, second = torch.cat((turned, rest), dim=-1)
    return first, second


def descending(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, the largest first, and eigenvectors as rows, in float64."""
    symmetric = symmetric.double()
    values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
    return values.flip(-1), vectors.flip(-1).mT
