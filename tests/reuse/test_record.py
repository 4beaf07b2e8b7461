"""Prompts are stored in the background: nobody waits for it, and what is stored is what was computed."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.reuse import store as stores
from hf_kvcaches.reuse.store import Queue, Recorder
from tests import tiny

PROMPT = tiny.ids(1, 120, seed=1)


def asked(model, cache, ids=PROMPT):
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def test_caches_can_be_made_while_another_thread_waits_for_prompts_to_be_stored() -> None:
    queue, made, errors = Queue(str), list[Recorder](), list[BaseException]()
    done = threading.Event()

    def flush() -> None:
        try:
            while not done.is_set():
                queue.flush()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=flush)
    thread.start()
    for number in range(2000):
        made.append(Recorder([], queue))
        queue.watch(made[-1])
        if number % 3 == 0:
            del made[0]
    done.set()
    thread.join()
    assert errors == []


def test_caches_that_are_watched_are_not_kept_alive() -> None:
    queue = Queue(str)
    recorder = Recorder([], queue)
    queue.watch(recorder)
    reference = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert reference() is None
    queue.flush()


def test_a_full_queue_drops_a_prompt_and_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MOST", 1)
    model, store, over = tiny.llama(), SegmentStore("memory"), threading.Event()
    store.queue.add(lambda: over.wait(30), 1)
    for seed in (1, 2):
        model.generate(tiny.ids(1, 60, seed=seed), past_key_values=SegmentReuseCache(model, store), max_new_tokens=2, pad_token_id=0)
    over.set()
    report = store.report()
    assert (report.dropped, report.segments) == (2, 0)
    model.generate(tiny.ids(1, 60, seed=1), past_key_values=SegmentReuseCache(model, store), max_new_tokens=2, pad_token_id=0)
    assert store.report().segments > 0


def test_a_request_does_not_wait_for_what_takes_long_to_store(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store, over = tiny.llama(), SegmentStore("memory"), threading.Event()
    store.queue.add(lambda: over.wait(30), stores.SMALL + 1)
    began = time.monotonic()
    asked(model, SegmentReuseCache(model, store))
    assert time.monotonic() - began < stores.PATIENCE
    over.set()
    store.close()


def test_prefill_stores_nothing_before_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store, over = tiny.llama(), SegmentStore("memory"), threading.Event()
    monkeypatch.setattr(store, "put", lambda *args: over.wait(30))
    cache = SegmentReuseCache(model, store)
    began = time.monotonic()
    cache.prefill(PROMPT)
    asked(model, cache, PROMPT[:, -1:])
    cache.crop(-1)
    assert time.monotonic() - began < 20
    over.set()


def test_slots_that_are_written_over_while_they_are_stored_are_stored_as_they_were() -> None:
    model, store, over = tiny.llama(), SegmentStore("memory"), threading.Event()
    store.queue.add(lambda: over.wait(30))
    cache = SegmentReuseCache(model, store)
    asked(model, cache)
    expected = [layer.keys.clone() for layer in cache.layers]
    cache.crop(-80)
    asked(model, cache, tiny.ids(1, 70, seed=7))
    over.set()
    store.flush()
    again = SegmentReuseCache(model, store)
    asked(model, again)
    assert again.report().reused_tokens == 119
    for layer, keys in zip(again.layers, expected, strict=True):
        assert torch.equal(layer.keys[:, :, :119], keys[:, :, :119])


def test_decode_steps_behind_a_prompt_that_is_stored_wait_for_nothing() -> None:
    model, store = tiny.llama(), SegmentStore("memory")
    counts = []
    for cache in (SegmentReuseCache(model, store), None):
        waits = 0

        class Waits(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal waits
                waits += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
                return func(*args, **(kwargs or {}))

        used = cache if cache is not None else SegmentReuseCache(model, SegmentStore("memory"))
        asked(model, used)
        if cache is None:  # nothing to store
            used.recorder.expect(10**6, 0, lambda states: None)
        with Waits():
            for step in range(3):
                asked(model, used, PROMPT[:, step : step + 1])
        counts.append(waits)
    assert counts[0] == counts[1]
