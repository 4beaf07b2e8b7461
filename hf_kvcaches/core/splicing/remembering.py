"""Storing what a prompt computed, once its first token is out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_kvcaches.core.splicing.layer import SplicedLayer
from hf_kvcaches.core.splicing.streams import mark, wait_for

# The keys and values of each layer, (batch, kv_heads, capacity, head_dim).
Buffers = Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]


class NewPrompt(NamedTuple):
    """A prompt that is to be stored.

    Args:
        slots: How many slots of every layer are filled when it is computed.
        store: Stores it from the layers' buffers; called in the background.
    """

    slots: int
    store: Callable[[Buffers], None]


class Remembering:
    """Stores a cache's prompt when it is computed.

    Args:
        layers: Of the cache, in which prompts are computed.
        later: Runs a job in the background, after earlier ones.
    """

    def __init__(self, layers: Sequence[SplicedLayer], later: Callable[[Callable[[], None]], None]) -> None:
        self._layers, self._later = layers, later
        self._prompt: NewPrompt | None = None
        # A finalizer may run at any moment, also in the middle of this thread's work here.
        self._lock = threading.RLock()
        self.reading_until = 0

    def expect(self, prompt: NewPrompt) -> None:
        """Stores a prompt as soon as it is computed."""
        with self._lock:
            self._prompt = prompt

    @property
    def waiting(self) -> bool:
        """Whether a prompt is still to be stored."""
        return self._prompt is not None

    def release(self, drop: bool = True) -> None:
        """Hands the prompt to the store, if it is computed.

        Args:
            drop: Whether to give it up if it is not: a pass failed, or takes another way. False while another thread may compute it.
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
            # New tokens are written behind these slots, or into other buffers: what is read here stays as it is.
            buffers = [(layer.key_buffer, layer.value_buffer) for layer in self._layers]
        filled = mark(tensor for pair in buffers for tensor in pair)

        def store() -> None:
            wait_for(filled, (tensor for pair in buffers for tensor in pair))
            prompt.store(buffers)

        self._later(store)
