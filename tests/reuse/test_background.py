"""Prompts that are stored while other threads make caches."""

from __future__ import annotations

import gc
import threading
import weakref

from hf_kvcaches.reuse.background import Background
from hf_kvcaches.reuse.storage import Remembering


def test_caches_can_be_made_while_another_thread_waits_for_prompts_to_be_stored() -> None:
    background, made, errors = Background(str), list[Remembering](), list[BaseException]()
    done = threading.Event()

    def flush() -> None:
        try:
            while not done.is_set():
                background.flush()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=flush)
    thread.start()
    for number in range(2000):
        made.append(Remembering([], background.later))
        background.watch(made[-1])
        if number % 3 == 0:
            del made[0]
    done.set()
    thread.join()
    assert errors == []


def test_caches_that_are_watched_are_not_kept_alive() -> None:
    background = Background(str)
    remembering = Remembering([], background.later)
    background.watch(remembering)
    reference = weakref.ref(remembering)
    del remembering
    gc.collect()
    assert reference() is None
    background.flush()
