"""The exact prefill that takes a summary's place, at once or while tokens are generated."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Literal

import torch
from transformers import PreTrainedModel

from hf_kvcaches.core.prefill import run_span
from hf_kvcaches.core.splicing.cache import SplicingCache

Swap = Literal["off", "sync", "background"]

# Tokens that a thread runs at a time: between two chunks a thread that nobody waits for ends.
CHUNK = 128


class ExactCache(SplicingCache):
    """What the exact prefill fills. It takes over nothing."""

    takes_over_prefill = False

    def enter_pass(self, tokens: int) -> None:
        # Once, and not before each chunk: who takes the tokens over compares the model again.
        if not self.provenance.taken:
            self.provenance.begin_pass(self.model, self.seen, tokens, shared=True)


class ExactPrefill:
    """Runs a prompt as if there were no library.

    Args:
        ids: The prompt, (rows, tokens).
        mask: 1 where a token is real, (rows, tokens), or None.
        positions: (rows, tokens).
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> None:
        self.ids, self.mask, self.positions = ids, mask, positions
        # Which row of the prompt each row of the cache goes on with, (rows, 1).
        self.rows = torch.arange(ids.shape[0])[:, None]
        self._model = weakref.ref(model)
        self._cache: ExactCache | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.failure: BaseException | None = None

    def start(self, owner: object) -> None:
        """Begins in a thread, which ends soon after `stop`, or when nobody has the owner any more."""
        # Of the event alone: what was computed must go when it has been taken.
        weakref.finalize(owner, self._stop.set)
        self._thread = threading.Thread(target=self._try, name="hf_kvcaches-prefill", daemon=True)
        _started.add(self)
        self._thread.start()

    def stop(self) -> None:
        """Lets a thread end that nobody waits for any more."""
        self._stop.set()

    @property
    def started(self) -> bool:
        """Whether there is a thread, or was."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """Whether the thread is still at it."""
        return self._thread is not None and self._thread.is_alive()

    def result(self) -> ExactCache:
        """The filled cache, computed now if no thread has."""
        if self._thread is not None:
            self._thread.join()
        if self._cache is None:
            self._stop.clear()
            # At once, because somebody waits.
            self._run(self.ids.shape[1])
        assert self._cache is not None
        return self._cache

    def cropped(self, tokens: int) -> ExactPrefill | None:
        """The same for the first tokens of each row, from the beginning; None for no tokens.

        Args:
            tokens: How many, padding included.
        """
        model = self._model()
        if model is None or tokens < 1:
            return None
        mask = None if self.mask is None else self.mask[:, :tokens]
        made = ExactPrefill(model, self.ids[:, :tokens], mask, self.positions[:, :tokens])
        made.rows = self.rows
        return made

    def end(self) -> None:
        """Stops the thread, and waits until it has ended."""
        self.stop()
        if self._thread is not None:
            self._thread.join(30)

    def _try(self) -> None:
        try:
            self._run(CHUNK)
        except BaseException as error:  # nobody would hear of it in a thread; the cache says it
            self.failure = error

    def _run(self, chunk: int) -> None:
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone")
        cache = ExactCache(model)
        tokens = self.ids.shape[1]
        for start in range(0, tokens, chunk):
            if self._stop.is_set():
                return
            stop = min(start + chunk, tokens)
            mask = None if self.mask is None else self.mask[:, :stop]
            with torch.no_grad():
                run_span(model, cache, self.ids[:, start:stop], self.positions[:, start:stop], mask)
        self._cache = cache


_started: weakref.WeakSet[ExactPrefill] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    # A thread that is computing when the interpreter goes takes the process down with it.
    for each in list(_started):
        each.end()
