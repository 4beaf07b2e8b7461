"""The layer of `SegmentReuseCache`: keeps everything, and lets tokens be written between others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_kvcaches.core.growing import GrowingLayer, append, capacity_for
from hf_kvcaches.core.splicing.sparse import Look, SparseKeys, SparsePass
from hf_kvcaches.errors import ConfigError


class SplicedLayer(GrowingLayer):
    """Keys and values of all tokens, in buffers that pieces of a prompt are spliced into before the rest of it is run."""

    running: SparsePass | None = None
    looks: list[Look] | None = None
    only_stores = False

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
            self.looks.append(Look(key_states))
            return self.looks[-1], self.looks[-1]
        running = self.running
        if running is None:
            held = super().update(key_states, value_states, *args, **kwargs)
            return (Look(key_states), Look(key_states)) if self.only_stores else held
        if key_states.shape[0] != len(running.slots) or key_states.shape[2] != running.slots.shape[1]:
            raise ConfigError(
                f"The cache waits for {tuple(running.slots.shape)} tokens of a prompt, and the model came with "
                f"{(key_states.shape[0], key_states.shape[2])}. A pass broke off: reset() the cache."
            )
        if self.key_buffer is None or self.key_buffer.shape[2] <= running.total:
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
        self.seen = running.total
        keys, values = self.key_buffer.narrow(2, 0, running.total), self.value_buffer.narrow(2, 0, running.total)
        view = Look(key_states) if self.only_stores else SparseKeys(keys, values, running)
        return view, view

    @contextmanager
    def storing(self, running: SparsePass) -> Iterator[None]:
        """While open, the layer stores what comes and answers nothing; after that it waits for the last token of the pass alone.

        Args:
            running: The pass.
        """
        self.only_stores = True
        try:
            yield
        finally:
            self.only_stores = False
        self.running = running.newest()

    @contextmanager
    def look(self) -> Iterator[list[Look]]:
        """While open, a pass writes nothing here; what it computed is collected."""
        self.looks = []
        try:
            yield self.looks
        finally:
            self.looks = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # The real mask of a sparse pass is made from its slots; any size will do for the recipe.
        return (self.running.total, 0) if self.running is not None else super().get_mask_sizes(query_length)

    def reset(self) -> None:
        super().reset()
        self.running = self.looks = None
        self.only_stores = False
