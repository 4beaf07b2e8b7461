"""Compactor: leverage scores and non-causal attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_kvcaches.equip.policies.base import PeriodicPolicy, count
from hf_kvcaches.equip.policies.leverage import leverage
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class CompactorPolicy(PeriodicPolicy, built_in=True):
    """Keeps the tokens with outlying keys, and those that the tokens around them, later or earlier, attend to.

    Compactor (Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, arXiv 2507.08143): leverage scores, and the
    attention of a block's queries to the keys of their chunk without a causal mask, times the norm of the value, pooled over neighbours.

    **Departs from the paper**: leverage as in `LeveragePolicy`; terms are standardized over a head's tokens; only a new block has both.

    Args:
        weight: Of the leverage term; the attention term has 1.
        chunk: Tokens that attend to each other.
    """

    name = "compactor"
    sees_block = True
    weight: float = 1.0
    chunk: int = count(256)

    def score(self, tokens: Tokens) -> torch.Tensor:
        real = (tokens.positions >= 0).expand(tokens.keys.shape[:3])
        scores = self.weight * _standardized(leverage(tokens), real)
        if tokens.queries is None or tokens.queries.shape[2] < 2:
            return scores
        attention, in_block = self._attention(tokens, tokens.queries.detach(), real)
        return scores + torch.where(in_block, _standardized(attention, in_block), 0.0)

    def _attention(self, tokens: Tokens, queries: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention term of each slot, and True for slots of the block's tokens, (batch, kv_heads, slots) each."""
        count, slots, device = queries.shape[2], real.shape[2], real.device
        # Chunks begin at the row's first real token of the block; padding comes first among the queries.
        start = torch.as_tensor(tokens.first, device=device).clamp(min=tokens.seen - count).view(-1, 1, 1)
        index = (tokens.positions - start).expand(real.shape)
        in_block = real & (index >= 0)
        slot = torch.full((*real.shape[:2], count + 1), slots, device=device)
        slot.scatter_(2, torch.where(in_block, index, count).long(), torch.arange(slots, device=device).expand(real.shape))
        slot, exists, block = slot[..., :count].clamp(max=slots - 1), slot[..., :count] < slots, tokens
        in_order = torch.arange(slots, device=device).expand_as(index)
        aligned = slots == count and torch.equal(index, in_order)  # a first block without padding
        if not aligned:
            shift = (torch.arange(count, device=device) + start - (tokens.seen - count)).clamp(max=count - 1)
            block, queries = tokens.pick(slot), queries.gather(2, shift[..., None].expand(queries.shape))
        keys, norms = block.keys.detach().float(), block.values.detach().float().norm(dim=-1)
        queries = (queries.float() * tokens.scaling).unflatten(1, (keys.shape[1], -1))  # (batch, kv_heads, group, count, head_dim)
        received = torch.empty_like(norms)
        for begin in range(0, count, self.chunk):
            span = slice(begin, begin + self.chunk)
            logits, present = queries[:, :, :, span] @ keys[:, :, None, span].mT, exists[:, :, None, None, span]
            weights = (logits if aligned else logits.masked_fill(~present, torch.finfo(logits.dtype).min)).softmax(-1)
            received[..., span] = (weights if aligned else weights * present.mT).sum(3).mean(2)
        received = (received * norms).masked_fill_(~exists, 0.0)
        return functional.avg_pool1d(received, 3, 1, 1).gather(2, index.clamp(0, count - 1).long()), in_block


def _standardized(scores: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Scores with mean 0 and deviation 1 over the real tokens of a head."""
    count = real.sum(-1, keepdim=True).clamp(min=1)
    centered = scores - scores.masked_fill(~real, 0.0).sum(-1, keepdim=True) / count
    deviation = (centered.masked_fill(~real, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
    return centered / deviation.clamp(min=1e-6)
