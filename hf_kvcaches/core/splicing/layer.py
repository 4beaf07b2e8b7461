"""The layer of caches that are filled from anywhere: keeps everything, and lets tokens be written between others."""

from __future__ import annotations

import torch

from hf_kvcaches.core.growing import GrowingLayer, append, capacity_for


class SplicedLayer(GrowingLayer):
    """Keys and values of all tokens, in buffers that pieces of a prompt are spliced into before the rest of it is run."""

    def open(self, rows: int, total: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes room for a prompt's tokens, one more, and some to come.

        Args:
            keys: Any tensor whose heads (third last) and head_dim (last dimension), type and device are those of keys.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for name, like in (("key_buffer", keys), ("value_buffer", values)):
            missing = total + 1 - self.seen
            if getattr(self, name) is None and not torch.is_grad_enabled():
                buffer = like.new_zeros(rows, like.shape[-3], capacity_for(missing), like.shape[-1])
            else:
                room = like.new_zeros(rows, like.shape[-3], missing, like.shape[-1])
                buffer = append(getattr(self, name), room, self.seen)
            setattr(self, name, buffer)

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, slots: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes tokens into slots, and returns keys and values of all slots; none counts as seen.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim), rotated.
            slots: (batch, tokens); `total` for tokens that nobody looks at.
        """
        if not all(_takes(buffer, total) for buffer in (self.key_buffer, self.value_buffer)):
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


def _takes(buffer: torch.Tensor | None, total: int) -> bool:
    """Whether a buffer has room for a prompt's slots and the one behind, and may be written to."""
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    return buffer is not None and buffer.shape[2] > total and not frozen
