"""Jobs that store what prompts had computed, while decoding continues."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable


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
            threading.Thread(target=self.wait, name="hf_kvcaches-segments").start()

    def wait(self) -> None:
        """Returns when no jobs are left; where a job calls it, when no others are."""
        if self._process != os.getpid():  # after a fork, in which another thread may have held the lock
            self._process, self._running = os.getpid(), threading.RLock()
        with self._running:
            while self._jobs:
                self._jobs.popleft()()
