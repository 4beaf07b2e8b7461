"""Passes over tokens that do not follow each other: what stands between them is in the cache already."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.attention import LayerView, previous_implementation
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.chunks import grouped_attention
from hf_kvcaches.core.layer_pass import LayerPass
from hf_kvcaches.core.partial import Masks

# Queries that look at keys together: with fewer the products get slow, with more they look at more keys behind themselves. On a GPU a
# launch takes as long as many products.
_BLOCK, _BLOCK_ON_CPU = 512, 64


class SparsePass:
    """Which tokens a pass runs, and what they may look at.

    A token has a *slot*, its column in the padded prompt and in the layers' buffers, and a *position*, its place in its row. Rows with
    fewer tokens to run than others are filled up with tokens that go to the slot behind the prompt, which nobody looks at.

    Args:
        slots: (batch, tokens), ascending in each row; `total` for those that only fill up.
        padding: (batch,), how many slots at the start of each row hold no token.
    """

    def __init__(self, slots: torch.Tensor, padding: torch.Tensor, total: int) -> None:
        self.slots, self.padding, self.total = slots, padding, total

    @property
    def positions(self) -> torch.Tensor:
        """(batch, tokens)."""
        real = self.slots < self.total
        return torch.where(real, self.slots - self.padding[:, None], 0)

    @cached_property
    def blocks(self) -> list[tuple[int, int, int]]:
        """Consecutive tokens, from and to, and behind the last slot that one of them looks at."""
        size = _BLOCK_ON_CPU if self.slots.device.type == "cpu" else _BLOCK
        bounds = [(start, min(start + size, self.slots.shape[1])) for start in range(0, self.slots.shape[1], size)]
        if len(bounds) == 1:
            return [(*bounds[0], self.total)]
        return [(start, stop, min(int(self.slots[:, stop - 1].max()) + 1, self.total)) for start, stop in bounds]

    def masks(self, model: PreTrainedModel) -> Masks:
        """The masks of a model's layers in this pass."""
        plan = compat.layer_plan(compat.decoder_config(model.config))
        made: dict[Any, torch.Tensor] = {}

        def mask(index: int, hidden: torch.Tensor) -> torch.Tensor:
            kind, arguments = plan[index]
            key = (kind, arguments.get("sliding_window"), hidden.device, hidden.dtype)
            if key not in made:
                visible = self.visible(kind, arguments.get("sliding_window"), hidden.device)
                made[key] = _as_added(visible, hidden.dtype) if _is_eager(model) else visible
            return made[key]

        return mask

    def visible(self, kind: str, window: int | None, device: torch.device) -> torch.Tensor:
        """Which slots each token may look at, (batch, 1, tokens, total).

        Args:
            device: Where it is needed.
        """
        padding = self.padding.to(device)[:, None, None, None]
        asking, asked = self.slots.to(device)[:, None, :, None], torch.arange(self.total, device=device)
        visible = (asked <= asking) & (asked >= padding)
        if kind == "sliding_attention":
            visible = visible & (asked > asking - _size(window))
        elif kind == "chunked_attention":
            visible = visible & ((asked - padding) // _size(window) == (asking - padding) // _size(window))
        else:
            assert kind == "full_attention", kind
        # Tokens that only fill up look at the last slot, because a softmax over nothing is not a number.
        return torch.where(asking >= self.total, asked == self.total - 1, visible)


def _size(window: int | None) -> int:
    assert window is not None
    return window


def _is_eager(model: PreTrainedModel) -> bool:
    return previous_implementation(compat.decoder_config(model.config)) == "eager"


def _as_added(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as eager attention wants it: numbers to be added to scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


class _View(LayerView):
    """In the place of keys and of values."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a view of keys and values has no attribute {name!r}: it is for the attention function alone")


class Look(_View):
    """Takes what a layer computed for some tokens, its queries too; what the layer makes of its answer is of no use.

    Args:
        keys: (batch, kv_heads, tokens, head_dim), fresh and rotated.
    """

    def __init__(self, keys: torch.Tensor, value_dim: int) -> None:
        self.fresh, self._value_dim = keys, value_dim
        self.query: torch.Tensor | None = None

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.query = query
        batch, heads, tokens, _ = query.shape
        return query.new_zeros(batch, tokens, heads, self._value_dim), None


class _BlockedView(_View):
    """Keys and values of all slots, of which each block of queries is shown those up to its last slot.

    Args:
        keys: (batch, kv_heads, total, head_dim).
    """

    def __init__(self, running: SparsePass, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.running, self.keys, self.values = running, keys, values

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        outputs = []
        for start, stop, end in self.running.blocks:
            keys, values = self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)
            outputs.append(grouped_attention(module, query[:, :, start:stop], keys, values, mask[..., start:stop, :end], **kwargs))
        return torch.cat(outputs, 1), None


class SplicingPass(LayerPass):
    """Writes a sparse pass's tokens into their slots."""

    def __init__(self, cache: KVCache, running: SparsePass, start: int) -> None:
        super().__init__(cache, start)
        self.running = running

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        states = self.layers[layer_idx].write(key_states, value_states, self.running.slots, self.running.total)
        if len(self.running.blocks) == 1:
            return states
        view = _BlockedView(self.running, *states)
        self.cache.answer_next()
        return view, view

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # The mask is made from slots; any size will do for the one that the model makes.
        return self.running.total, 0


class LookingPass(SplicingPass):
    """Writes nothing, and keeps what the layer computed in `look`."""

    look: Look | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.look = Look(key_states, value_states.shape[-1])
        self.cache.answer_next()
        return self.look, self.look
