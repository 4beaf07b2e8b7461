"""Leverage scores: keys that are no combination of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import PeriodicPolicy
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class LeveragePolicy(PeriodicPolicy, built_in=True):
    """Keeps the tokens with outlying keys: those with a large influence on a least-squares fit of all keys.

    Compactor (Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, arXiv 2507.08143), its query-agnostic half:
    the leverage of each centered key before its rotation, `x (X'X)^-1 x'`. It needs no attention and does not depend on the question.

    **Departs from the paper**: leverage is exact, from the second moments of a head's keys, and not from a random sketch; sinks, with keys
    unlike all others, are left out of the moments. Where a model's rotation is not known, keys are taken as they are.
    """

    name = "leverage"

    def score(self, tokens: Tokens) -> torch.Tensor:
        return leverage(tokens)


def leverage(tokens: Tokens) -> torch.Tensor:
    """The leverage of each token's key among those of its row and head, (batch, kv_heads, slots)."""
    counted = tokens.counted().float()[..., None]
    keys = tokens.unrotated_keys().detach().float()
    keys = (keys - (keys * counted).sum(2, keepdim=True) / counted.sum(2, keepdim=True).clamp(min=1)) * counted
    precise = keys.double()  # with fewer keys than dimensions the moments are singular, and rounding would decide
    moments = precise.mT @ precise
    # The ridge takes the weight from directions that hold nothing but rounding errors.
    ridge = 1e-2 * moments.diagonal(dim1=2, dim2=3).mean(-1).clamp(min=torch.finfo(torch.float32).tiny)
    moments.diagonal(dim1=2, dim2=3).add_(ridge[..., None])
    factor = torch.linalg.cholesky(moments)
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    # Solving for each key takes ten times longer than this product.
    return (keys @ torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False).mT.float()).square().sum(-1)
