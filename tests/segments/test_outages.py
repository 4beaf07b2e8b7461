"""A server that can't be used costs the reuse and no more; it is said once, and works again when it is back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.stores.blobs import StoreUnavailable
from tests.helpers.warned import said
from tests.segments.store_helpers import WHOLE, ask, prompt, right

# A server that can't be used


class _Stopping(SegmentStore):
    """Kills the server between the look-up and the loading of a prompt's segments."""

    server = None

    def load(self, *arguments):
        if self.server is not None:
            self.server.stop()
            self.server = None
        return super().load(*arguments)


def forget_pause(store: SegmentStore) -> None:
    store.catalog.blobs._pause_until = 0.0


@pytest.mark.parametrize("moment", ["before the look-up", "before loading", "before writing"])
def test_a_server_that_is_killed_is_said_once_and_used_again_when_it_is_back(model, server, moment):
    store = _Stopping(server.location, quantization=None)
    ask(model, prompt(0), store)
    store.flush()
    with said() as sentences:
        if moment == "before the look-up":
            server.stop()
            assert right(model, prompt(0), store).reused == 0
        elif moment == "before loading":
            store.server = server
            assert right(model, prompt(0), store).reused == 0
        else:
            # The cache holds what it has computed until it is asked for it.
            cache = SegmentReuseCache(model, store, mode="exact")
            model.generate(prompt(1), past_key_values=cache, max_new_tokens=1, pad_token_id=0)
            server.stop()
            store.flush()
            assert right(model, prompt(1), store).reused == 0
        for _ in range(3):
            assert right(model, prompt(2), store).reused == 0
            forget_pause(store)
        store.flush()
    assert len(sentences) == 1
    assert server.location in sentences[0]
    server.start()
    forget_pause(store)
    # It kept nothing on disk.
    with said() as sentences:
        for seed in (0, 1):
            assert right(model, prompt(seed), store).reused == 0
            assert right(model, prompt(seed), store).reused == WHOLE
    assert sentences == []


def test_a_server_that_hangs_is_waited_for_once_a_request_whatever_the_request_looks_up(model, proxy):
    store = SegmentStore(proxy.location, quantization=None, timeout=0.3)
    for seed in range(3):
        # Behind other texts, so that likeness is asked for too.
        ask(model, prompt(seed, 8), store, mode="approximate")
    store.flush()
    proxy.hangs = True
    with said() as sentences:
        for seed in (0, 3, 4):
            assert ask(model, prompt(seed, 8), store, mode="approximate").reused == 0
            store.flush()
            assert proxy.waits() == 1
            assert ask(model, prompt(seed, 16), store, mode="approximate").reused >= 0
            assert proxy.waits() == 0
            forget_pause(store)
    assert len(sentences) == 1
    proxy.hangs = False
    assert right(model, prompt(0, 8), store).reused == WHOLE


def test_nobody_else_waits_while_one_thread_waits_for_a_server(model, proxy):
    store = SegmentStore(proxy.location, quantization=None, timeout=5.0)
    keys = ask(model, prompt(0), store).keys
    # Written before the server hangs: a write that loses its answer would keep the store from asking again.
    store.flush()
    proxy.hangs = True
    with ThreadPoolExecutor(1) as other, said():
        waiting = other.submit(store.refresh)
        assert proxy.unanswered.acquire(timeout=30)
        assert store.catalog.lock.acquire(timeout=1)
        store.catalog.lock.release()
        for key in keys:
            store.catalog.used(key, 1)
        assert not waiting.done()
        proxy.close()
        waiting.result()


def test_a_request_asks_a_server_twice_however_many_segments_it_reuses(model, proxy):
    prompts = prompt(0), torch.cat([prompt(1), prompt(2), prompt(3), prompt(4)], 1)
    store = SegmentStore(proxy.location, quantization=None, timeout=30)
    for asked in prompts:
        ask(model, asked, store)
    store.flush()
    other = SegmentStore(proxy.location, quantization=None, timeout=30)
    other.refresh()  # lists what is there
    for asked in prompts:
        before = proxy.asked
        answer = ask(model, asked, other)
        other.flush()
        assert answer.reused == asked.shape[1] - 1
        # What has changed, and all tensors at once; nothing is new.
        assert proxy.asked - before <= 2


def test_what_can_not_be_deleted_is_replaced_by_others_when_the_cap_is_reached(model, tmp_path):
    store = SegmentStore(f"disk:{tmp_path}", quantization=None)
    for seed in range(4):
        ask(model, prompt(seed), store)
    whole = store.report()
    stuck = ask(model, prompt(0), store).keys
    deleting = store.catalog.blobs.delete

    def delete(key: str) -> bool:
        if key in stuck:
            raise StoreUnavailable("Operation not permitted")
        return deleting(key)

    store.catalog.blobs.delete = delete
    store.catalog.max_bytes = whole.bytes // 2
    with said():
        assert store.report().bytes <= whole.bytes // 2
    assert right(model, prompt(0), store).reused == WHOLE
