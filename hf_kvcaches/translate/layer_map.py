"""Which layer of a producer each layer of a consumer is made of: the nearest in depth, or the one that predicts it best."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_kvcaches.translate.moments import fit_ridge

# Numbers that a layer's keys and values are projected to before they are predicted: the errors of these are those of the layer in the mean.
_TARGETS = 64
_RIDGE = 1e-4


def nearest_in_depth(layers: int, others: int) -> list[int]:
    """For each of some layers the one of others at the nearest depth; the first and the last are each other's."""
    return [round(layer * (others - 1) / max(1, layers - 1)) for layer in range(layers)]


def best_fit(texts: Iterable[tuple[list[Tensor], list[Tensor]]]) -> list[int]:
    """For each layer of a consumer the producer's layer that predicts it best, none below that of the layer before.

    Each layer is predicted by ridge regression on half of the tokens, and the error is that of the other half.

    Args:
        texts: Of each text the producer's and the consumer's keys and values side by side, layer by layer, (tokens, width) each.
    """
    read = list(texts)
    generator, halves = torch.Generator().manual_seed(0), (slice(0, None, 2), slice(1, None, 2))
    sources, targets = ([torch.cat(layer).double() for layer in zip(*side, strict=True)] for side in zip(*read, strict=True))
    wanted = []
    for states in targets:
        projection = torch.randn(states.shape[1], _TARGETS, generator=generator, dtype=torch.float64)
        projected = (states - states.mean(0)) @ projection
        wanted.append(projected / projected.norm())
    together = torch.cat(wanted, 1)
    errors = []
    for states in sources:
        seen, unseen = ((states - states.mean(0))[half] for half in halves)
        slopes = fit_ridge(seen.T @ seen, seen.T @ together[halves[0]], _RIDGE)
        left = together[halves[1]] - unseen @ slopes
        errors.append(left.unflatten(1, (-1, _TARGETS)).square().sum((0, 2)))
    return least_errors(torch.stack(errors, 1))


def least_errors(errors: Tensor) -> list[int]:
    """The columns that never step back, one for each row of errors, with the least sum; of equal ones the lowest."""
    totals, steps = errors[0], []
    for row in errors[1:]:
        best = torch.cummin(totals, 0)
        steps.append(best.indices.tolist())
        totals = best.values + row
    chosen = [int(totals.argmin())]
    for step in reversed(steps):
        chosen.append(step[chosen[-1]])
    return chosen[::-1]
