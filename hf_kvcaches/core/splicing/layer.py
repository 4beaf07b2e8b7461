"""The layer of caches that are filled from anywhere: keeps everything, and lets tokens be written between others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_kvcaches.core.growing import GrowingLayer, append, capacity_for
from hf_kvcaches.core.splicing.sparse import Look, SparsePass


class SplicedLayer(GrowingLayer):
    """Keys and values of all tokens, in buffers that pieces of a prompt are spliced into before the rest of it is run."""

    running: SparsePass | None = None
    looks: list[Look] | None = None

    def open(self, rows: int, total: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes room for a prompt's tokens, one more, and some to come.

        Args:
            rows: The batch.
            total: Slots that the prompt will have in all.
            keys: Any tensor whose heads (third last) and head_dim (last dimension), type and device are those of keys.
            values: Likewise.
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

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Writes the tokens where the running pass says, or behind all others, and returns what there is to attend to.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim), rotated.
            value_states: Like `key_states`.
            *args: Ignored.
            **kwargs: Ignored.
        """
        if self.looks is not None:
            self.looks.append(Look(key_states, value_states.shape[-1]))
            return self.looks[-1], self.looks[-1]
        running = self.running
        if running is None:
            return super().update(key_states, value_states, *args, **kwargs)
        if not all(_takes(buffer, running.total) for buffer in (self.key_buffer, self.value_buffer)):
            self.open(len(running.slots), running.total, key_states, value_states)
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        where = running.slots.to(key_states.device)
        if len(where) == 1:
            self.key_buffer.index_copy_(2, where[0], key_states)
            self.value_buffer.index_copy_(2, where[0], value_states)
        else:
            index = where[:, None, :, None]
            self.key_buffer.scatter_(2, index.expand_as(key_states), key_states)
            self.value_buffer.scatter_(2, index.expand_as(value_states), value_states)
        return self.key_buffer.narrow(2, 0, running.total), self.value_buffer.narrow(2, 0, running.total)

    @contextmanager
    def look(self) -> Iterator[list[Look]]:
        """While open, a pass writes nothing here; what it computed is collected."""
        self.looks = []
        try:
            yield self.looks
        finally:
            self.looks = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # The mask of a sparse pass is made from its slots; any size will do for the one that the model makes.
        return (self.running.total, 0) if self.running is not None else super().get_mask_sizes(query_length)

    def reset(self) -> None:
        super().reset()
        self.running = self.looks = None


def _takes(buffer: torch.Tensor | None, total: int) -> bool:
    """Whether a buffer has room for a prompt's slots and the one behind, and may be written to."""
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    return buffer is not None and buffer.shape[2] > total and not frozen
