"""The layer of `WarmStartCache`: all tokens, or the slots that stand for a prompt and all tokens behind it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from hf_kvcaches import compat
from hf_kvcaches.core.attention import LayerView, previous_implementation
from hf_kvcaches.core.growing import append
from hf_kvcaches.core.splicing.layer import SplicedLayer
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.warmstart.summaries.slots import LayerSlots


class WarmLayer(SplicedLayer):
    """Begins, where `take_slots` says so, with slots in place of a prompt's first tokens; `seen` counts the tokens that they stand for."""

    row_tensors: ClassVar[tuple[str, ...]] = (*SplicedLayer.row_tensors, "counts", "places")
    counters: ClassVar[tuple[str, ...]] = (*SplicedLayer.counters, "left_out")

    def __init__(self) -> None:
        super().__init__()
        # (batch, kv_heads, slots): how many tokens each stands for, and where.
        self.counts: torch.Tensor | None = None
        self.places: torch.Tensor | None = None
        # How many more tokens were seen than slots are kept.
        self.left_out = 0

    @property
    def kept(self) -> int:
        return self.seen - self.left_out

    def take_slots(self, slots: LayerSlots, seen: int) -> None:
        """Begins with slots."""
        assert self.seen == 0
        keys, values = slots.keys[None], slots.values[None]
        self.lazy_initialization(keys, values)
        self.key_buffer, self.value_buffer = append(None, keys, 0), append(None, values, 0)
        self.counts, self.places = slots.counts[None].clone(), slots.positions[None].clone()
        self.left_out = seen - keys.shape[2]
        self.seen = seen

    def take_tokens(self, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
        """Goes on with every token.

        Args:
            keys: The buffer, (batch, kv_heads, capacity, head_dim), of which the first `seen` slots count.
        """
        self.key_buffer, self.value_buffer = keys, values
        self.counts = self.places = None
        self.left_out, self.seen = 0, seen

    def exact_states(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        return super().exact_states() if self.counts is None else None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.counts is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self.check_new_tokens(key_states, value_states)
        start, new = self.kept, key_states.shape[2]
        keys, values = append(self.key_buffer, key_states, start), append(self.value_buffer, value_states, start)
        self.key_buffer, self.value_buffer = keys, values
        first = self.seen
        self.seen += new
        view = SlotKeys(self, keys.narrow(2, 0, start + new), values.narrow(2, 0, start + new), first)
        return view, view

    def crop(self, tokens_to_remove: int) -> None:
        removed = -int(tokens_to_remove)
        if self.counts is not None and removed > self.seen - self.left_out - self.counts.shape[2]:
            raise UnsupportedError(
                f"crop: the last {removed} tokens reach into a prompt of which only a summary is kept. Use swap='sync' or 'background', "
                "or reset() the cache."
            )
        super().crop(tokens_to_remove)


class SlotKeys(LayerView):
    """Slots and the tokens behind them, in place of keys and of values.

    Args:
        keys: (batch, kv_heads, slots + tokens, head_dim).
    """

    def __init__(self, layer: WarmLayer, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        self.layer, self.keys, self.values, self.first = layer, keys, values, first

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        implementation = previous_implementation(module.config)
        bias = self._bias(query, mask)
        if implementation != "eager":
            # Straight to PyTorch: transformers' function takes masks to be the same for all heads where there is one query.
            scaling = kwargs.get("scaling")
            groups = query.shape[1] > self.keys.shape[1]
            output = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, bias, scale=scaling, enable_gqa=groups)
            return output.transpose(1, 2).contiguous(), None
        attention = compat.attention_function("eager", module)
        result: tuple[torch.Tensor, torch.Tensor | None] = attention(module, query, self.keys, self.values, bias, **kwargs)
        return result

    def _bias(self, query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """What is added to the scores, (batch, heads, queries, slots + tokens): the logarithms of counts, and what may not be looked at."""
        layer, device = self.layer, query.device
        assert layer.counts is not None
        assert layer.places is not None
        counts, places = layer.counts.to(device), layer.places.to(device)
        batch, heads, slots = counts.shape
        # The columns that the mask has for what is kept: a slot is as visible as the token where it stands.
        behind = layer.left_out + torch.arange(slots, self.keys.shape[2], device=device)
        columns = torch.cat([places.round().long(), behind.expand(batch, heads, -1)], 2)[:, :, None]
        asking = self.first + torch.arange(query.shape[2], device=device)[:, None]
        if mask is None:
            hidden = columns > asking
        else:
            if mask.shape[-1] != self.layer.seen:
                raise ConfigError.of("attention_mask", f"a column for each of the {self.layer.seen} tokens seen", tuple(mask.shape))
            shown = mask.to(device) if mask.dtype == torch.bool else mask.to(device) == 0
            shown = shown.expand(batch, heads, -1, -1).gather(3, columns.clamp_min(0).expand(-1, -1, query.shape[2], -1))
            # Padding before the prompt is in no slot.
            hidden = ~shown
        weights = nn.functional.pad(counts, (0, len(behind)), value=1.0).log()[:, :, None]
        bias = weights.expand(-1, -1, query.shape[2], -1).masked_fill(hidden, torch.finfo(query.dtype).min).to(query.dtype)
        return bias.repeat_interleave(query.shape[1] // heads, 1)
