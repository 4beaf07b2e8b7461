"""Refit: kept values that answer as all values did.

Queries of the context, rotated behind its end, got some output from all tokens. The kept tokens' values are moved as little as ridge
regression needs to give these queries that output again; keys, and so the weights of attention, stay.
"""

from __future__ import annotations

import torch

from hf_kvcaches.equip.policies.future import piece
from hf_kvcaches.equip.policies.tokens import NOTHING
from hf_kvcaches.equip.storage import pick


def refit(
    queries: torch.Tensor,
    asked: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    real: torch.Tensor,
    kept: torch.Tensor,
    stays: torch.Tensor,
    scaling: float,
    *,
    afterwards: tuple[torch.Tensor, torch.Tensor] | None = None,
    ridge: float = 0.05,
) -> torch.Tensor:
    """Values of kept tokens, (batch, kv_heads, n, value_dim), by ridge regression on what queries get of all tokens.

    In dual form, V' = V + W' (W W' + ridge * mean diagonal)^-1 (A - W V), with the weights W that the queries of a KV head's group give to
    its kept tokens, and A what they get of all.

    Args:
        queries: (batch, heads, queries, head_dim), in one frame with the keys, as `future_queries` gives them.
        asked: True for real queries, (batch or 1, queries).
        keys: Of all tokens, (batch, kv_heads, tokens, head_dim).
        values: Of all tokens, (batch, kv_heads, tokens, value_dim).
        real: True for tokens, (batch, 1 or kv_heads, tokens).
        kept: Which of them stay, (batch, kv_heads, n).
        stays: False where `kept` names none, (batch, 1 or kv_heads, n).
        scaling: What the model's attention multiplies scores with.
        afterwards: The queries and the kept keys, (batch, kv_heads, n, head_dim), as they are rotated once the others are gone, where that
            is otherwise: compact positions bring them closer together.
        ridge: Relative to the mean of the diagonal.
    """
    (batch, heads, tokens, _), group = keys.shape, queries.shape[1] // keys.shape[1]
    rows = asked.expand(batch, -1).repeat(1, group).repeat_interleave(heads, 0)[..., None]  # (batch * kv_heads, group * queries, 1)
    later, chosen = afterwards or (queries, pick(keys, kept))
    asking, later = (part.reshape(batch * heads, rows.shape[1], -1) for part in (queries, later))
    keys, states, chosen = keys.flatten(0, 1), values.flatten(0, 1), chosen.flatten(0, 1)
    missing, absent = ((~part).expand(batch, heads, -1).flatten(0, 1)[:, None] for part in (real, stays))
    index, step, refitted = kept.flatten(0, 1)[..., None], max(1, piece(keys) // (rows.shape[1] * tokens)), []
    for start in range(0, batch * heads, step):
        part = slice(start, start + step)
        before = _weights(asking[part], keys[part], missing[part], scaling)
        after = _weights(later[part], chosen[part], absent[part], scaling)
        old, weights = states[part].take_along_dim(index[part], 1).float(), after * rows[part]
        gram = weights @ weights.mT
        diagonal = gram.diagonal(dim1=1, dim2=2)
        damping = ridge * diagonal.sum(-1, keepdim=True) / rows[part].sum(1).clamp(min=1)
        diagonal.add_(damping.clamp(min=torch.finfo(torch.float32).tiny))
        residual = (before @ states[part].float() - weights @ old) * rows[part]
        refitted.append(old + weights.mT @ torch.cholesky_solve(residual, torch.linalg.cholesky(gram)))
    return torch.cat(refitted).unflatten(0, (batch, heads)).to(values.dtype)


def _weights(queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, scaling: float) -> torch.Tensor:
    """What each query gives to each key that is not hidden."""
    return ((queries.float() * scaling) @ keys.float().mT).masked_fill_(hidden, NOTHING).softmax(-1)
