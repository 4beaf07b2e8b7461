"""A growing layer whose tokens can be written in any order."""

from __future__ import annotations

import torch

from hf_kvcaches.core.growing import GrowingLayer, append, capacity_for


class SplicedLayer(GrowingLayer):
    """Keys and values of all tokens, in buffers that stored spans are spliced into before the rest of a prompt is run."""

    def open(self, rows: int, total: int, keys: torch.Tensor, values: torch.Tensor, padding: int | None = None) -> None:
        """Make room for a prompt's tokens, the filler slot behind them, and some new tokens.

        Args:
            keys: Any tensor with the keys' heads (third last dimension), head_dim (last one), dtype and device.
            padding: The slots from here on, but for the prompt's last one, are written before they are read; None: they may not be.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for name, like in (("key_buffer", keys), ("value_buffer", values)):
            missing = total + 1 - self.seen
            if getattr(self, name) is None and not torch.is_grad_enabled():
                buffer = like.new_empty(rows, like.shape[-3], capacity_for(missing), like.shape[-1])
                buffer[:, :, : total if padding is None else padding].zero_()
                buffer[:, :, total - 1 :].zero_()
            else:
                room = like.new_zeros(rows, like.shape[-3], missing, like.shape[-1])
                buffer = append(getattr(self, name), room, self.seen)
            setattr(self, name, buffer)

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, slots: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens into slots and return keys and values of all slots; no token counts as seen.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim), rotated.
            slots: (batch, tokens); `total` for fillers, which no query sees.
        """
        if not all(_has_room(buffer, total) for buffer in (self.key_buffer, self.value_buffer)):
            self.open(len(slots), total, key_states, value_states)
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        slots = slots.to(key_states.device)
        if len(slots) == 1:
            self.key_buffer.index_copy_(2, slots[0], key_states)
            self.value_buffer.index_copy_(2, slots[0], value_states)
        else:
            index = slots[:, None, :, None]
            self.key_buffer.scatter_(2, index.expand_as(key_states), key_states)
            self.value_buffer.scatter_(2, index.expand_as(value_states), value_states)
        return self.key_buffer.narrow(2, 0, total), self.value_buffer.narrow(2, 0, total)


def _has_room(buffer: torch.Tensor | None, total: int) -> bool:
    """Whether a buffer is writable and has room for a prompt's slots and the filler slot."""
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    return buffer is not None and buffer.shape[2] > total and not frozen
