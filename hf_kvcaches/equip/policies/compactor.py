"""Compactor: leverage scores, and what a block's queries attend to in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_kvcaches.equip.policies.base import PeriodicPolicy, check_count
from hf_kvcaches.equip.policies.leverage import leverage
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class CompactorPolicy(PeriodicPolicy):
    """Keeps the tokens whose keys stand out, and those that the tokens around them attend to, later or earlier.

    Compactor (Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, arXiv 2507.08143): leverage scores, and the
    attention of a block's queries to the keys of their chunk without a causal mask, times the length of the value, pooled over neighbours.

    **Departs from the paper**: leverage as in `LeveragePolicy`; both halves are standardised over a head's tokens and added with a fixed
    weight. Tokens that come singly or from another cache are scored by leverage alone, and so is what was kept of earlier blocks.

    Args:
        weight: Of leverage; attention has 1.
        chunk: Tokens that attend to each other.
    """

    name = "compactor"
    sees_block = True
    weight: float = 1.0
    chunk: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "chunk", 1)

    def score(self, tokens: Tokens) -> torch.Tensor:
        real = (tokens.positions >= 0).expand(tokens.keys.shape[:3])
        scores = self.weight * _standard(leverage(tokens), real)
        queries = tokens.queries
        if queries is None or queries.shape[2] < 2:
            return scores
        attention, came = self._attention(tokens, queries, real)
        return scores + torch.where(came, _standard(attention, came), 0.0)

    def _attention(self, tokens: Tokens, queries: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the slots of a block's tokens got of its queries, and which slots these are, (batch, kv_heads, slots) each."""
        count, slots = queries.shape[2], real.shape[2]
        keys, values = tokens.keys.detach(), tokens.values.detach()
        if slots == tokens.seen == count and bool((tokens.positions == torch.arange(slots, device=real.device)).all()):
            return self._worth(queries.detach(), keys, values, None, tokens.scaling), real
        first = torch.as_tensor(tokens.first, device=real.device).view(-1, 1, 1)
        # Places in the row's part of the block: padding, which comes first among the queries, is not counted.
        pads = (first - (tokens.seen - count)).clamp(min=0)
        place = (tokens.positions - (tokens.seen - count) - pads).expand(real.shape)
        came = real & (place >= 0)
        # The slot of each token of the block.
        source = torch.full((*real.shape[:2], count + 1), slots, device=real.device, dtype=torch.long)
        source.scatter_(2, torch.where(came, place, count).long(), torch.arange(slots, device=real.device).expand(real.shape))
        source = source[..., :count]
        keys, values = (_picked(states, source.clamp(max=slots - 1)) for states in (keys, values))
        turn = (torch.arange(count, device=real.device) + pads).clamp(max=count - 1).expand(*queries.shape[:2], -1)
        worth = self._worth(_picked(queries.detach(), turn), keys, values, source < slots, tokens.scaling)
        return worth.gather(2, place.clamp(0, count - 1).long()), came

    def _worth(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, exists: torch.Tensor | None, scaling: float
    ) -> torch.Tensor:
        """What each token got from all of its chunk, the mean over a group, times the length of its value, (batch, kv_heads, tokens).

        Args:
            exists: True for tokens that are there, or None for all.
        """
        grouped, parts = (queries.float() * scaling).unflatten(1, (keys.shape[1], -1)), []
        for start in range(0, keys.shape[2], self.chunk):
            span = slice(start, start + self.chunk)
            logits = grouped[:, :, :, span] @ keys[:, :, None, span].float().mT
            if exists is None:
                parts.append(logits.softmax(-1).sum(3).mean(2))
                continue
            real = exists[:, :, None, None, span]
            weights = logits.masked_fill(~real, torch.finfo(torch.float32).min).softmax(-1)
            parts.append((weights * real.mT).sum(3).mean(2))
        received = torch.cat(parts, -1) * values.float().norm(dim=-1)
        return functional.avg_pool1d(received if exists is None else received.masked_fill(~exists, 0.0), 3, 1, 1)


def _picked(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return states.gather(2, slots[..., None].expand(-1, -1, -1, states.shape[-1]))


def _standard(scores: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Scores with mean 0 and deviation 1 over the real tokens of a head."""
    count = real.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(~real, 0.0).sum(-1, keepdim=True) / count
    spread = ((scores - mean).masked_fill(~real, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
    return (scores - mean) / spread.clamp(min=1e-6)
