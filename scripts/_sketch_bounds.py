"""How far a sketch, and a basis that is taken from it, can be from the vectors that it has seen.

"Online Subspace Projection for KV Caches" (section 8) bounds what a sketch's basis misses by `sqrt(eps) + 2 eps / gap`. That is false: with
the energies 100, 1, 0, rank 1 and a sketch of 101 rows it gives 0.1, and the second direction alone misses 1. It also adds numbers of
different units, and speaks of the vectors that the sketch has seen, where a basis serves those that come later.
`sketched_residual_bound` holds in its place.
"""

from __future__ import annotations

import torch


def paper_sketch_bound(gram: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The paper's bound on what a basis of a sketch misses, `sqrt(eps) + 2 eps / gap`."""
    energies = torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0)
    epsilon = energies[..., rank:].sum(-1) / (size - rank)
    return epsilon.sqrt() + 2 * epsilon / (energies[..., rank - 1] - energies[..., rank])


def certificate(energy: torch.Tensor, sketch_energy: torch.Tensor, size: int) -> torch.Tensor:
    """How far a Frequent Directions sketch can be from what it has seen, `||X'X - S'S||`, from two numbers that a stream knows.

    A shrinking by x takes x from at least `size` squared singular values. Never above the least `tail_r / (size - r)` over the ranks r,
    where `tail_r` is what the best subspace of rank r misses of the tokens.

    Args:
        energy: `||X||_F ** 2`.
        sketch_energy: `||S||_F ** 2`.
        size: The number of the singular value whose square is taken off.
    """
    # Both are sums of rounded squares, and their difference may be nothing.
    return (energy - sketch_energy).clamp_min(0) / size + 64 * torch.finfo(torch.float64).eps * energy


def sketched_residual_bound(next_singular_value: torch.Tensor, covariance_error: torch.Tensor) -> torch.Tensor:
    """What a basis taken from a sketch can miss of the tokens that the sketch has seen: `||X (I - P)|| <= sqrt(s ** 2 + error)`.

    With P onto the first r right singular vectors of S, `||X (I - P)|| ** 2` is at most `||S (I - P)|| ** 2 + ||X'X - S'S||`, and the
    first term is the square of the sketch's singular value r + 1. A Frequent Directions sketch is never longer than X in any direction,
    so the singular value of X does as well. No gap between singular values is needed: where they are close, a wrong direction costs little.

    Args:
        next_singular_value: Number r + 1 of the sketch or of the tokens.
        covariance_error: `||X'X - S'S||` or a bound on it.
    """
    return (next_singular_value.square() + covariance_error).sqrt()
