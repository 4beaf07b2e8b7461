"""Pruned caches as they are published, and caches that do no work: what `EquipCache` is timed against.

Decent rather than naive: one concatenation a step, tables of cosines that all layers share, grouped heads without repeated keys. They take
one prompt and then single tokens, without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer

GATHER_ATTENTION = "bench_gather"
QUERY_BLOCK = 128  # queries of a prompt whose probabilities are computed at a time
States = tuple[torch.Tensor, torch.Tensor]


class Rotation:
    """Rotations of a Llama's keys at the first positions, shared by all layers; `fused`: in the fewest passes over memory."""

    def __init__(self, model: Any, positions: int, fused: bool = True) -> None:
        ids = torch.arange(positions, device=model.device)[None]
        self.cos, self.sin = (table[0] for table in model.model.rotary_emb(model.model.embed_tokens.weight, ids))
        self.fused = fused

    def rotate(self, keys: torch.Tensor, start: int, direction: int = 1) -> torch.Tensor:
        """Rotate keys, (batch, kv_heads, tokens, head_dim), at the positions from `start` on, or undo that with a direction of -1."""
        cos, sin = (table[start : start + keys.shape[2]] for table in (self.cos, self.sin))
        half = keys.shape[-1] // 2
        if not self.fused:
            swapped = torch.cat([-keys[..., half:], keys[..., :half]], -1)
            return keys * cos + swapped * (direction * sin)
        rotated = keys * cos
        rotated[..., :half].addcmul_(keys[..., half:], sin[:, half:], value=-direction)
        rotated[..., half:].addcmul_(keys[..., :half], sin[:, :half], value=direction)
        return rotated


