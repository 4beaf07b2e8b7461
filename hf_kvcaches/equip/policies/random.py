"""Random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy, count
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class RandomPolicy(Policy, built_in=True):
    """Keeps random tokens: the baseline for any other policy.

    A first block has the scores of kvpress's `RandomPress`, the same in each layer and row; later tokens have hashes.

    Args:
        seed: Not negative.
    """

    name = "random"
    directions = False
    asks_all_heads = True
    alone = True
    seed: int = count(0, least=0)

    def score(self, tokens: Tokens) -> torch.Tensor:
        index = tokens.row_index().expand(tokens.keys.shape[:3])
        if tokens.scores is None and tokens.seen == tokens.keys.shape[2]:
            return torch.stack([self._press_scores(tokens, row) for row in index])
        heads = torch.arange(tokens.heads, device=index.device)[None]
        scores = _hashes(index, tokens.of_these_heads(heads)[..., None], self.seed)
        return scores if tokens.scores is None else torch.where(tokens.scores.isnan(), scores, tokens.scores)

    def _press_scores(self, tokens: Tokens, index: torch.Tensor) -> torch.Tensor:
        """One row's scores for tokens at `index`, (kv_heads, slots)."""
        device, shape = tokens.keys.device, (1, tokens.heads, max(1, int(index.max()) + 1))
        drawn = torch.rand(shape, generator=torch.Generator(device).manual_seed(self.seed), device=device, dtype=tokens.keys.dtype)
        return tokens.of_these_heads(drawn)[0].float().gather(-1, index.clamp(min=0).long())


def _hashes(positions: torch.Tensor, heads: torch.Tensor, seed: int) -> torch.Tensor:
    """Pseudo-random numbers in [0, 1) from seed, head and position, (batch, kv_heads, slots), for `positions` of that shape.

    Args:
        heads: The index of each head in the model's layer, (1, kv_heads, 1).
    """
    mixed = torch.full_like(heads, seed % 2**31)
    for part in (heads, positions.long()):
        mixed = (mixed * 0x9E3779B1 + part) & 0xFFFFFFFF
        # Multiplications wrap around at 64 bits, and the mask leaves the low 32.
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 16)
    return (mixed >> 8).float() / 2**24
