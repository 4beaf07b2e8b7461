"""Tokens by lot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy, check_count, put_score
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class RandomPolicy(Policy):
    """Keeps tokens by lot: what any other policy has to beat.

    A first block draws as kvpress' RandomPress does, alike in each layer and row; later lots depend on seed, head and position only.

    Args:
        seed: Not negative.
    """

    name = "random"
    directions = False
    mixes_heads = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self, "seed", 0)

    def score(self, tokens: Tokens) -> torch.Tensor:
        index = tokens.row_index().expand(tokens.keys.shape[:3])
        if tokens.scores is None and tokens.seen == tokens.keys.shape[2]:
            return torch.stack([self._draw(tokens.keys, row) for row in index])
        drawn = lots(index, self.seed)
        return drawn if tokens.scores is None else torch.where(tokens.scores.isnan(), drawn, tokens.scores)

    def _draw(self, keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """One row's lots, (kv_heads, slots), given the tokens' places in it."""
        generator = torch.Generator(keys.device).manual_seed(self.seed)
        drawn = torch.rand((1, index.shape[0], max(1, int(index.max()) + 1)), generator=generator, device=keys.device, dtype=keys.dtype)
        return drawn[0].float().gather(-1, index.clamp(min=0).long())

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        slots = slots.expand(*scores.shape[:-1], 1)
        return put_score(scores, slots, lots(tokens.row_index().expand_as(scores).gather(-1, slots), self.seed))


def lots(positions: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers in [0, 1) that look random and depend on seed, head and position only, (batch, kv_heads, slots).

    Args:
        positions: (batch, kv_heads, slots).
    """
    heads = torch.arange(positions.shape[1], device=positions.device)[None, :, None]
    mixed = torch.full_like(heads, seed % 2**31)
    for part in (heads, positions.long()):
        mixed = (mixed * 0x9E3779B1 + part) & 0xFFFFFFFF
        # Multiplications wrap around at 64 bits, and the mask leaves what counts.
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 16)
    return (mixed >> 8).float() / 2**24
