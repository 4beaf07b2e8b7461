"""Attention of many new tokens at once, in pieces small enough for any length, and what each key got of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# How many attention weights are held at a time.
PIECE = 2**24


@dataclass(frozen=True)
class Visibility:
    """Which keys a block's queries may see: those kept before, by slot, and the new ones up to each query itself.

    Args:
        slots: True where a slot counts, (batch or 1, 1 or kv_heads, slots); None for all `kept` of them.
        kept: How many slots stand before the new tokens.
        new: True where a new token is real, (batch, tokens), or None for all.
        given: What the caller's own mask allows, (batch or 1, 1 or kv_heads, tokens, slots + tokens), or None.
    """

    slots: torch.Tensor | None
    kept: int
    new: torch.Tensor | None
    given: torch.Tensor | None = None

    def rows(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """For queries start to stop: (batch or 1, 1 or kv_heads, queries, kept + stop)."""
        causal = torch.arange(stop, device=device) <= torch.arange(start, stop, device=device)[:, None]
        new = causal[None, None] if self.new is None else causal & self.new[:, None, None, :stop]
        if self.kept:
            old = torch.ones(1, 1, 1, self.kept, dtype=torch.bool, device=device) if self.slots is None else self.slots[:, :, None]
            shape = torch.broadcast_shapes((*old.shape[:2], stop - start), new.shape[:3])
            new = torch.cat([old.expand(*shape, -1), new.expand(*shape, -1)], -1)
        return new if self.given is None else new & self.given[:, :, start:stop, : self.kept + stop]


def block_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    scaling: float,
    visible: Visibility,
    *,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    observers: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Attention of new tokens over slots and themselves, and the sum of what each key got from some of them.

    Args:
        query: (batch, heads, tokens, head_dim), in one frame with the keys.
        keys: (batch, kv_heads, kept + tokens, head_dim).
        values: Like `keys`, or None where no output is wanted.
        visible: Who sees whom.
        softcap: Bound of the scores, or None.
        bias: Added to the scores, (batch or 1, heads or 1, tokens, kept + tokens), or None.
        sink_logits: A score for each head, (heads,), that takes a share of the weights and gives nothing, or None.
        observers: 1 for queries that are observed, (batch or 1, tokens), or None for none.

    Returns:
        (batch, tokens, heads, head_dim) or None, and (batch, kv_heads, kept + tokens), float32, a mean over the heads of a group, or None.
    """
    batch, heads, tokens, _ = query.shape
    kv_heads, total = keys.shape[1:3]
    group = heads // kv_heads
    grouped = query.reshape(batch, kv_heads, group, tokens, -1)
    observed = None if observers is None else torch.zeros(batch, kv_heads, total, dtype=torch.float32, device=keys.device)
    first = 0 if values is not None or observers is None else int(observers.any(0).int().argmax())
    step, outputs = max(1, PIECE // (batch * heads * total)), []
    for start in range(first, tokens, step):
        stop = min(tokens, start + step)
        reach = visible.kept + stop  # what lies after is in the future of all these queries
        scores = torch.matmul(grouped[:, :, :, start:stop] * scaling, keys[:, :, None, :reach].transpose(-1, -2)).float()
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            own = bias[:, :, start:stop, :reach].float()
            scores = scores + (own.unflatten(1, (kv_heads, group)) if own.shape[1] == heads else own[:, :, None])
        allowed = visible.rows(start, stop, keys.device)[:, :, None]
        # A query that sees nothing (padding) gets zeros, as from sdpa.
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sink_logits is not None:
            scores = torch.cat([scores, sink_logits.float().view(1, kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., :reach]
        if values is not None:
            outputs.append(torch.matmul(weights.to(values.dtype), values[:, :, None, :reach]))
        if observed is not None and observers is not None:
            counted = weights.detach() * observers[:, None, None, start:stop, None]
            observed[:, :, :reach] += counted.sum(3).mean(2)
    if values is None:
        return None, observed
    return torch.cat(outputs, 3).flatten(1, 2).transpose(1, 2), observed


def observers(window: int | None, valid: torch.Tensor | None, tokens: int, device: torch.device) -> torch.Tensor:
    """1 for the last `window` real tokens of each row (None: for all real ones), (batch or 1, tokens).

    Args:
        valid: True where a token is real, (batch, tokens), or None for all.
    """
    real = torch.ones(1, tokens, dtype=torch.bool, device=device) if valid is None else valid
    if window is None:
        return real.float()
    return (real & (real.flip(-1).cumsum(-1).flip(-1) <= window)).float()
