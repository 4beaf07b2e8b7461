"""Store the keys and values of a prompt, once its first token is out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.reuse.streams import mark, wait_for

# The keys and values of each layer, (batch, kv_heads, capacity, head_dim).
Buffers = Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]


def states_in(buffers: Buffers, row: int, slots: slice) -> list[LayerStates]:
    """Return the states of a row's slots in each layer."""
    pairs = ((keys, values) for keys, values in buffers if keys is not None and values is not None)
    return [LayerStates(keys[row, :, slots].detach(), values[row, :, slots].detach()) for keys, values in pairs]


class NewPrompt(NamedTuple):
    """A prompt to be stored once it is computed.

    Args:
        slots: How many slots each layer has seen when the prompt is computed.
        store: Store the prompt from the layers' buffers; called in the background.
    """

    slots: int
    store: Callable[[Buffers], None]


class Remembering:
    """Stores a cache's prompt when it is computed.

    Args:
        layers: The cache's layers.
        later: Run a job in the background, after earlier jobs.
    """

    def __init__(self, layers: Sequence[SplicedLayer], later: Callable[[Callable[[], None]], None]) -> None:
        self._layers, self._later = layers, later
        self._prompt: NewPrompt | None = None
        # Reentrant: a finalizer may call `release` while this thread holds the lock.
        self._lock = threading.RLock()
        self.reading_until = 0

    def expect(self, prompt: NewPrompt) -> None:
        """Store a prompt as soon as it is computed."""
        with self._lock:
            self._prompt = prompt

    @property
    def waiting(self) -> bool:
        """Whether a prompt still has to be stored."""
        return self._prompt is not None

    def release(self, drop: bool = True) -> None:
        """Hand the prompt to the store, if it is computed.

        Args:
            drop: Whether to give up a prompt that is not computed, since no later pass will. False while another thread may compute it.
        """
        with self._lock:
            prompt = self._prompt
            if prompt is None:
                return
            computed = all(layer.seen >= prompt.slots for layer in self._layers)
            if computed or drop:
                self._prompt = None
            if not computed:
                return
            self.reading_until = prompt.slots
            # New tokens are written behind these slots or into other buffers, so the store reads unchanged slots.
            buffers = [(layer.key_buffer, layer.value_buffer) for layer in self._layers]
        events = mark(tensor for pair in buffers for tensor in pair)

        def store() -> None:
            wait_for(events, (tensor for pair in buffers for tensor in pair))
            prompt.store(buffers)

        self._later(store)
