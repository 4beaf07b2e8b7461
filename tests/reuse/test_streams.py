"""What one thread has queued on a GPU is waited for by the thread that goes on with it."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.reuse.record import mark, own_stream, wait_for
from tests import tiny

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
EARLIER = tiny.ids(1, 160)


def test_without_cuda_there_is_nothing_to_wait_for() -> None:
    tensors = [torch.ones(3), None]
    events = mark(tensors)
    with own_stream(events):
        assert events == []
    wait_for(events, tensors)


@CUDA
def test_a_thread_on_a_stream_of_its_own_reads_what_was_queued_before_it_and_is_waited_for() -> None:
    first = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(50_000_000)
    first += 1
    begun, made, done = mark([first]), [], []

    def work() -> None:
        with own_stream(begun):
            torch.cuda._sleep(50_000_000)
            made.append(first * 2)
            done.extend(mark(made))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    wait_for(done, made)
    assert bool((made[0] == 2).all())


@CUDA
def test_a_prompt_that_another_stream_computed_is_stored_as_it_was_computed() -> None:
    model, store = tiny.llama().cuda(), SegmentStore("memory")
    ids = EARLIER.cuda()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        model(ids, past_key_values=SegmentReuseCache(model, store), logits_to_keep=1)
    store.flush()
    cache = SegmentReuseCache(model, store)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        assert torch.allclose(logits, model(ids, logits_to_keep=1).logits, atol=1e-4)
    assert cache.report().reused_tokens == 159
