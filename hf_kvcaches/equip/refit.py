"""Refit: kept values are moved, by ridge regression, to give queries of the context, rotated behind its end, what all values gave them."""

from __future__ import annotations

import torch

from hf_kvcaches.equip.policies.future import piece
from hf_kvcaches.equip.policies.tokens import NOTHING, Tokens
from hf_kvcaches.equip.storage import Slots, pick

# How many queries a refit looks at, and to how many positions behind the end they are rotated in turn.
_QUERIES, _SPREAD = 256, 96


def context_queries(tokens: Tokens, earlier: torch.Tensor | None, most: int = _QUERIES, spread: int = _SPREAD) -> torch.Tensor:
    """Some queries of a context and `earlier` ones, evenly, its newest token at the position 0, (batch, heads, n, head_dim)."""
    index = tokens.query_index
    length, n = index.shape[-1], min(most, index.shape[-1])
    real = (index >= 0).sum(-1, keepdim=True).clamp(min=n)  # a row's real queries, which are the last ones in order
    picks = length - real + real * torch.arange(n, device=index.device) // n
    picks = index.argsort(dim=-1, stable=True).gather(-1, picks)
    index, queries = index.gather(-1, picks), pick(tokens.asked.detach(), picks[:, None])
    turn = ((index >= 0).cumsum(-1) - 1).clamp(min=0) % spread
    queries = tokens.moved(queries, turn + 1 - index)
    queries = torch.where((index >= 0)[:, None, :, None], queries, queries[:, :, -1:])  # padding asks what the last query asks
    if earlier is None:
        return queries
    queries = torch.cat([earlier, queries], 2)
    return queries[:, :, torch.arange(most, device=index.device) * queries.shape[2] // most]


def refitted(
    tokens: Tokens, queries: torch.Tensor, kept_keys: torch.Tensor, index: Slots, stays: torch.Tensor, unrotated: bool
) -> torch.Tensor:
    """The values of tokens at `index`, (batch, 1 or kv_heads, n), where `stays`, refitted to what `context_queries` get of all."""
    afterwards = None
    if unrotated:  # positions are compact: what is gone no longer lies between queries and keys
        distances = stays.sum(-1, keepdim=True) - 1 - torch.arange(stays.shape[-1], device=stays.device)
        afterwards = queries, tokens.moved(kept_keys, -distances.clamp(min=0).expand(*kept_keys.shape[:3]))
    queries, index = tokens.moved(queries, tokens.end - 1), index.expand(-1, tokens.values.shape[1], -1)
    return refit(queries, tokens.keys, tokens.values, tokens.real, index, stays, tokens.scaling, afterwards=afterwards)


def refit(
    queries: torch.Tensor,
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
    """Values of `kept` tokens, (batch, kv_heads, n, value_dim), by ridge regression on what queries get of all that are `real`.

    In dual form, V' = V + W' (W W' + ridge * mean diagonal)^-1 (A - W V), with the weights W that the queries of a KV head's group give to
    its kept tokens, and A what they get of all. `afterwards` are queries and kept keys as they are rotated once the others are gone.
    """
    (batch, heads, tokens, dim), group = keys.shape, queries.shape[1] // keys.shape[1]
    later, chosen = afterwards or (queries, pick(keys, kept))
    asking, later = (part.reshape(batch * heads, group * queries.shape[2], dim) for part in (queries, later))
    keys, states, chosen = keys.flatten(0, 1), values.flatten(0, 1), chosen.flatten(0, 1)
    missing, absent = ((~part).expand(batch, heads, -1).flatten(0, 1)[:, None] for part in (real, stays))
    index, step, moved = kept.flatten(0, 1)[..., None], max(1, piece(keys) // (asking.shape[1] * tokens)), []
    for start in range(0, batch * heads, step):
        part = slice(start, start + step)
        before = _weights(asking[part], keys[part], missing[part], scaling)
        after = _weights(later[part], chosen[part], absent[part], scaling)
        old = states[part].take_along_dim(index[part], 1).float()
        gram = after @ after.mT
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal.add_((ridge * diagonal.mean(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny))
        residual = before @ states[part].float() - after @ old
        moved.append(old + after.mT @ torch.cholesky_solve(residual, torch.linalg.cholesky(gram)))
    return torch.cat(moved).unflatten(0, (batch, heads)).to(values.dtype)


def _weights(queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, scaling: float) -> torch.Tensor:
    return ((queries.float() * scaling) @ keys.float().mT).masked_fill_(hidden, NOTHING).softmax(-1)
