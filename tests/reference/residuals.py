"""What projections lose of vectors, token by token and together."""

from __future__ import annotations

from typing import Any

import torch


def residuals(vectors: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor | None = None, gamma: float = 1.0) -> torch.Tensor:
    """What each token loses, `x - gamma decode encode x`, in float64; `decode` is the transpose of `encode` if None."""
    encode = encode.double()
    decode = encode.mT if decode is None else decode.double()
    return vectors.double() - gamma * (vectors.double() @ encode.mT @ decode.mT)


def residual_rows(*maps: Any, **options: Any) -> torch.Tensor:
    """The norm of what each token loses, (..., tokens); their largest is the best possible residual of the bounds."""
    return torch.linalg.vector_norm(residuals(*maps, **options), dim=-1)


def residual_norm(*maps: Any, **options: Any) -> torch.Tensor:
    """The operator norm of what all tokens lose together, (...)."""
    lost = residuals(*maps, **options)
    return torch.linalg.matrix_norm(lost, ord=2) if lost.numel() else lost.new_zeros(lost.shape[:-2])
