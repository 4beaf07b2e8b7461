"""The exact prefill that replaces a summary, at once or while tokens are generated."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Literal

import torch
from transformers import PreTrainedModel

from hf_kvcaches.reuse.layer import PlainCache
from hf_kvcaches.reuse.partial import run_span
from hf_kvcaches.reuse.record import Event, mark, own_stream, wait_for

Swap = Literal["off", "sync", "background"]

# Tokens that a thread runs at a time; between two chunks it can be stopped.
CHUNK = 128


class ExactPrefill:
    """Runs a prompt as if there were no summary.

    Args:
        ids: (1, tokens).
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.ids = ids
        self.failure: BaseException | None = None  # of the thread
        self._model = weakref.ref(model)
        self._cache: PlainCache | None = None
        self._events: list[Event] = mark([ids])  # behind the work that is queued on a GPU
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, owner: object) -> None:
        """Start a thread, which ends soon after `stop`, or after the owner is freed."""
        weakref.finalize(owner, self._stop.set)  # refers to the event alone, so that the filled cache can be freed
        self._thread = threading.Thread(target=self._try, name="hf_kvcaches-prefill", daemon=True)
        _prefills.add(self)
        self._thread.start()

    def stop(self) -> None:
        """Make the thread end after its chunk."""
        self._stop.set()

    @property
    def started(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """Whether the thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def result(self) -> PlainCache:
        """Return the filled cache, computed now if no thread has."""
        if self._thread is not None:
            self._thread.join()
        if self._cache is None:
            self._stop.clear()
            self._run(self.ids.shape[1])
        assert self._cache is not None
        wait_for(self._events, self._cache.owned_tensors().values())
        return self._cache

    def _try(self) -> None:
        try:
            with own_stream(self._events):
                self._run(CHUNK)
        except BaseException as error:  # the cache warns of it
            self.failure = error

    def _run(self, chunk: int) -> None:
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone")
        cache = PlainCache(model)
        for start in range(0, self.ids.shape[1], chunk):
            if self._stop.is_set():
                return
            ids = self.ids[:, start : start + chunk]
            with torch.no_grad():
                run_span(model, cache, ids, torch.arange(start, start + ids.shape[1], device=ids.device))
        self._events, self._cache = mark(cache.owned_tensors().values()), cache


_prefills: weakref.WeakSet[ExactPrefill] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    # A thread that is computing when the interpreter exits takes the process down with it.
    for prefill in list(_prefills):
        prefill.stop()
        if prefill._thread is not None:
            prefill._thread.join(30)
