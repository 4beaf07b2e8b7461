"""Store the keys and values of a prompt in the background, once its first token is out.

On a GPU a prompt's states are copied to pinned memory on a stream of their own, behind an event of the model's; no decode step, and no
later request, waits for them. The queue is bounded: where it is full, a prompt is not stored, and the report counts it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.layout import LayerStates

# Bytes of prompts that may wait to be stored; one alone may be larger.
MOST = 2**31
# A request waits for what earlier ones store, as it may reuse it, if that is at most so many bytes, and for at most so many seconds.
SMALL, PATIENCE = 2**25, 0.5

# Work that was queued on a device.
Event = tuple[torch.device, torch.cuda.Event]


class PromptStates(NamedTuple):
    """The states of a prompt in each layer.

    Args:
        first: The slot of the first token in `layers`.
        layers: Keys and values, (batch, kv_heads, slots, head_dim).
    """

    first: int
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def of(self, row: int, start: int, stop: int) -> list[LayerStates]:
        """Return the states of some slots of a row."""
        slots = slice(start - self.first, stop - self.first)
        return [LayerStates(keys[row, :, slots].detach(), values[row, :, slots].detach()) for keys, values in self.layers]


class NewPrompt(NamedTuple):
    """A prompt to be stored once it is computed.

    Args:
        slots: How many slots each layer has seen when the prompt is computed.
        first: The first slot that is stored.
        store: Stores the prompt from its states; called in the background.
    """

    slots: int
    first: int
    store: Callable[[PromptStates], None]


class Recorder:
    """Hands the prompts of one cache to a queue when they are computed.

    Args:
        layers: The cache's layers.

    Attributes:
        prompt: What is stored as soon as it is computed, or None.
    """

    def __init__(self, layers: Sequence[SplicedLayer], queue: Queue) -> None:
        self._layers, self._queue = layers, queue
        self.prompt: NewPrompt | None = None
        # Reentrant: a finalizer may call `release` while this thread holds the lock.
        self._lock = threading.RLock()
        self._reading_until = 0
        self._copied: list[tuple[torch.device, torch.cuda.Event]] = []

    def expect(self, prompt: NewPrompt) -> None:
        """Store a prompt as soon as it is computed."""
        with self._lock:
            self.prompt = prompt

    def release(self, drop: bool = True) -> None:
        """Hand the prompt to the queue, if it is computed; it is not waited for.

        Args:
            drop: Whether to give up a prompt that is not computed, since no later pass will. False while another thread may compute it.
        """
        with self._lock:
            prompt = self.prompt
            if prompt is None:
                return
            computed = all(layer.seen >= prompt.slots for layer in self._layers)
            if computed or drop:
                self.prompt = None
            if not computed:
                return
            buffers = [(layer.key_buffer, layer.value_buffer) for layer in self._layers]
        pairs = [(keys, values) for keys, values in buffers if keys is not None and values is not None]
        size = sum(each.nbytes // each.shape[2] for pair in pairs for each in pair) * (prompt.slots - prompt.first)
        if len(pairs) == len(buffers) and self._queue.has_room(size):
            states, copied = _copied(pairs, prompt.first, prompt.slots)
            self._reading_until, self._copied = prompt.slots, copied

            def store() -> None:
                for _, event in copied:
                    event.synchronize()
                prompt.store(states)

            self._queue.add(store, size)

    def protect(self, layers: Iterable[SplicedLayer], seen: int) -> None:
        """Before slots from `seen` on are overwritten: give the layers buffers of their own where a job may be reading these slots."""
        if seen >= self._reading_until:
            return
        for device, event in self._copied:
            torch.cuda.current_stream(device).wait_event(event)
        if not self._copied and not self._queue.idle:
            for layer in layers:
                layer.own_buffers()
        self._reading_until = 0


def _copied(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], first: int, stop: int) -> tuple[PromptStates, list[Any]]:
    """Begin to copy slots of a GPU's buffers to pinned memory; buffers on a CPU are read as they are, as new tokens come behind them."""
    events = mark(tensor for pair in pairs for tensor in pair)
    if not events:
        return PromptStates(0, pairs), []
    with own_stream(events), torch.no_grad():
        copies = [(_pinned(keys, first, stop), _pinned(values, first, stop)) for keys, values in pairs]
        return PromptStates(first, copies), mark(tensor for pair in pairs for tensor in pair)


