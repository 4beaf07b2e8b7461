"""Plain statistics of lists of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch


def mean(values: Sequence[float]) -> float:
    """The mean; not a number for nothing."""
    return fmean(values) if values else float("nan")


def spearman(left: torch.Tensor, right: torch.Tensor) -> float:
    """The correlation of the ranks of two lists of numbers; equal ones share their mean rank."""
    ranks = torch.stack([_ranks(left), _ranks(right)])
    centred = ranks - ranks.mean(1, keepdim=True)
    scale = centred.square().sum(1).prod().sqrt()
    return float((centred[0] * centred[1]).sum() / scale) if scale else float("nan")


def _ranks(numbers: torch.Tensor) -> torch.Tensor:
    _, place, counts = torch.unique(numbers.double(), sorted=True, return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts.double() - 1) / 2)[place]
