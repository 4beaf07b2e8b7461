"""The exact prefill that replaces what was reused, at once or while tokens are generated."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Literal

import torch
from transformers import PreTrainedModel

from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.partial import run_span
from hf_kvcaches.reuse.streams import Event, mark, own_stream, wait_for

Swap = Literal["off", "sync", "background"]

# Tokens that a thread runs at a time; between two chunks it can be stopped.
CHUNK = 128


class ExactCache(SplicingCache):
    """The cache that the exact prefill fills."""

    hooks_forward = False

    def begin_pass(self, tokens: int) -> None:
        # Not before each chunk: the swap compares the model again.
        if not self.provenance.taken:
            self.provenance.begin_pass(self.model, self.seen, tokens)


class ExactPrefill:
    """Runs a prompt as if there were no library; ids, padding mask and positions are of shape (rows, tokens)."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> None:
        self.ids, self.mask, self.positions = ids, mask, positions
        # Which row of the prompt each row of the cache goes on with, (rows, 1).
        self.rows = torch.arange(ids.shape[0])[:, None]
        self.failure: BaseException | None = None  # of the thread
        self._model = weakref.ref(model)
        self._cache: ExactCache | None = None
        # Before and behind the work that the thread queues on a GPU.
        self._start_events: list[Event] = []
        self._end_events: list[Event] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, owner: object) -> None:
        """Start a thread, which ends soon after `stop`, or after the owner is freed."""
        weakref.finalize(owner, self._stop.set)  # refers to the event alone, so that the filled cache can be freed
        self._start_events = mark([self.ids])
        self._thread = threading.Thread(target=self._try, name="hf_kvcaches-prefill", daemon=True)
        _prefills.add(self)
        self._thread.start()

    def stop(self) -> None:
        """Make the thread end after its chunk."""
        self._stop.set()

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def result(self) -> ExactCache:
        """Return the filled cache, computed now if no thread has."""
        if self._thread is not None:
            self._thread.join()
        if self._cache is None:
            self._stop.clear()
            self._run(self.ids.shape[1])
        assert self._cache is not None
        wait_for(self._end_events, self._cache.owned_tensors().values())
        return self._cache

    def cropped(self, tokens: int) -> ExactPrefill | None:
        """Return a prefill of the first tokens of each row, padding included, that has not begun; None for no tokens."""
        model = self._model()
        if model is None or tokens < 1:
            return None
        mask = None if self.mask is None else self.mask[:, :tokens]
        prefill = ExactPrefill(model, self.ids[:, :tokens], mask, self.positions[:, :tokens])
        prefill.rows = self.rows
        return prefill

    def _try(self) -> None:
        try:
            with own_stream(self._start_events):
                self._run(CHUNK)
        except BaseException as error:  # the cache warns of it
            self.failure = error

    def _run(self, chunk: int) -> None:
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone")
        cache = ExactCache(model)
        for start in range(0, self.ids.shape[1], chunk):
            if self._stop.is_set():
                return
            span = slice(start, start + chunk)
            mask = None if self.mask is None else self.mask[:, : span.stop]
            with torch.no_grad():
                run_span(model, cache, self.ids[:, span], self.positions[:, span], mask)
        self._end_events = mark(cache.owned_tensors().values())
        self._cache = cache


_prefills: weakref.WeakSet[ExactPrefill] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    # A thread that is computing when the interpreter exits takes the process down with it.
    for prefill in list(_prefills):
        prefill.stop()
        if prefill._thread is not None:
            prefill._thread.join(30)
