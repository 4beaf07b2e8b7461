"""Attention in PyTorch: with everything that models ask for; of many new tokens, in pieces small enough for any length; and in parts of the
tokens, which merge to the exact softmax over all of them (Online Subspace Projection for KV Caches, section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# How many attention weights are held at a time.
PIECE = 2**24


@dataclass(frozen=True)
class Visibility:
    """Which keys a block's queries may see: those kept before, by slot, and the new ones up to each query itself."""

    slots: Tensor | None  # True where a slot counts, (batch or 1, 1 or kv_heads, slots); None for all
    kept: int  # slots before the new tokens
    new: Tensor | None  # True where a new token is real, (batch, tokens); None for all
    given: Tensor | None = None  # what the caller's own mask allows, (batch or 1, 1 or kv_heads, tokens, slots + tokens)

    def rows(self, start: int, stop: int, device: torch.device) -> Tensor:
        """For queries start to stop: (batch or 1, 1 or kv_heads, queries, kept + stop)."""
        causal = torch.arange(stop, device=device) <= torch.arange(start, stop, device=device)[:, None]
        new = causal[None, None] if self.new is None else causal & self.new[:, None, None, :stop]
        if self.kept:
            old = torch.ones(1, 1, 1, self.kept, dtype=torch.bool, device=device) if self.slots is None else self.slots[:, :, None]
            shape = torch.broadcast_shapes((*old.shape[:2], stop - start), new.shape[:3])
            new = torch.cat([old.expand(*shape, -1), new.expand(*shape, -1)], -1)
        return new if self.given is None else new & self.given[:, :, start:stop, : self.kept + stop]


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    scaling: float,
    allowed: Tensor | None,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Attention of all queries at once: the output, (batch, queries, heads, value_dim), and the weights.

    Args:
        query: (batch, heads, queries, dim); consecutive heads share a key head.
        keys: (batch, kv_heads, tokens, dim); and `values`, or None where no output is wanted.
        allowed: What a query may see, (batch or 1, 1 or kv_heads, queries, tokens), or None for all. One that sees nothing gets zeros.
        bias: Added to the scores, (batch or 1, heads or 1, queries, tokens).
        sink_logits: A score for each head, (heads,), that takes a share of the weights and gives nothing.

    Returns:
        The output, None without values, and weights, (batch, kv_heads, group, queries, tokens), in float32 or the query's float64.
    """
    (batch, heads, queries, dim), (kv_heads, tokens) = query.shape, keys.shape[1:3]
    near, exact = query.reshape(batch * kv_heads, -1, dim), torch.float64 if query.dtype == torch.float64 else torch.float32
    # Scaled within the product: one operation, and nothing is rounded twice.
    scores = torch.baddbmm(near.narrow(2, 0, 1), near, keys.flatten(0, 1).mT, beta=0, alpha=scaling).to(exact)
    scores = scores.view(batch, heads, queries, tokens)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.to(exact)
    scores = scores.view(batch, kv_heads, -1, queries, tokens)
    hidden = None if allowed is None else ~allowed.unsqueeze(2)
    if hidden is not None:  # by a finite number, and zeros afterwards: so the gradient of a query that sees nothing is 0 too
        scores = scores.masked_fill(hidden, torch.finfo(exact).min)
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits.to(exact).view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :tokens]
    weights = weights if hidden is None else weights.masked_fill(hidden, 0)
    if values is None:
        return None, weights
    output = torch.bmm(weights.to(values.dtype).reshape(*near.shape[:2], tokens), values.flatten(0, 1))
    return output.view(batch, heads, queries, -1).transpose(1, 2), weights


def block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    scaling: float,
    visible: Visibility,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
    observers: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """`attention` of new tokens over kept ones and themselves, piece by piece, and what each key got from some of them.

    Args:
        observers: 1 for queries that are observed, (batch or 1, tokens), or None for none.

    Returns:
        (batch, tokens, heads, value_dim) or None, and sums of weights, (batch, kv_heads, kept + tokens), mean over the heads of a group.
    """
    (batch, heads, tokens, _), (kv_heads, total) = query.shape, keys.shape[1:3]
    observed = None if observers is None else torch.zeros(batch, kv_heads, total, dtype=torch.float32, device=keys.device)
    first = 0 if values is not None or observers is None else int(observers.any(0).int().argmax())
    step, outputs = max(1, PIECE // (batch * heads * total)), []
    for start in range(first, tokens, step):
        stop = min(tokens, start + step)
        reach = visible.kept + stop  # what lies after is in the future of all these queries
        output, weights = attention(
            query[:, :, start:stop],
            keys[:, :, :reach],
            None if values is None else values[:, :, :reach],
            scaling,
            visible.rows(start, stop, keys.device),
            softcap=softcap,
            bias=None if bias is None else bias[:, :, start:stop, :reach],
            sink_logits=sink_logits,
        )
        outputs += [] if output is None else [output]
        if observed is not None and observers is not None:
            observed[:, :, :reach] += (weights.detach().mean(2) * observers[:, None, start:stop, None]).sum(2)
    return torch.cat(outputs, 1) if outputs else None, observed


def observers(window: int | None, valid: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """1 for the last `window` real (`valid`) tokens of each row (None: for all real ones), (batch or 1, tokens)."""
    real = torch.ones(1, tokens, dtype=torch.bool, device=device) if valid is None else valid
    if window is None:
        return real.float()
    return (real & (real.flip(-1).cumsum(-1).flip(-1) <= window)).float()


class AttentionPart(NamedTuple):
    """Attention over some tokens before it is normalized; numbers are float32, or float64 where the query is."""

    sums: Tensor  # of values by their exponentials, (batch, heads, queries, value_dim)
    total: Tensor  # of the exponentials, (batch, heads, queries, 1)
    highest: Tensor  # the score that was subtracted before; the least number where a query sees no token


def exact_part(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, visible: Tensor | None = None, softcap: float | None = None
) -> AttentionPart:
    """Attention over tokens that are kept as they are.

    Args:
        query: (batch, heads, queries, dim); consecutive heads share a key head.
        keys: (batch, kv_heads, tokens, dim); and `values`, finite also where they are not visible.
        visible: Which tokens a query sees, (batch or 1, queries or 1, tokens), or None for all.
    """
    (batch, heads, queries, dim), kv_heads = query.shape, keys.shape[1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(dtype).reshape(batch, kv_heads, -1, dim) * scaling
    weights, highest = exponentials((grouped @ keys.to(dtype).mT).view(batch, heads, queries, -1), visible, softcap)
    sums = weights.view(batch, kv_heads, -1, weights.shape[-1]) @ values.to(dtype)
    return AttentionPart(sums.view(batch, heads, queries, -1), weights.sum(-1, keepdim=True), highest)


def exponentials(scores: Tensor, visible: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Exponentials of scores, (batch, heads, queries, tokens), and the score that was subtracted; overwrites the scores."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is None:
        highest = scores.amax(-1, keepdim=True)
        return scores.sub_(highest).exp_(), highest
    scores = scores.masked_fill_(~visible.unsqueeze(1), -torch.inf)
    highest = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    return scores.sub_(highest).exp_(), highest


def joined(parts: Sequence[AttentionPart]) -> AttentionPart:
    """Attention over the tokens of all parts."""
    (sums, total, highest), *others = parts
    for part in others:
        highest = torch.maximum(highest, part.highest)
    if others:
        share = (parts[0].highest - highest).exp_()
        sums, total = sums * share, total * share
    for part in others:
        share = (part.highest - highest).exp_()
        sums, total = torch.addcmul(sums, part.sums, share), torch.addcmul(total, part.total, share)
    return AttentionPart(sums, total, highest)


def merged(parts: Sequence[AttentionPart]) -> Tensor:
    """Attention over the tokens of all parts, (batch, queries, heads, value_dim); 0 where a query sees none."""
    sums, total, _ = joined(parts)
    return (sums / total.clamp_min(torch.finfo(total.dtype).tiny)).transpose(1, 2)