def _pinned(buffer: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    states = buffer[:, :, first:stop]
    if not buffer.is_cuda:
        return states
    buffer.record_stream(torch.cuda.current_stream(buffer.device))
    return torch.empty(states.shape, dtype=states.dtype, pin_memory=True).copy_(states, non_blocking=True)


class Queue:
    """Jobs that run in order, one at a time, in short-lived threads or in the thread that waits for all.

    A `ThreadPoolExecutor` does not do: the garbage collector may add a job during another `add`, where `submit` would wait for a lock that
    its own thread holds; and its threads end with the executor, while these end with their jobs, before the interpreter does.

    Args:
        warn: Called with a sentence when a job fails.

    Attributes:
        dropped: How many prompts were not stored because the queue was full.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._jobs = warn, deque[tuple[Callable[[], None], int]]()
        self._running, self._bytes, self._process = threading.RLock(), 0, os.getpid()
        self._recorders: tuple[weakref.ref[Recorder], ...] = ()
        self._lock = threading.RLock()  # reentrant: a finalizer may add a job or a cache
        self.dropped = 0
        weakref.finalize(self, _finish, weakref.ref(self))

    def watch(self, recorder: Recorder) -> None:
        """Make `flush` and `settle` store the computed prompt of a cache, too; the cache is not kept alive."""
        with self._lock:
            # Replaced as a whole: another thread may be reading them.
            self._recorders = (*(each for each in self._recorders if each() is not None), weakref.ref(recorder))

    @property
    def idle(self) -> bool:
        """Whether no job waits or runs."""
        return self._bytes == 0

    def has_room(self, size: int) -> bool:
        """Whether a prompt of so many bytes may be added; if not, it counts as dropped."""
        self._own()
        with self._lock:
            full = self._bytes > 0 and self._bytes + size > MOST
            self.dropped += full
            return not full

    def add(self, job: Callable[[], None], size: int = 0) -> None:
        """Run a job after those that were added before."""
        with self._lock:
            self._bytes += size + 1
        self._jobs.append((job, size + 1))
        # While the interpreter ends no thread starts, and the next `flush` runs the job.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._run, name="hf_kvcaches-store").start()

    def _run(self) -> None:
        """Return when no jobs are left; called by a job, when no other jobs are left."""
        self._own()
        with self._running:
            while self._jobs:
                job, size = self._jobs.popleft()
                try:
                    job()
                except Exception as error:  # no caller waits for the job
                    self._warn(f"A prompt was not stored: {type(error).__name__}: {error}")
                finally:
                    with self._lock:
                        self._bytes -= size

    def _own(self) -> None:
        """After a fork, in which another thread may have held the locks: take new ones."""
        if self._process != os.getpid():
            self._process, self._running, self._lock = os.getpid(), threading.RLock(), threading.RLock()
            self._bytes = sum(size for _, size in self._jobs)

    def flush(self) -> None:
        """Wait until all computed prompts are written."""
        self._release()
        self._run()

    def settle(self) -> None:
        """Begin to store all computed prompts, and wait a moment for few of them."""
        self._release()
        deadline = time.monotonic() + PATIENCE
        while 0 < self._bytes <= SMALL and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _release(self) -> None:
        if self._process != os.getpid():
            self._own()
        for reference in self._recorders:
            if (recorder := reference()) is not None and recorder.prompt is not None:
                recorder.release(drop=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Queue:
        return self  # a copied cache shares the store


def _finish(reference: weakref.ref[Queue]) -> None:
    """Write all computed prompts when the interpreter ends."""
    if (queue := reference()) is not None:
        queue.flush()


def mark(tensors: Iterable[torch.Tensor | None]) -> list[Event]:
    """Record events behind the work that this thread has queued on the devices of some tensors, for another thread to wait for."""
    devices = {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}
    return [(device, torch.cuda.current_stream(device).record_event()) for device in devices]


def wait_for(events: Iterable[Event], tensors: Iterable[torch.Tensor | None] = ()) -> None:
    """Make this thread's streams, not the CPU, wait for events.

    Args:
        tensors: Tensors of the thread that recorded the events, which this thread uses from now on.
    """
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
