"""Projections that lose least of vectors with a given second moment, plainly or in a metric. Leading dimensions are free."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.core.moments import descending, roots
from hf_kvcaches.errors import ConfigError, whole_number


class Projection(NamedTuple):
    """From a vector x to `encode @ x`, and back with `decode`. All float64.

    Args:
        encode: (..., rank, d).
        decode: (..., d, rank).
        energies: (..., d), of all directions, the largest first; the first `rank` are kept.
    """

    encode: torch.Tensor
    decode: torch.Tensor
    energies: torch.Tensor

    @property
    def kept(self) -> torch.Tensor:
        """The share of the energy that is kept, (...); 1 where there is none to lose."""
        total = self.energies.sum(-1)
        top = self.energies[..., : self.encode.shape[-2]].sum(-1)
        return torch.where(total > 0, top / total, torch.ones_like(total))


def principal(gram: torch.Tensor, rank: int) -> Projection:
    """The orthogonal projection that loses least: E |x - decode @ encode @ x|^2 is as small as `rank` allows.

    Args:
        gram: Second moment, (..., d, d), or any multiple of it.
        rank: How many directions to keep, 1 to d.
    """
    _check_square("gram", gram)
    _check_rank(rank, gram.shape[-1])
    energies, directions = descending(gram)
    encode = directions[..., :rank, :].contiguous()
    return Projection(encode, encode.mT.contiguous(), energies.clamp_min(0.0))


def in_metric(gram: torch.Tensor, metric: torch.Tensor, rank: int, damping: float = 1e-6) -> Projection:
    """The oblique projection that loses least where it counts: E (x - x')' metric (x - x') for x' = decode @ encode @ x.

    For keys the metric is the second moment of the queries that will meet them, and what is lost is the mean squared error of a logit.
    Vectors are taken to coordinates in which the metric is the identity, `M^(1/2) x`; there the best projection is an orthogonal one. Its
    coefficients keep that property: an error in them counts the same in every direction.

    **Damping.** A metric that is 0 in some direction says nothing about it, and could not be taken back. So `damping` times the mean of
    its diagonal is added to that diagonal: such directions are kept last, not lost, and at full rank every vector comes back. The way
    there multiplies by up to `damping ** -0.5`; the loss by the undamped metric grows by no more than the damped part. A metric of
    zeros counts as the identity.

    Args:
        gram: Second moment of the vectors, (..., d, d).
        metric: Symmetric and not negative, (..., d, d).
        rank: How many coefficients to keep, 1 to d.
        damping: Relative to the mean of the metric's diagonal; above 0.

    Returns:
        A projection whose energies are the eigenvalues of `M^(1/2) gram M^(1/2)`, with the damped M: those from `rank` on are the loss.
    """
    _check_square("gram", gram)
    _check_square("metric", metric)
    _check_rank(rank, gram.shape[-1])
    if gram.shape[-1] != metric.shape[-1]:
        raise ConfigError.of("metric", f"{gram.shape[-1]} columns, as gram", tuple(metric.shape))
    if not damping > 0:
        raise ConfigError.of("damping", "a number above 0", damping)
    root, inverse = roots(metric, damping)
    best = principal(root @ gram.double() @ root, rank)
    return Projection(best.encode @ root, inverse @ best.decode, best.energies)


def rank_for_energy(energies: torch.Tensor, share: float, minimum: int = 1) -> torch.Tensor:
    """The smallest rank that keeps a share of the energy, (...).

    Args:
        energies: (..., d), the largest first.
        share: Above 0 and up to 1.
        minimum: The smallest rank to give, also where there is no energy at all.
    """
    if not 0 < share <= 1:
        raise ConfigError.of("share", "a float above 0 and up to 1", share)
    sums = energies.double().clamp_min(0.0).cumsum(-1)
    return (1 + (sums < share * sums[..., -1:]).sum(-1)).clamp_min(minimum)


def packed(symmetric: torch.Tensor) -> torch.Tensor:
    """One half of symmetric matrices, (..., d (d + 1) / 2).

    Args:
        symmetric: (..., d, d).
    """
    rows, columns = torch.tril_indices(symmetric.shape[-1], symmetric.shape[-1], device=symmetric.device)
    return symmetric[..., rows, columns]


def unpacked(half: torch.Tensor) -> torch.Tensor:
    """The matrices of which `packed` gave one half, (..., d, d).

    Args:
        half: (..., d (d + 1) / 2).
    """
    dim = int((2 * half.shape[-1]) ** 0.5)
    rows, columns = torch.tril_indices(dim, dim, device=half.device)
    place = torch.empty(dim, dim, dtype=torch.int64, device=half.device)
    place[rows, columns] = place[columns, rows] = torch.arange(len(rows), device=half.device)
    return half[..., place]


def _check_square(argument: str, matrix: torch.Tensor) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ConfigError.of(argument, "shape (..., d, d)", tuple(matrix.shape))


def _check_rank(rank: int, dim: int) -> None:
    whole_number("rank", rank, 1, f"an integer of 1 to {dim}", most=dim)
