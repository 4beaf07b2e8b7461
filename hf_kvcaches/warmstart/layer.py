"""The layer of `WarmStartCache`: all tokens, or slots that summarise a prompt and all tokens behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from hf_kvcaches import compat
from hf_kvcaches.core.layers import append
from hf_kvcaches.core.view import LayerView, previous_implementation
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.warmstart.summaries.slots import LayerSlots


class WarmLayer(SplicedLayer):
    """A layer that begins, after `take_slots`, with slots in place of a prompt's first tokens; `seen` counts the replaced tokens."""

    row_tensors: ClassVar[tuple[str, ...]] = (*SplicedLayer.row_tensors, "counts", "places")
    counters: ClassVar[tuple[str, ...]] = (*SplicedLayer.counters, "left_out")

    def __init__(self) -> None:
        super().__init__()
        # (batch, kv_heads, slots): how many tokens each slot stands for, and its column in the mask.
        self.counts: torch.Tensor | None = None
        self.places: torch.Tensor | None = None
        # Tokens seen less slots kept.
        self.left_out = 0

    @property
    def kept(self) -> int:
        return super().kept - self.left_out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # The mask of slots has a column for each token.
        return super().get_mask_sizes(query_length) if self.counts is None else (self.seen + query_length, 0)

    def take_slots(self, slots: LayerSlots | Sequence[LayerSlots], seen: int) -> None:
        """Begin with the slots of each row, which stand for `seen` tokens."""
        assert self.seen == 0
        rows = [slots] if isinstance(slots, LayerSlots) else slots
        keys, values, places, counts = (torch.stack(parts) for parts in zip(*rows, strict=True))
        self.lazy_initialization(keys, values)
        self.key_buffer, self.value_buffer = append(None, keys, 0), append(None, values, 0)
        self.counts, self.places = counts, places
        self.left_out = seen - keys.shape[2]
        self.seen = seen

    def take_tokens(self, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
        """Replace the content by all tokens, in buffers (batch, kv_heads, capacity, head_dim) whose first `seen` slots are filled."""
        self.key_buffer, self.value_buffer = keys, values
        self.counts = self.places = None
        self.left_out, self.seen, self.dropped, self.offset = 0, seen, 0, 0

    def drop_unseen(self) -> None:
        if self.counts is None:
            super().drop_unseen()

    def exact_states(self, window: bool = False) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        return super().exact_states(window) if self.counts is None else None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.counts is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self.check_new_tokens(key_states, value_states)
        first, start = self.seen, self.kept
        self.key_buffer, self.value_buffer = append(self.key_buffer, key_states, start), append(self.value_buffer, value_states, start)
        self.seen += key_states.shape[2]
        view = SlotKeys(self, self.key_buffer.narrow(2, 0, self.kept), self.value_buffer.narrow(2, 0, self.kept), first)
        return view, view

    def crop(self, tokens_to_remove: int) -> None:
        removed = -int(tokens_to_remove)
        if self.counts is not None and removed > self.kept - self.counts.shape[2]:
            raise UnsupportedError(
                f"crop: the last {removed} tokens reach into a prompt of which only a summary is kept. Use swap='sync' or 'background', "
                "or reset() the cache."
            )
        super().crop(tokens_to_remove)


class SlotKeys(LayerView):
    """Slots and the tokens behind them, (batch, kv_heads, slots + tokens, head_dim), in place of keys and of values."""

    def __init__(self, layer: WarmLayer, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        self.layer, self.keys, self.values, self.first = layer, keys, values, first

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = self._bias(query, mask)
        if previous_implementation(module.config) == "eager":
            attention = compat.attention_function("eager", module)
            result: tuple[torch.Tensor, torch.Tensor | None] = attention(module, query, self.keys, self.values, bias, **kwargs)
            return result
        # Not transformers' function, which assumes with one query that the mask is the same for all heads.
        scaling, groups = kwargs.get("scaling"), query.shape[1] > self.keys.shape[1]
        output = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, bias, scale=scaling, enable_gqa=groups)
        return output.transpose(1, 2).contiguous(), None

    def _bias(self, query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the bias on the logits, (batch, heads, queries, slots + tokens): the logarithms of counts, and the mask."""
        layer, device = self.layer, query.device
        assert layer.counts is not None
        assert layer.places is not None
        counts, places = layer.counts.to(device), layer.places.to(device)
        batch, heads, slots = counts.shape
        # A slot is as visible as the token at its position.
        behind = layer.left_out + torch.arange(slots, self.keys.shape[2], device=device)
        columns = torch.cat([places.round().long(), behind.expand(batch, heads, -1)], 2)[:, :, None]
        if mask is None:
            hidden = columns > self.first + torch.arange(query.shape[2], device=device)[:, None]
        else:
            if mask.shape[-1] != layer.seen:
                raise ConfigError.of("attention_mask", f"a column for each of the {layer.seen} tokens seen", tuple(mask.shape))
            visible = mask.to(device) if mask.dtype == torch.bool else mask.to(device) == 0
            # Padding before the prompt is in no slot.
            index = columns.clamp_min(0).expand(-1, -1, query.shape[2], -1)
            hidden = ~visible.expand(batch, heads, -1, -1).gather(3, index)
        weights = nn.functional.pad(counts, (0, len(behind)), value=1.0).log()[:, :, None]
        bias = weights.expand(-1, -1, query.shape[2], -1).masked_fill(hidden, torch.finfo(query.dtype).min).to(query.dtype)
        return bias.repeat_interleave(query.shape[1] // heads, 1)
