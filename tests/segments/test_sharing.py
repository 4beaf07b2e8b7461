"""Threads and processes that share a store of segments: nothing is lost, nothing is mixed up, and nobody waits forever."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.stores.catalog import open_blobs
from tests import tiny
from tests.helpers.warned import said
from tests.segments.store_helpers import LENGTH, PART, WHOLE, Other, ask, ask_after_fork, prompt, real_bytes, right, run_apart

# Processes


def test_two_processes_that_ask_at_the_same_time_find_all_of_each_others_segments(model, shared_location):
    first, second = Other(shared_location), Other(shared_location)
    # Some prompts are the same, some begin alike, and they come in another order.
    mine, theirs = [(1,), (2,), (3, PART), (4,), (5, PART)], [(4,), (6,), (7, PART), (1,), (8, PART)]
    first.ask(*mine)
    second.ask(*theirs)
    first.answer()
    second.answer()
    first.ask(*theirs)
    assert first.answer() == [WHOLE] * 5
    second.ask(*mine)
    assert second.answer() == [WHOLE] * 5
    reports = [first.end(), second.end()]
    assert reports[1].bytes == real_bytes(shared_location)
    assert reports[0].damaged == reports[1].damaged == reports[0].failures == reports[1].failures == 0
    # And a third one, that comes when they are gone.
    store = SegmentStore(shared_location)
    assert [right(model, prompt(*seed), store).reused for seed in mine + theirs] == [WHOLE] * 10


def test_a_process_forked_while_a_prompt_is_stored_finds_and_stores_prompts(tmp_path):
    assert run_apart(ask_after_fork, f"disk:{tmp_path}") == [WHOLE, 0, WHOLE]


# Threads


def in_threads(*works) -> None:
    """Runs functions at the same time, and raises what one of them raises."""
    with ThreadPoolExecutor(len(works)) as pool:
        for running in [pool.submit(work) for work in works]:
            running.result(60)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("cap", [None, 20_000])
@pytest.mark.parametrize("place", ["memory", "disk", "redis"])
def test_threads_with_a_model_each_get_right_answers_from_one_store(request, model, tmp_path, place, cap):
    location = {"memory": "memory", "disk": f"disk:{tmp_path}"}.get(place) or request.getfixturevalue("redis_location")
    store = SegmentStore(location, max_bytes=cap)
    seeds = [(1,), (2, PART), (3, PART), (4,), (5, 2 * PART)]

    def work(number: int):
        mine = copy.deepcopy(model)

        def run() -> None:
            for turn in range(3):
                for seed in seeds[number + turn :] + seeds[: number + turn]:
                    right(mine, prompt(*seed), store)

        return run

    with said() as sentences:
        in_threads(*[work(number) for number in range(4)])
        store.flush()
    assert sentences == []
    report = store.report()
    assert report.damaged == report.failures == 0
    if cap is None:
        assert report.evicted == 0
        assert [right(model, prompt(*seed), store).reused for seed in seeds] == [WHOLE] * len(seeds)
    else:
        assert report.bytes <= cap
        assert report.evicted > 0
    if place != "memory":
        assert report.bytes == real_bytes(location)


class _AtEachStep(TorchDispatchMode):
    """Calls a function before each operation on tensors in this thread."""

    def __init__(self, step) -> None:
        super().__init__()
        self._step, self._inside = step, False

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if not self._inside:
            self._inside = True
            try:
                self._step()
            finally:
                self._inside = False
        return operation(*arguments, **(options or {}))


@pytest.mark.parametrize("mode", ["exact", "approximate"])
def test_another_thread_that_flushes_at_any_moment_stores_only_what_is_computed(model, mode):
    store = SegmentStore()
    rows = [prompt(1), torch.cat([tiny.ids(1, 8, seed=9), prompt(1)], dim=1), prompt(2, PART)]
    for row in rows:
        with _AtEachStep(store.flush):
            ask(model, row, store, mode)
    # What stands at the start of a prompt is exact in this mode.
    for row in rows if mode == "exact" else rows[:1]:
        answer = right(model, row, store)
        assert answer.reused == row.shape[1] - 1


@pytest.mark.usefixtures("one_thread")
def test_threads_that_flush_delete_and_pin_meanwhile_do_no_harm(model, shared_location):
    store = SegmentStore(shared_location)
    over = threading.Event()

    def asking(number: int):
        mine = copy.deepcopy(model)

        def run() -> None:
            try:
                for turn in range(6):
                    right(mine, prompt(number * 3 + turn % 3), store)
            finally:
                over.set()

        return run

    def meddling() -> None:
        while not over.is_set():
            for stored in open_blobs(shared_location).changes().added[::2]:
                store.pin(stored.key)
                store.delete(stored.key)
                store.pin(stored.key, False)
            store.report()

    with said() as sentences:
        in_threads(asking(0), asking(1), meddling)
    assert sentences == []
    assert store.report().bytes == real_bytes(shared_location)
    for _ in range(2):
        answer = right(model, prompt(0), store)
    assert answer.reused == LENGTH - 1


@pytest.mark.usefixtures("one_thread")
def test_caches_that_are_dropped_in_other_threads_are_written(model, tmp_path):
    store = SegmentStore(f"disk:{tmp_path}")

    def drop(number: int):
        mine = copy.deepcopy(model)

        def run() -> None:
            cache = SegmentReuseCache(mine, store, mode="exact")
            cache.circle = [cache]  # for the garbage collector
            cache.prefill(prompt(number))

        return run

    in_threads(*[drop(number) for number in range(4)])
    store.flush()
    assert [right(model, prompt(number), store).reused for number in range(4)] == [WHOLE] * 4
