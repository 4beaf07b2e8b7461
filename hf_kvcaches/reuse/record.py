"""Hand the keys and values of a prompt to a store's queue, once its first token is out.

On a GPU they are copied to pinned memory on a stream of their own, behind an event of the model's; no decode step, and no later request,
waits for them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.reuse.store import Queue

Event = tuple[torch.device, torch.cuda.Event]  # behind work that was queued on a device


class PromptStates(NamedTuple):
    """Keys and values of a prompt in each layer, (batch, kv_heads, slots, head_dim), from slot `first` on."""

    first: int
    layers: Sequence[Sequence[torch.Tensor]]

    def of(self, row: int, start: int, stop: int) -> list[LayerStates]:
        """Return the states of some slots of a row."""
        slots = slice(start - self.first, stop - self.first)
        return [LayerStates(keys[row, :, slots].detach(), values[row, :, slots].detach()) for keys, values in self.layers]


class Recorder:
    """Hands the prompts of one cache to a queue when they are computed."""

    def __init__(self, layers: Sequence[SplicedLayer], queue: Queue) -> None:
        self._layers, self._queue = layers, queue
        # What is stored once it is computed: how many slots each layer has seen then, the first slot that is stored, and what stores it.
        self.prompt: tuple[int, int, Callable[[PromptStates], None]] | None = None
        self._lock = threading.RLock()  # reentrant: a finalizer may call `release` while this thread holds it
        self._reading_until, self._copied = 0, list[Event]()

    def expect(self, slots: int, first: int, store: Callable[[PromptStates], None]) -> None:
        """Store a prompt of so many slots, from a slot on, as soon as it is computed; `store` is called in the background."""
        with self._lock:
            self.prompt = slots, first, store

    def release(self, drop: bool = True) -> None:
        """Hand the prompt to the queue, if it is computed. Else `drop` it, unless another thread may be computing it; nobody waits."""
        with self._lock:
            if self.prompt is None:
                return
            slots, first, store = self.prompt
            computed = all(layer.seen >= slots for layer in self._layers)
            if computed or drop:
                self.prompt = None
            layers = [layer.buffers for layer in self._layers] if computed else []
        size = sum(buffer.nbytes // buffer.shape[2] for buffers in layers for buffer in buffers) * (slots - first)
        if not size or not all(layers) or not self._queue.has_room(size):
            return
        # On a CPU, buffers are read as they are: new tokens come behind them.
        states, events, copied = PromptStates(0, layers), mark(itertools.chain(*layers)), list[Event]()
        if events:
            with own_stream(events), torch.no_grad():
                states = PromptStates(first, [[_pinned(buffer, first, slots) for buffer in pair] for pair in layers])
                copied = mark(itertools.chain(*layers))
        self._reading_until, self._copied = slots, copied

        def job() -> None:
            for _, event in copied:
                event.synchronize()
            store(states)

        self._queue.add(job, size)

    def protect(self, seen: int) -> None:
        """Before slots from `seen` on are overwritten: give the layers buffers of their own where a job may be reading these slots."""
        if seen >= self._reading_until:
            return
        wait_for(self._copied)
        if not self._copied and not self._queue.idle:
            for layer in self._layers:
                if layer.buffers:
                    layer.replace_buffers(torch.Tensor.clone)
        self._reading_until = 0


def _pinned(buffer: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Begin to copy slots of a GPU's buffer to pinned memory."""
    states = buffer[:, :, first:stop]
    if not buffer.is_cuda:
        return states
    buffer.record_stream(torch.cuda.current_stream(buffer.device))
    return torch.empty(states.shape, dtype=states.dtype, pin_memory=True).copy_(states, non_blocking=True)


def mark(tensors: Iterable[torch.Tensor | None]) -> list[Event]:
    """Record events behind the work that this thread has queued on the devices of some tensors, for another thread to wait for."""
    devices = {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}
    return [(device, torch.cuda.current_stream(device).record_event()) for device in devices]


def wait_for(events: Iterable[Event], tensors: Iterable[torch.Tensor | None] = ()) -> None:
    """Make this thread's streams, not the CPU, wait for events; from now on it uses these tensors of the thread that recorded them."""
    for device, event in events:
        torch.cuda.current_stream(device).wait_event(event)
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextlib.contextmanager
def own_stream(events: Iterable[Event]) -> Iterator[None]:
    """Switch to a new stream on each device of some events, behind these; other devices keep their streams."""
    with contextlib.ExitStack() as stack:
        for device, event in events:
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            stack.enter_context(torch.cuda.stream(stream))
        yield
