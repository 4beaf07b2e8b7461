"""What a call costs, for tests that bound it."""

import gc
import time
from collections.abc import Callable


def seconds(call: Callable[[], object], times: int = 3, clock: Callable[[], float] = time.thread_time) -> float:
    """The least processor time of several calls, collections of garbage left out.

    Other programs, other threads and the many objects that other tests have left behind must not fail a test.
    """
    found = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(times):
            start = clock()
            call()
            found.append(clock() - start)
    finally:
        if collecting:
            gc.enable()
    return min(found)
