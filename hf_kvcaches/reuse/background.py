"""Store computed prompts in the background, while decoding continues."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hf_kvcaches.reuse.storage import Remembering


class Writer:
    """Runs jobs in order, one at a time, in short-lived threads or in the thread that waits for all jobs.

    A `ThreadPoolExecutor` does not do: the garbage collector may add a job during another `add`, where `submit` would wait for a lock that
    its own thread holds; and its threads end with the executor, while these end with their jobs, before the interpreter does.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = threading.RLock()
        self._process = os.getpid()

    def add(self, job: Callable[[], None]) -> None:
        """Run a job after those that were added before."""
        self._jobs.append(job)
        # While the interpreter ends no thread starts, and the next `wait` runs the job.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self.wait, name="hf_kvcaches-store").start()

    def wait(self) -> None:
        """Return when no jobs are left; called by a job, when no other jobs are left."""
        if self._process != os.getpid():  # after a fork, in which another thread may have held the lock
            self._process, self._running = os.getpid(), threading.RLock()
        with self._running:
            while self._jobs:
                self._jobs.popleft()()


class _Watched:
    """The caches whose prompts may have to be stored, which any thread may add to; they are not kept alive.

    A `WeakSet` can't be iterated while another thread adds to it. References are replaced as a whole, and dead ones left out then.
    """

    def __init__(self) -> None:
        self._references: tuple[weakref.ref[Remembering], ...] = ()
        self._lock = threading.RLock()  # reentrant: a finalizer may make a cache

    def add(self, remembering: Remembering) -> None:
        with self._lock:
            self._references = (*(each for each in self._references if each() is not None), weakref.ref(remembering))

    def __iter__(self) -> Iterator[Remembering]:
        return iter([remembering for each in self._references if (remembering := each()) is not None])


class Background:
    """The background jobs of a store, which write prompts of caches as soon as they are computed.

    Args:
        warn: Called with a sentence when a job fails.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._writer = warn, Writer()
        self._waiting = _Watched()
        weakref.finalize(self, _finish, self._waiting, self._writer)

    def watch(self, remembering: Remembering) -> None:
        """Make `flush` store the computed prompt of a cache, too; the cache is not kept alive."""
        self._waiting.add(remembering)

    def later(self, job: Callable[[], None]) -> None:
        """Run a job after earlier ones; a failed job is a warning."""
        warn = self._warn

        def guarded() -> None:
            try:
                job()
            except Exception as error:  # no caller waits for the job
                warn(f"A prompt was not stored: {type(error).__name__}: {error}")

        self._writer.add(guarded)

    def flush(self) -> None:
        """Wait until all computed prompts are written."""
        _finish(self._waiting, self._writer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Background:
        return self  # a copied cache shares the store


def _finish(waiting: Iterable[Remembering], writer: Writer) -> None:
    """Write all computed prompts; also called when the interpreter ends."""
    for remembering in list(waiting):
        remembering.release(drop=False)
    writer.wait()
