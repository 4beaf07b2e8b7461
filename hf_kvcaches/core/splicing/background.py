"""Jobs that store what prompts had computed, while decoding continues."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hf_kvcaches.core.splicing.remembering import Remembering


class Writer:
    """Runs jobs in their order, one at a time, each in a short-lived thread or in one that waits for all.

    Not a `ThreadPoolExecutor`: the garbage collector may add a job in the middle of another `add`, where `submit` would wait for its own
    lock; and threads of an executor end with it, where these end with their jobs, before the interpreter does.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = threading.RLock()
        self._process = os.getpid()

    def add(self, job: Callable[[], None]) -> None:
        """Runs a job after those that were added before."""
        self._jobs.append(job)
        # Without a thread, as while the interpreter ends, the next `wait` runs the job.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self.wait, name="hf_kvcaches-store").start()

    def wait(self) -> None:
        """Returns when no jobs are left; where a job calls it, when no others are."""
        if self._process != os.getpid():  # after a fork, in which another thread may have held the lock
            self._process, self._running = os.getpid(), threading.RLock()
        with self._running:
            while self._jobs:
                self._jobs.popleft()()


class Background:
    """What a store has written in the background: prompts of caches, as soon as they are computed.

    Args:
        warn: Called with a sentence when a job fails.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._writer = warn, Writer()
        self._waiting: weakref.WeakSet[Remembering] = weakref.WeakSet()
        weakref.finalize(self, _finish, self._waiting, self._writer)

    def watch(self, remembering: Remembering) -> None:
        """Has `flush` ask a cache for what it still has to store; the cache is not kept alive."""
        self._waiting.add(remembering)

    def later(self, job: Callable[[], None]) -> None:
        """Runs a job after earlier ones. One that fails is a warning."""
        warn = self._warn

        def guarded() -> None:
            try:
                job()
            except Exception as error:  # in a thread, where nobody else would hear of it
                warn(f"A prompt was not stored: {type(error).__name__}: {error}")

        self._writer.add(guarded)

    def flush(self) -> None:
        """Waits until everything is written that is computed."""
        _finish(self._waiting, self._writer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Background:
        return self  # a copied cache goes on with the same store


def _finish(waiting: Iterable[Remembering], writer: Writer) -> None:
    """Stores what is computed, also where the interpreter ends."""
    for remembering in list(waiting):
        remembering.release(drop=False)
    writer.wait()
