"""A cache that two threads fill at once says so in both, and one that threads use in turns goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from hf_kvcaches import ConfigError, EquipCache, GrowingCache
from tests import tiny


@pytest.mark.parametrize("kind", [GrowingCache, EquipCache])
def test_two_calls_of_generate_at_once_are_both_refused(kind, monkeypatch):
    model = tiny.llama()
    cache, together = kind(model), Barrier(2, timeout=30)
    begins = type(cache).generate_begins

    def begin_together(self):
        begins(self)
        together.wait()

    monkeypatch.setattr(kind, "generate_begins", begin_together)

    def write(seed):
        return model.generate(tiny.ids(1, 20, seed=seed), past_key_values=cache, max_new_tokens=30)

    with ThreadPoolExecutor(2) as threads:
        errors = [turn.exception() for turn in [threads.submit(write, 0), threads.submit(write, 1)]]
    assert all(isinstance(error, ConfigError) and "one thread" in str(error) for error in errors), errors


def test_a_prompt_that_does_not_continue_another_threads_text_is_told_of_the_thread():
    model = tiny.llama()
    cache = GrowingCache(model)
    with ThreadPoolExecutor(1) as other:
        other.submit(model.generate, tiny.ids(1, 20, seed=0), past_key_values=cache, max_new_tokens=3).result()
    with pytest.raises(ConfigError, match="Another thread has filled it"):
        model.generate(tiny.ids(1, 40, seed=1), past_key_values=cache, max_new_tokens=3)


def test_threads_may_take_turns():
    model = tiny.llama()
    cache, ids = GrowingCache(model), tiny.ids(1, 20)
    for _ in range(3):
        with ThreadPoolExecutor(1) as other:
            ids = other.submit(model.generate, ids, past_key_values=cache, max_new_tokens=3, min_new_tokens=3).result()
    assert ids.shape[1] == 29
