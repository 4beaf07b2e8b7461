"""`SpanStore`: spans of prompts with their keys and values, shared by threads, caches and processes, and stored in the background.

A prompt is handed over once its first token is out. On a GPU it is copied to pinned memory on a stream of its own, behind an event of the
model's; no decode step, and no later request, waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.reuse.index import Record
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.layout import LayerStates, Quantization, TokenCodec, check, check_quantization, encode, name_of
from hf_kvcaches.stores.blobs import BlobStore, NewBlob, bytes_of
from hf_kvcaches.stores.catalog import Catalog, Contents

Event = tuple[torch.device, torch.cuda.Event]  # behind work that was queued on a device

MOST = 2**31  # bytes of prompts that may wait to be stored; one alone may be larger
# A request waits for what earlier ones store, as it may reuse it, if that is at most so many bytes, and for at most so many seconds.
SMALL, PATIENCE = 2**25, 0.5


@dataclass(frozen=True)
class CatalogReport:
    """What the reports of all stores say."""

    location: str  # where the spans are stored, without passwords
    bytes: int  # that they take in the back-end
    max_bytes: int | None  # the cap
    hot_bytes: int  # that the hot tier of this process holds
    pinned: int  # how many are not evicted above the cap
    damaged: int  # how many damaged ones this process deleted
    loads: int  # how often this process read tensors from the back-end
    hot_hits: int  # how often it read them from the hot tier
    written: int  # how many this process stored
    evicted: int  # how many it evicted
    failures: int  # how often the back-end failed
    dropped: int  # prompts that this process did not store because too many waited for it


class NewSpan(NamedTuple):
    """A span to be stored: its record, without `form`, the states of all layers, and what the blob's head has beside the record."""

    record: Record
    layers: Sequence[LayerStates]
    head: Mapping[str, Any] = {}


class Queue:
    """Jobs that run in order, one at a time, in short-lived threads or in the thread that waits for all.

    A `ThreadPoolExecutor` does not do: the garbage collector may add a job during another `add`, where `submit` would wait for a lock that
    its own thread holds; and its threads end with the executor, while these end with their jobs, before the interpreter does.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._jobs = warn, deque[tuple[Callable[[], None], int]]()
        self._bytes, self._process = 0, os.getpid()
        self.dropped = 0  # prompts that were not stored because the queue was full
        # Reentrant: a finalizer may add a job or a cache.
        self._running, self._lock = threading.RLock(), threading.RLock()
        self._recorders: tuple[weakref.ref[Any], ...] = ()
        weakref.finalize(self, _finish, weakref.ref(self))

    def watch(self, recorder: Any) -> None:
        """Make `flush` and `settle` hand over the computed prompt of a cache's `Recorder`, too; it is not kept alive."""
        with self._lock:
            # Replaced as a whole: another thread may be reading them.
            self._recorders = (*(each for each in self._recorders if each() is not None), weakref.ref(recorder))

    @property
    def idle(self) -> bool:
        """Whether no job waits or runs."""
        return self._bytes == 0

    def has_room(self, size: int) -> bool:
        """Whether a prompt of so many bytes may be added; if not, it counts as dropped."""
        self._check_process()
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

    def flush(self) -> None:
        """Wait until all computed prompts are written."""
        self._hand_over()
        self._run()

    def settle(self) -> None:
        """Begin to store all computed prompts, and wait a moment for few of them."""
        self._hand_over()
        deadline = time.monotonic() + PATIENCE
        while 0 < self._bytes <= SMALL and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _run(self) -> None:
        """Return when no jobs are left; called by a job, when no other jobs are left."""
        self._check_process()
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

    def _hand_over(self) -> None:
        self._check_process()
        for reference in self._recorders:
            if (recorder := reference()) is not None and recorder.prompt is not None:
                recorder.release(drop=False)

    def _check_process(self) -> None:
        """After a fork, in which another thread may have held the locks: take new ones."""
        if self._process != os.getpid():
            self._process, self._running, self._lock = os.getpid(), threading.RLock(), threading.RLock()
            self._bytes = sum(size for _, size in self._jobs)


