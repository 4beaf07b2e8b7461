"""What models make of prompts, and attention over slots, one number at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hf_kvcaches.warmstart.paper.slots import LayerSlots


class Prompt(NamedTuple):
    """Rotated keys and values of all tokens, and the last one's rotated query, for each layer."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query: list[torch.Tensor]
    length: int

    def before(self, tail: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], int]:
        """The arguments of `summary` where the last `tail` tokens are run again."""
        keys, values = ([each[:, : self.length - tail] for each in side] for side in (self.keys, self.values))
        return keys, values, [each * each.shape[-1] ** -0.5 for each in self.query], self.length


def made_up(kv_heads: int, group: int, tokens: int, dim: int, layers: int = 1, seed: int = 0) -> Prompt:
    """Keys, values and queries of no model; `tokens` of them, the last one included."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, rows: int) -> list[torch.Tensor]:
        return [torch.randn(heads, rows, dim, generator=generator) for _ in range(layers)]

    return Prompt(draw(kv_heads, tokens), draw(kv_heads, tokens), [own[:, 0] for own in draw(kv_heads * group, 1)], tokens)


def attend(slots: LayerSlots, query: torch.Tensor, scaling: float | None = None) -> torch.Tensor:
    """The output of attention of each query head over slots alone, (heads, value_dim), in float64, head by head."""
    scaling = slots.keys.shape[-1] ** -0.5 if scaling is None else scaling
    group = query.shape[0] // slots.keys.shape[0]
    rows = []
    for head, own in enumerate(query.double()):
        keys, values, counts = (part[head // group].double() for part in (slots.keys, slots.values, slots.counts))
        weights = [math.exp(float(key @ own) * scaling) * float(count) for key, count in zip(keys, counts, strict=True)]
        rows.append(sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights))
    return torch.stack(rows)