class ShiftAppendLayer(DynamicLayer):
    """StreamingLLM as a concatenation of slices: sinks and a window, keys at their original positions."""

    def __init__(self, budget: int, sinks: int) -> None:
        super().__init__()
        self.budget, self.sinks, self.seen = budget, sinks, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        slots = min(self.keys.shape[2] + query_length, self.budget) if self.seen else query_length
        return slots, self.seen + query_length - slots

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.seen = self.seen, self.seen + key_states.shape[2]
        if not start:
            self.keys, self.values = (self._ends(states) for states in (key_states, value_states))
            return key_states, value_states
        self.keys, self.values = self._shifted(self.keys, key_states), self._shifted(self.values, value_states)
        return self.keys, self.values

    def _ends(self, states: torch.Tensor) -> torch.Tensor:
        return (
            states
            if states.shape[2] <= self.budget
            else torch.cat([states[:, :, : self.sinks], states[:, :, self.sinks - self.budget :]], 2)
        )

    def _shifted(self, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if kept.shape[2] < self.budget:
            return torch.cat([kept, new], 2)
        return torch.cat([kept[:, :, : self.sinks], kept[:, :, self.sinks + 1 :], new], 2)


class RerotateAllLayer(ShiftAppendLayer):
    """StreamingLLM with compact positions: keys are kept without rotation, and all of them rotated for each query."""

    def __init__(self, budget: int, sinks: int, rotation: Rotation) -> None:
        super().__init__(budget, sinks)
        self.rotation = rotation

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        start = self.seen
        super().update(self.rotation.rotate(key_states, start, -1), value_states)
        # The query is at `start`: counted back from there, relative positions are the compact ones.
        return (self.rotation.rotate(self.keys, self.seen - self.keys.shape[2]), self.values) if start else (key_states, value_states)


class GatherAppendLayer(ShiftAppendLayer):
    """H2O as published: summed probabilities; what stays is gathered by a boolean mask, and the new token appended.

    Attributes:
        current: The layer that was updated last, whose attention is computed next.
        scores: Probabilities that each slot received, (batch, kv_heads, slots), float32.
    """

    current: GatherAppendLayer | None = None
    scores: torch.Tensor | None = None

    def __init__(self, budget: int, sinks: int, rotation: Rotation | None) -> None:
        super().__init__(budget, sinks)
        self.rotation, self.recent = rotation, max(1, min(budget // 2, budget - sinks))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        GatherAppendLayer.current = self
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.seen = self.seen, self.seen + key_states.shape[2]
        new_keys = key_states if self.rotation is None else self.rotation.rotate(key_states, start, -1)
        if not start:
            self.keys, self.values = new_keys, value_states
            return key_states, value_states
        if self.keys.shape[2] == self.budget:
            self._evict(self.budget - 1, max(self.recent - 1, 0))
        self.keys, self.values = torch.cat([self.keys, new_keys], 2), torch.cat([self.values, value_states], 2)
        first = self.seen - self.keys.shape[2]
        return (self.keys if self.rotation is None else self.rotation.rotate(self.keys, first)), self.values

    def observe(self, received: torch.Tensor) -> None:
        """Add the probabilities of a call's queries, (batch, kv_heads, slots)."""
        if self.scores is not None:
            received[..., : self.scores.shape[-1]] += self.scores
        self.scores = received
        if self.keys.shape[2] > self.budget:
            self._evict(self.budget, self.recent)

    def _evict(self, size: int, recent: int) -> None:
        """Keep the sinks, the newest tokens, and the heaviest of the rest."""
        assert self.scores is not None
        kept, last = torch.ones_like(self.scores, dtype=torch.bool), self.keys.shape[2] - recent
        heavy = self.scores[..., self.sinks : last].topk(size - self.sinks - recent).indices
        kept[..., self.sinks : last] = False
        kept.scatter_(-1, heavy + self.sinks, True)
        shape = (*kept.shape[:2], size)
        self.keys, self.values, self.scores = (t[kept].view(*shape, *t.shape[3:]) for t in (self.keys, self.values, self.scores))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.scores = self.scores.repeat_interleave(repeats, 0)


class FrozenLayer(ShiftAppendLayer):
    """No work at all: each step attends to the prompt's first tokens, repeated if it is shorter. The text means nothing."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        if self.seen:
            self.seen += key_states.shape[2]
            return self.keys, self.values
        self.lazy_initialization(key_states, value_states)
        self.seen, times = key_states.shape[2], -(-self.budget // key_states.shape[2])
        self.keys, self.values = (t.repeat(1, 1, times, 1)[:, :, : self.budget].contiguous() for t in (key_states, value_states))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        slots = self.budget if self.seen else query_length
        return slots, max(self.seen + query_length - slots, 0)


def cache_of(model: Any, make_layer: Callable[[], DynamicLayer]) -> Cache:
    return Cache(layers=[make_layer() for _ in range(model.config.num_hidden_layers)])


def _gather_attention(module: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Any, **options: Any) -> Any:
    """Attention that hands its probabilities to the layer that was updated last."""
    (batch, heads, queries, dim), (kv_heads, tokens) = query.shape, keys.shape[1:3]
    received, outputs = torch.zeros(batch, kv_heads, tokens, device=query.device), []
    positions = torch.arange(tokens, device=query.device)
    for start in range(0, queries, QUERY_BLOCK):
        block = query[:, :, start : start + QUERY_BLOCK] * options["scaling"]
        scores = block.reshape(batch, kv_heads, -1, dim) @ keys.mT
        if queries > 1:
            visible = positions <= positions[start : start + block.shape[2], None]
            scores = scores.masked_fill(~visible.repeat(heads // kv_heads, 1), -torch.inf)
        probabilities = scores.softmax(-1, dtype=torch.float32)
        received += probabilities.sum(2) / (heads // kv_heads)
        outputs.append((probabilities.to(query.dtype) @ values).view(batch, heads, block.shape[2], -1))
    assert GatherAppendLayer.current is not None
    GatherAppendLayer.current.observe(received)
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register(GATHER_ATTENTION, _gather_attention)
