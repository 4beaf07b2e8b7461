"""What models make of prompts, and attention over slots, one number at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches.core.rope import RotaryGeometry
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


def geometries(model: PreTrainedModel) -> list[RotaryGeometry]:
    return [RotaryGeometry.from_config(model.config, layer_idx=layer) for layer in range(model.config.num_hidden_layers)]


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor) -> Prompt:
    """A prompt as a Llama model sees it; `ids` is (tokens,)."""
    projected: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, out: projected.append(out[0, -1])) for layer in model.model.layers
    ]
    cache = DynamicCache()
    try:
        model(ids[None], past_key_values=cache)
    finally:
        for hook in hooks:
            hook.remove()
    keys, values = [layer.keys[0] for layer in cache.layers], [layer.values[0] for layer in cache.layers]
    fresh = [each.view(1, -1, 1, own.shape[-1]) for each, own in zip(projected, keys, strict=True)]
    rotated = [geometry.rotate(each, len(ids) - 1)[0, :, 0] for geometry, each in zip(geometries(model), fresh, strict=True)]
    return Prompt(keys, values, rotated, len(ids))


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


def whole(prompt: Prompt, layer: int, tail: int = 1) -> LayerSlots:
    """Every token before the tail in a slot of its own."""
    keys, values, _, _ = prompt.before(tail)
    ones = torch.ones(keys[layer].shape[:2])
    return LayerSlots(keys[layer], values[layer], torch.arange(ones.shape[1]).float().expand_as(ones), ones)
