"""How far attention over coefficients can be from exact attention, and a sketch from what it has seen.

Keys are stored as `encode @ k` and read as `decode @ encode @ k`, times gamma in the logits; values likewise, without gamma. With
orthonormal rows B, `encode = B` and `decode = B.T` make an orthogonal projector; no bound here needs one, unless it says so: they hold for
any two matrices. All is computed in float64, batched over leading dimensions.

The manuscript "Online Subspace Projection for KV Caches" (section 8) gives these bounds. **Departs from the paper:**

- Its bound on the logits holds for gamma = 1 only: keys inside the subspace have no residual, and yet their logits are off by the factor
  gamma. Here the residual is that of `k - gamma P k`.
- It measures keys and values by the operator norm of all residuals together. No single logit or output can be off by more than the largest
  residual *row*, which is never above the operator norm and up to sqrt(T) below it. Each bound takes either.
- It bounds what a sketch's basis misses by `sqrt(eps) + 2 eps / gap` (`paper_sketch_bound`). That is false: with the energies 100, 1, 0,
  rank 1 and a sketch of 101 rows it gives 0.1, and the second direction alone misses 1. `sketched_residual_bound` holds in its place.

Its bounds on softmax (tight) and on the output are right as they stand. `falsify_subspace.py` checks all of them with a model's keys and
values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Number = float | torch.Tensor


class AttentionBounds(NamedTuple):
    """How far one query's attention can be off."""

    logits: torch.Tensor  # absolute error of the logit that is off most
    output: torch.Tensor  # Euclidean norm of the error of the output


def logit_error_bound(residual: Number, query_norm: Number, scaling: Number) -> torch.Tensor:
    """How far any logit can be off: `|scaling| ||q|| ||k - gamma Pk||` by Cauchy-Schwarz, which a query along k - gamma Pk reaches."""
    return _double(scaling).abs() * _double(query_norm) * _double(residual)


def weight_error_bound(logit_error: Number) -> torch.Tensor:
    """How far softmax can be off, as the sum of absolute differences: `2 tanh(e / 2)`.

    Half of the sum is what some set of tokens gains. If its true weight is p, it gains most when its logits rise by e and all others fall
    by e: then its odds grow by exp(2e). The gain is largest for p = 1 / (1 + exp(e)), and there tanh(e / 2).
    """
    return 2 * torch.tanh(_double(logit_error) / 2)


def output_error_bound(logit_error: Number, value_radius: Number, value_residual: Number) -> torch.Tensor:
    """How far the output can be off: its error is `sum (a - a') v + sum a' (v - Pv)`.

    Differences of weights sum up to 0, so any one vector may be taken from all values in the first sum; the second is an average of
    residuals.
    """
    return weight_error_bound(logit_error) * _double(value_radius) + _double(value_residual)


def value_radius(values: torch.Tensor) -> torch.Tensor:
    """The largest distance of the values from 0 or from their mean, whichever is smaller, (...)."""
    values = values.double()
    centres = (values, values - values.mean(-2, keepdim=True))
    largest = [torch.linalg.vector_norm(centred, dim=-1).amax(-1) for centred in centres]
    return torch.minimum(*largest)


def attention_error_bound(
    key_residuals: torch.Tensor, value_residuals: torch.Tensor, query_norm: Number, value_radius: Number, scaling: Number
) -> AttentionBounds:
    """Both bounds, over all tokens or over chunks that have bases of their own.

    Args:
        key_residuals: (..., chunks or tokens): the norm of a row `k - gamma P k`, or the operator norm of a chunk.
        value_residuals: The same of values, without gamma.
        query_norm: Of the query as it meets the keys: rotated, if they are.
        scaling: What the model multiplies `q.k` with.
    """
    logits = logit_error_bound(_largest(key_residuals), query_norm, scaling)
    return AttentionBounds(logits, output_error_bound(logits, value_radius, _largest(value_residuals)))


def paper_sketch_bound(gram: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The paper's bound on what a basis of a sketch misses, `sqrt(eps) + 2 eps / gap`."""
    energies = torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0)
    epsilon = energies[..., rank:].sum(-1) / (size - rank)
    return epsilon.sqrt() + 2 * epsilon / (energies[..., rank - 1] - energies[..., rank])


def certificate(energy: torch.Tensor, sketch_energy: torch.Tensor, size: int) -> torch.Tensor:
    """How far a Frequent Directions sketch S can be from what it has seen, `||X'X - S'S||`, by the squared Frobenius norms of X and S.

    A shrinking by x takes x from at least `size` squared singular values. Both energies are sums of rounded squares, and their difference
    may be nothing.
    """
    return (energy - sketch_energy).clamp_min(0) / size + 64 * torch.finfo(torch.float64).eps * energy


def sketched_residual_bound(next_singular_value: torch.Tensor, covariance_error: torch.Tensor) -> torch.Tensor:
    """What a basis taken from a sketch can miss of the tokens that the sketch has seen: `||X (I - P)|| <= sqrt(s ** 2 + error)`.

    With P onto the first r right singular vectors of S, `||X (I - P)|| ** 2` is at most `||S (I - P)|| ** 2 + ||X'X - S'S||`, and the
    first term is the square of the sketch's singular value r + 1. No gap between singular values is needed.
    """
    return (next_singular_value.square() + covariance_error).sqrt()


def residuals(vectors: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor | None = None, gamma: float = 1.0) -> torch.Tensor:
    """What each token loses, `x - gamma decode encode x`, in float64; `decode` is the transpose of `encode` if None."""
    decode = encode.mT if decode is None else decode
    return vectors.double() - gamma * (vectors.double() @ encode.double().mT @ decode.double().mT)


def residual_rows(*maps: Any, **options: Any) -> torch.Tensor:
    """The norm of what each token loses, (..., tokens)."""
    return torch.linalg.vector_norm(residuals(*maps, **options), dim=-1)


def residual_norm(*maps: Any, **options: Any) -> torch.Tensor:
    """The operator norm of what all tokens lose together, (...)."""
    lost = residuals(*maps, **options)
    return torch.linalg.matrix_norm(lost, ord=2) if lost.numel() else lost.new_zeros(lost.shape[:-2])


def _double(value: Number) -> torch.Tensor:
    return value.double() if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _largest(residuals: torch.Tensor) -> torch.Tensor:
    """The largest of each row; 0 where there are none."""
    return torch.nn.functional.pad(residuals.double(), (0, 1)).amax(-1)