def _finish(reference: weakref.ref[Queue]) -> None:
    """Write all computed prompts when the interpreter ends."""
    if (queue := reference()) is not None:
        queue.flush()


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


class SpanStore:
    """Spans in a catalog, whose arguments it takes, and the queue that stores them in the background."""

    def __init__(self, contents: Contents, noun: str, quantization: Quantization, location: str | BlobStore, **limits: Any) -> None:
        self.quantization = check_quantization(quantization)
        self.codec = self.quantization if isinstance(self.quantization, TokenCodec) else None
        self.stored_as = name_of(self.quantization)
        self.catalog = Catalog(location, contents, noun, **limits)
        self.queue = Queue(partial(self.catalog.warn_once, "failed job"))

    @property
    def max_bytes(self) -> int | None:
        return self.catalog.max_bytes

    def refresh(self) -> None:
        """Begin a request: begin to store computed prompts, and apply changes of other processes."""
        self.queue.settle()
        self.catalog.refresh()

    def load(self, records: Mapping[str, Record], device: torch.device | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of spans, by key and read-only, without those that are missing, expired or damaged; see `Catalog.read`."""

        def check_blob(key: str, tensors: dict[str, torch.Tensor]) -> None:
            form = records[key].form
            if form["quantization"] != self.stored_as:
                raise ArtifactError(f"it is stored as {form['quantization']!r}, expected {self.stored_as!r}")
            check(tensors, form, len(records[key]))

        return self.catalog.read(list(records), check_blob, device)

    def put(self, spans: Sequence[NewSpan], geometries: Sequence[RotaryGeometry] = ()) -> None:
        """Store spans that are not stored yet, and evict others above the cap."""
        with self.catalog.lock:
            new = [span for span in spans if span.record.key not in self.catalog.entries]
        if not new:
            return
        # The last first: of two equally useful spans the older one is evicted, and a prompt without its start is a miss.
        self.catalog.put(self._encoded(reversed(new), geometries))
        # Processes that write at the same time keep the cap together: the last one to refresh sees what all have written.
        self.catalog.refresh()

    def _encoded(self, spans: Iterable[NewSpan], geometries: Sequence[RotaryGeometry]) -> Iterator[NewBlob]:
        for record, layers, head in spans:
            try:
                tensors, form = encode(layers, self.quantization, record.start, geometries)
            except ConfigError as error:  # not finite
                self.catalog.warn_once("unfinite", f"A {self.catalog.noun} was not stored: {error}")
                continue
            if self.max_bytes is not None and bytes_of(tensors) > self.max_bytes:
                sentence = f"A {self.catalog.noun} of {len(record)} tokens takes more than all of the {self.max_bytes} bytes allowed."
                self.catalog.warn_once("large", f"{sentence} It is not stored.")
                continue
            yield NewBlob(record.key, {**replace(record, form=form).to_dict(), **head}, tensors)

    def flush(self) -> None:
        """Wait until all computed prompts are written."""
        self.queue.flush()

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keep a span, by its id in reports, from eviction above the cap by any process; `pinned=False` unpins it."""
        self.catalog.pin(key, pinned)

    def delete(self, key: str) -> bool:
        """Delete the span with this id, and return whether it was there."""
        return self.catalog.delete(key)

    def clear(self) -> None:
        """Delete all spans of all models."""
        self.flush()
        self.catalog.clear()

    def summary(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the fields of a `CatalogReport`; `pinned` counts these spans."""
        return {**self.catalog.summary(list(keys)), "dropped": self.queue.dropped}

    def close(self) -> None:
        """Write pending prompts, and close files and connections."""
        self.flush()
        self.catalog.blobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied cache shares the store
