"""Causal attention whose gradients at keys and values come apart: what far queries see of them, and what near ones see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_kvcaches.core.call import Call


def attend_apart(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_leaves: Sequence[torch.Tensor],
    value_leaves: Sequence[torch.Tensor],
    call: Call,
    recent: int,
) -> torch.Tensor:
    """Attention of a whole sequence, (batch, tokens, heads, dim), with gradients at zeros that are part of keys and values.

    Args:
        query: (batch, heads, tokens, dim).
        keys: (batch, kv_heads, tokens, dim), and `values`.
        key_leaves: Two tensors like the keys: part of these for queries at least `recent` tokens on, and for nearer ones.
        value_leaves: Like `key_leaves`.
    """
    output: torch.Tensor = _Apart.apply(query, keys, values, *key_leaves, *value_leaves, call, recent)
    return output


class _Apart(torch.autograd.Function):
    """Weights are computed again on the way back, so that nothing is kept but queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> torch.Tensor:
        *_, ctx.call, ctx.recent = rest
        ctx.save_for_backward(query, keys, values)
        weights, _, _ = _weights(query, keys, ctx.call)
        return (weights @ values[:, :, None]).flatten(1, 2).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, keys, values = ctx.saved_tensors
        weights, slope, grouped = _weights(query, keys, ctx.call)
        tokens = keys.shape[2]
        index = torch.arange(tokens, device=keys.device)
        far = index[:, None] - index >= ctx.recent
        at_output = gradient.transpose(1, 2).unflatten(1, (keys.shape[1], -1))  # [B, KV, G, T, D]
        at_weights = at_output @ values[:, :, None].mT
        at_scores = weights * (at_weights - (weights * at_weights).sum(-1, keepdim=True)) * ctx.call.scaling
        if slope is not None:
            at_scores = at_scores * slope
        at_keys = _apart(at_scores, grouped, far)
        at_values = _apart(weights, at_output, far)
        at_query = (at_scores @ keys[:, :, None]).flatten(1, 2)
        return at_query, sum(at_keys), sum(at_values), *at_keys, *at_values, None, None


def _weights(query: torch.Tensor, keys: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The weights, (batch, kv_heads, group, tokens, tokens), the slope of a soft cap, and the query by KV head."""
    (_, heads, tokens, _), kv_heads, slope = query.shape, keys.shape[1], None
    grouped = query.unflatten(1, (kv_heads, -1))
    scores = grouped @ keys[:, :, None].mT * call.scaling
    if call.softcap is not None:
        bounded = torch.tanh(scores / call.softcap)
        scores, slope = bounded * call.softcap, 1 - bounded.square()
    if call.bias is not None:
        own = call.bias[..., -tokens:]
        scores = scores + (own.unflatten(1, (kv_heads, -1)) if own.shape[1] == heads else own[:, :, None])
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    if call.sink_logits is not None:
        sinks = call.sink_logits.to(scores.dtype).view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], slope, grouped
    return scores.softmax(-1), slope, grouped


def _apart(products: torch.Tensor, rows: torch.Tensor, far: torch.Tensor) -> list[torch.Tensor]:
    """What far queries and near ones give each key, (batch, kv_heads, tokens, dim) each."""
    return [((products * part).mT @ rows).sum(2) for part in (far, ~far)]
