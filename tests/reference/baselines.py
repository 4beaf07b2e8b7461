"""Pruning as published implementations do it, on whole batches: what EquipCache is timed against.

Decent rather than naive: one concatenation a step, tables of cosines that all layers share, grouped heads without repeated keys.
They take one prompt and then single tokens, without padding. Those that return plain tensors can be built from a config, and then leave
the model's attention as it is.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.layers import TensorLayer
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.view import LayerView
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.slots import slot_attention


class RotaryTable:
    """Cosines and sines by position, shared by all layers of a cache. Plain rotary embeddings that turn the whole head.

    Args:
        config: The model's.
        fused: Rotate in the fewest passes over memory, and not by the formula of the published implementations.
    """

    def __init__(self, config: Any, fused: bool = True) -> None:
        self.fused = fused
        self.geometry = RotaryGeometry.from_config(config, layer_idx=0)
        geometry = self.geometry
        if (geometry.rotary_dim, geometry.layout, geometry.attention_scaling) != (geometry.head_dim, "half", 1.0):
            raise UnsupportedError("The baselines rotate whole heads by halves, without scaling. Time them on a Llama.")
        self.cos = self.sin = torch.empty(0, 0)

    def reserve(self, positions: int, like: torch.Tensor) -> None:
        """Makes the tables reach that far, for keys like the given ones.

        Args:
            positions: How many positions are needed.
            like: For its dtype and device.
        """
        if self.cos.shape[0] < positions or self.cos.dtype != like.dtype or self.cos.device != like.device:
            ahead = torch.arange(max(2 * positions, 4096), device=like.device)
            halves = self.geometry.cos_sin(ahead, like.dtype)
            self.cos, self.sin = (torch.cat([half, half], dim=-1) for half in halves)

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Rotates neighbouring tokens, the first of which stands at `start`.

        Args:
            x: (batch, kv_heads, tokens, head_dim).
            start: Its position.
        """
        cos, sin = self.cos[start : start + x.shape[-2]], self.sin[start : start + x.shape[-2]]
        return _turned(x, cos, sin, 1) if self.fused else x * cos + _rotate_half(x) * sin

    def unrotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Undoes `rotate`.

        Args:
            x: (batch, kv_heads, tokens, head_dim).
            start: The position of the first token.
        """
        cos, sin = self.cos[start : start + x.shape[-2]], self.sin[start : start + x.shape[-2]]
        return _turned(x, cos, sin, -1) if self.fused else x * cos - _rotate_half(x) * sin


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    """x * cos + direction * rotate_half(x) * sin, with no more new memory than the result needs."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., half:], value=-direction)
    out[..., half:].addcmul_(x[..., :half], sin[..., :half], value=direction)
    return out


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class BaselineLayer(TensorLayer):
    """Keys and values of the kept tokens, (batch, kv_heads, kept, head_dim), in order of position.

    Args:
        cache: The cache, with budget, sinks and recent.
    """

    def __init__(self, cache: Baseline) -> None:
        super().__init__()
        self.budget, self.sinks, self.recent = cache.budget, cache.sinks, cache.recent

    @property
    def kept(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Of what update returns: the whole prompt, and later the slots kept.
        slots = min(self.kept + query_length, self.budget) if self.seen else query_length
        return slots, self.seen + query_length - slots

    def check(self, key_states: torch.Tensor) -> int:
        """Counts the new tokens, refuses a second block, and returns how many tokens came before.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim).
        """
        before, tokens = self.seen, key_states.shape[-2]
        if before and tokens > 1:
            raise UnsupportedError("The baselines take one prompt and then single tokens. Use the oracles for later blocks.")
        if not self.is_initialized:
            self.lazy_initialization(key_states, key_states)
        self.seen = before + tokens
        return before


class Baseline(KVCache):
    """The base of the baselines.

    Args:
        model: A transformers model, or its config (then its attention is left alone).
        budget: Tokens to keep.
        sinks: First tokens that always stay.
        recent: Newest tokens that always stay; the method's own number if None.
    """

    layer_class: ClassVar[type[BaselineLayer]]
    fused = True

    def __init__(self, model: Any, *, budget: int, sinks: int = 4, recent: int | None = None) -> None:
        self.budget, self.sinks = budget, sinks
        self.recent = self.default_recent() if recent is None else recent
        if not sinks + max(self.recent, 1) <= budget:
            raise ConfigError.of("budget", f"at least sinks + recent = {sinks + max(self.recent, 1)}", budget)
        self.table: RotaryTable | None = None
        super().__init__(model)

    def default_recent(self) -> int:
        """The method's own number of recent tokens."""
        return self.budget - self.sinks

    def make_layer(self, layer_idx: int) -> BaselineLayer:
        return self.layer_class(self)

    def shared_table(self) -> RotaryTable:
        """The tables of all layers, made when the first layer asks."""
        if self.table is None:
            self.table = RotaryTable(self.config, self.fused)
        return self.table


class ShiftAppendLayer(BaselineLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.check(key_states):
            self.keys, self.values = self._ends(key_states), self._ends(value_states)
            return key_states, value_states
        self.keys, self.values = self._shifted(self.keys, key_states), self._shifted(self.values, value_states)
        return self.keys, self.values

    def _ends(self, states: torch.Tensor) -> torch.Tensor:
        if states.shape[-2] <= self.budget:
            return states
        return torch.cat([states[:, :, : self.sinks], states[:, :, self.sinks - self.budget :]], dim=-2)

    def _shifted(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if held.shape[-2] < self.budget:
            return torch.cat([held, new], dim=-2)
        return torch.cat([held[:, :, : self.sinks], held[:, :, self.sinks + 1 :], new], dim=-2)


class ShiftAppendStreaming(Baseline):
    """StreamingLLM as a concatenation of slices; keys as they come, at original positions."""

    layer_class = ShiftAppendLayer


class RerotateAllLayer(ShiftAppendLayer):
    def __init__(self, cache: Baseline) -> None:
        super().__init__(cache)
        self.table = cache.shared_table()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.seen
        self.table.reserve(start + key_states.shape[-2], key_states)
        super().update(self.table.unrotate(key_states, start), value_states)
        if not start:
            return key_states, value_states
        # The query stands at `start`; counting back from there is the same as counting from 0, and leaves the query as it is.
        return self.table.rotate(self.keys, self.seen - self.kept), self.values


class RerotateAllStreaming(Baseline):
    """StreamingLLM with compact positions: keys kept without rotation, all of them rotated for each query.

    Args:
        model: As in `Baseline`.
        fused: As in `RotaryTable`.
        **settings: As in `Baseline`.
    """

    layer_class = RerotateAllLayer

    def __init__(self, model: Any, *, fused: bool = True, **settings: Any) -> None:
        self.fused = fused
        super().__init__(model, **settings)


class GatherAppendLayer(BaselineLayer):
    """Also holds `scores`, (batch, kv_heads, kept), float32.

    Args:
        cache: The cache; its `table` is None for original positions.
    """

    row_tensors = ("keys", "values", "scores")
    scores: torch.Tensor | None = None

    def __init__(self, cache: GatherAppendH2O) -> None:
        super().__init__(cache)
        self.table = cache.shared_table() if cache.positions == "compact" else None
        self.select = cache.select

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        before = self.check(key_states)
        view = GatherAppendView(self, key_states, value_states)
        fresh = key_states
        if self.table is not None:
            self.table.reserve(self.seen, key_states)
            fresh = self.table.unrotate(key_states, before)
        if not before:
            self.keys, self.values = fresh, value_states
            return view, view
        if self.kept == self.budget:
            self._drop(self.budget - 1, max(self.recent - 1, 0))
        self.keys, self.values = torch.cat([self.keys, fresh], dim=-2), torch.cat([self.values, value_states], dim=-2)
        view.keys = self.keys if self.table is None else self.table.rotate(self.keys, self.seen - self.kept)
        view.values = self.values
        return view, view

    def _drop(self, size: int, recent: int) -> None:
        """Keeps the sinks, the newest tokens, and the heaviest of the rest."""
        last = self.kept - recent
        heavy = self.scores[..., self.sinks : last].topk(size - self.sinks - recent).indices.sort().values + self.sinks
        ends = torch.cat([torch.arange(self.sinks), torch.arange(last, self.kept)]).to(heavy.device).expand(*heavy.shape[:2], -1)
        kept = torch.cat([ends[..., : self.sinks], heavy, ends[..., self.sinks :]], dim=-1)
        if self.select == "mask":
            mask = torch.zeros_like(self.scores, dtype=torch.bool).scatter_(-1, kept, True)
            self.keys, self.values, self.scores = (t[mask].view(*kept.shape, *t.shape[3:]) for t in (self.keys, self.values, self.scores))
        else:
            self.scores = self.scores.gather(-1, kept)
            self.keys, self.values = (t.gather(2, kept[..., None].expand(-1, -1, -1, t.shape[-1])) for t in (self.keys, self.values))

    def observe(self, received: torch.Tensor) -> None:
        """Adds what the queries of this call gave to each token.

        Args:
            received: (batch, kv_heads, kept), float32.
        """
        if self.scores is not None:
            received[..., : self.scores.shape[-1]] += self.scores
        self.scores = received
        if self.kept > self.budget:
            self._drop(self.budget, self.recent)


class GatherAppendView(LayerView):
    """Keys and values for this call's queries, whose probabilities the layer wants to see.

    Args:
        layer: Where the probabilities go.
        keys: (batch, kv_heads, tokens, head_dim), rotated to fit the queries.
        values: Like `keys`.
    """

    rows: ClassVar[int] = 128
    """Queries of a prompt that attend at a time."""

    def __init__(self, layer: GatherAppendLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, heads, queries, dim = query.shape
        kv_heads, tokens = self.keys.shape[1:3]
        received = torch.zeros(batch, kv_heads, tokens, device=query.device)
        outputs = []
        for start in range(0, queries, self.rows):
            some = query[:, :, start : start + self.rows] * kwargs["scaling"]
            grouped = some.reshape(batch, kv_heads, -1, dim)
            scores = grouped @ self.keys.transpose(2, 3)
            if queries > 1:
                seen = torch.arange(tokens, device=query.device) <= torch.arange(start, start + some.shape[2], device=query.device)[:, None]
                scores = scores.masked_fill(~seen.repeat(heads // kv_heads, 1), -torch.inf)
            probabilities = scores.softmax(-1, dtype=torch.float32)
            received += probabilities.sum(2) / (heads // kv_heads)
            outputs.append((probabilities.to(query.dtype) @ self.values).view(batch, heads, some.shape[2], -1))
        self.layer.observe(received)
        return torch.cat(outputs, dim=2).transpose(1, 2), None


class GatherAppendH2O(Baseline):
    """H2O as published: eager attention, summed probabilities; what stays is gathered by a boolean mask, and the new token appended.

    Args:
        model: A transformers model.
        positions: `"compact"` rotates all keys for each query, `"original"` leaves them as they come.
        select: `"mask"`, as published, or `"gather"`, by indices.
        **settings: As in `Baseline`.
    """

    needs_attention = True
    layer_class = GatherAppendLayer

    def __init__(self, model: Any, *, positions: str = "compact", select: str = "mask", **settings: Any) -> None:
        self.positions, self.select = positions, select
        super().__init__(model, **settings)

    def default_recent(self) -> int:
        return max(1, min(self.budget // 2, self.budget - self.sinks))

    def make_layer(self, layer_idx: int) -> GatherAppendLayer:
        return self.layer_class(self)


class KernelView(LayerView):
    """Attention of single tokens by the kernel that `EquipCache` uses.

    Args:
        keys: (batch, kv_heads, slots, head_dim).
        values: Like `keys`.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def attend(self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return slot_attention(query, self.keys, self.values, kwargs["scaling"], backend="torch")[0], None


class FrozenLayer(BaselineLayer):
    def __init__(self, cache: FrozenKV) -> None:
        super().__init__(cache)
        self.dense = cache.dense

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        slots = self.budget if self.seen else query_length
        return slots, max(self.seen + query_length - slots, 0)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.check(key_states):
            times = -(-self.budget // key_states.shape[-2])
            self.keys, self.values = (t.repeat(1, 1, times, 1)[:, :, : self.budget].contiguous() for t in (key_states, value_states))
            return key_states, value_states
        if not self.dense:
            return self.keys, self.values
        view = KernelView(self.keys, self.values)
        return view, view


class FrozenKV(Baseline):
    """No cache work at all: each step attends to the same buffers, filled with the prompt's first tokens (repeated if it is shorter).

    Its text means nothing; its time is that of the forward alone.

    Args:
        model: A transformers model, or its config.
        slots: How many tokens each step attends to.
        dense: Attend with the kernel that `EquipCache` uses instead of by the model's own attention.
    """

    layer_class = FrozenLayer

    def __init__(self, model: Any, *, slots: int, dense: bool = False) -> None:
        self.dense = dense
        super().__init__(model, budget=slots, sinks=0)
