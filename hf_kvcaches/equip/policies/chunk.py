"""Chunk-wise pruning: each chunk of the text keeps the same share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import WrappingPolicy, count
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class ChunkPolicy(WrappingPolicy, built_in=True):
    """Keeps the same share of each chunk of the text, with the scores of another policy over the chunk alone, as kvpress's `ChunkPress`.

    Args:
        size: Tokens of a chunk.
    """

    name = "chunk"
    size: int = count(256)

    def score(self, tokens: Tokens) -> torch.Tensor:
        order = tokens.in_order()
        scores = torch.zeros(order.shape, device=order.device)
        for slots in order.split(self.size, -1):
            chunk = tokens.pick(slots)
            real = chunk.positions >= 0
            ranks = torch.where(real, self.inner_score(chunk), -torch.inf).argsort(-1).argsort(-1) + 1.0
            # From 1 for the best token down to almost 0: any threshold keeps the same share of all chunks.
            scores.scatter_(-1, slots, 1 - (real.shape[-1] - ranks) / real.sum(-1, keepdim=True).clamp(min=1))
        return scores
