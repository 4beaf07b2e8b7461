"""Plain statistics of lists of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch
from scipy.stats import spearmanr


def mean(values: Sequence[float]) -> float:
    """The mean; not a number for nothing."""
    return fmean(values) if values else float("nan")


def spearman(left: torch.Tensor, right: torch.Tensor) -> float:
    """The correlation of the ranks of two lists of numbers; equal ones share their mean rank. Not a number where one is constant."""
    if left.unique().numel() < 2 or right.unique().numel() < 2:  # of which SciPy warns
        return float("nan")
    return float(spearmanr(left.numpy(), right.numpy()).statistic)
