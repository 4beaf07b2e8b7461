"""Leverage scores: keys that no combination of the others makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import PeriodicPolicy
from hf_kvcaches.equip.tokens import Tokens

# What is added to the second moments, as a share of their mean: directions in which there is nothing but rounding count for nothing.
_RIDGE = 1e-2


@dataclass(frozen=True)
class LeveragePolicy(PeriodicPolicy):
    """Keeps the tokens whose keys stand out: those that a least-squares fit of all keys would bend to.

    Compactor (Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, arXiv 2507.08143), its query-agnostic half:
    the statistical leverage of each centred key before its rotation, `x (X'X)^-1 x'`. No attention is needed, and nothing is known of what
    is asked.

    **Departs from the paper**: leverage is exact, from the second moments of a head's keys, and not from a random sketch; sinks, whose keys
    are unlike all others, are left out of the moments. Where a model's rotation is not known, keys are taken as they are.
    """

    name = "leverage"

    def score(self, tokens: Tokens) -> torch.Tensor:
        return leverage(tokens)


def leverage(tokens: Tokens) -> torch.Tensor:
    """The leverage of each token's key among those of its row and head, (batch, kv_heads, slots)."""
    counted = ((tokens.row_index() >= tokens.sinks).float())[..., None]
    keys = tokens.unrotated_keys().detach().float()
    keys = (keys - (keys * counted).sum(2, keepdim=True) / counted.sum(2, keepdim=True).clamp(min=1)) * counted
    precise = keys.double()  # where there are fewer keys than dimensions, the moments say little, and rounding would decide
    moments = precise.transpose(2, 3) @ precise
    ridge = _RIDGE * moments.diagonal(dim1=2, dim2=3).mean(-1).clamp(min=torch.finfo(torch.float32).tiny)
    moments.diagonal(dim1=2, dim2=3).add_(ridge[..., None])
    factor = torch.linalg.cholesky(moments)
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    # Solving for each key takes ten times longer than this product.
    return (keys @ torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False).mT.float()).square().sum(-1)
