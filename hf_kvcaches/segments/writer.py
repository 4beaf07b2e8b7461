"""A thread that stores what prompts had computed, while they go on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable


class Writer:
    """Runs jobs one after the other in a thread of its own, which lives while there are any.

    So nobody has to stop it, it keeps nothing alive longer than its jobs do, and a process does not end before they are done.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        # By their numbers: its own, or one that waits and has nobody to wait for.
        self._working: set[int] = set()
        # Its lock can be taken twice: the garbage collector may come at any moment, and a cache that it finds has a job too.
        self._changed = threading.Condition()
        self._process = os.getpid()

    def add(self, job: Callable[[], None]) -> None:
        """Runs a job behind those that wait."""
        self._notice_fork()
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hf_kvcaches-segments")
                try:
                    self._thread.start()
                except RuntimeError:  # The interpreter is ending, or there are too many threads. Whoever waits does it.
                    self._thread = None

    def wait(self) -> None:
        """Returns when there are no jobs any more; at once where a job asks."""
        self._notice_fork()
        while threading.get_ident() not in self._working:
            with self._changed:
                if self._thread is not None or self._working:
                    self._changed.wait()
                    continue
                if not self._jobs:
                    return
            self._work()

    def _work(self) -> None:
        mine = threading.get_ident()
        self._working.add(mine)
        try:
            while self._run_one():
                pass
        except BaseException:
            # As where warnings are errors. The jobs that are left are for the next who adds one, or waits.
            self._leave()
            raise

    def _run_one(self) -> bool:
        with self._changed:
            if not self._jobs:
                # While the lock is held, so that a job which is added now finds nobody, and starts another thread.
                self._leave()
                return False
            job = self._jobs.popleft()
        # Whatever it holds on to, the store among it, goes with it when this returns.
        job()
        return True

    def _leave(self) -> None:
        with self._changed:
            self._working.discard(threading.get_ident())
            if self._thread is threading.current_thread():
                self._thread = None
            self._changed.notify_all()

    def _notice_fork(self) -> None:
        """In a forked child there is no thread, and whoever had the lock is not there to give it back."""
        if self._process != os.getpid():
            self._process, self._changed, self._thread, self._working = os.getpid(), threading.Condition(), None, set()
