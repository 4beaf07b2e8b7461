"""The paper's Reuse: keys and values each for themselves, by a joint factorisation of both models' states (section 4.3)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Translator(NamedTuple):
    """From the producer's keys or values in one layer to codes, (producer, rank), and to the consumer's, (rank, consumer)."""

    encode: torch.Tensor
    decode: torch.Tensor


def fit_reuse(producer: torch.Tensor, consumer: torch.Tensor, rank: int, ridge: float = 1e-6) -> Translator:
    """Factorise both models' states side by side by a truncated SVD, with a ridge encoder (equations 6 and 7).

    Args:
        producer: States of some tokens, (tokens, producer).
        consumer: (tokens, consumer).
        ridge: As a share of the mean square of the producer's states.
    """
    both = torch.cat([producer, consumer], dim=1).double()
    latents = torch.linalg.eigh(both.T @ both)[1].flip(1)[:, :rank]
    return Translator(fit_ridge(producer, both @ latents, ridge), latents[producer.shape[1] :].T.float())


def fit_ridge(inputs: torch.Tensor, targets: torch.Tensor, ridge: float) -> torch.Tensor:
    """Return the weights of a ridge regression, (inputs, targets), float32."""
    inputs = inputs.double()
    squares = inputs.T @ inputs
    squares.diagonal().add_(ridge * squares.diagonal().mean() + torch.finfo(torch.float64).tiny)
    return torch.linalg.solve(squares, inputs.T @ targets.double()).float()
