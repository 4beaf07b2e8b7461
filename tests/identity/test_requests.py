"""Whatever changes about a model between two requests: caches answer like the model as it is, and share only what it computed."""

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import SegmentReuseCache, SegmentStore, WarmStartCache
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.segments.cache import Mode
from tests import tiny
from tests.identity.changes import CHANGES, INVOCATION, PROMPT, QUESTION, Setup, activated, ask, assert_like, plain, plainly
from tests.warmstart.warm import OPEN, library_of


def store_in(folder: Path) -> SegmentStore:
    return SegmentStore(f"disk:{folder}", quantization=None)


@dataclass(frozen=True)
class Segments:
    """Makes caches of a mode."""

    mode: Mode

    def __call__(self, setup: Setup, store: SegmentStore) -> SegmentReuseCache:
        return SegmentReuseCache(setup.runner, store, mode=self.mode)


@pytest.fixture(params=["exact", "approximate"])
def segments(request: pytest.FixtureRequest) -> Segments:
    return Segments(request.param)


def filled_by(setup: Setup, store: SegmentStore, make: Segments, ids: torch.Tensor = PROMPT) -> None:
    ask(setup, make(setup, store), ids)
    store.flush()


@pytest.mark.parametrize("name", CHANGES)
def test_segments_are_shared_by_what_computed_them_alone(name: str, segments: Segments, tmp_path: Path) -> None:
    change = CHANGES[name]
    setup = Setup(change.make())
    untouched = copy.deepcopy(setup.runner)
    before = plainly(setup)
    with store_in(tmp_path) as store:
        filled_by(setup, store, segments)
        with change.enter(setup):
            expected = plainly(setup)
            assert not torch.equal(expected[1], before[1])
            if change.bypassed and segments.mode == "approximate":
                with pytest.raises(UnsupportedError, match="attention 'doubled' is not transformers' own"):
                    segments(setup, store)
                return
            for _ in range(2):
                cache = segments(setup, store)
                assert_like(ask(setup, cache), expected)
                store.flush()
            assert (cache.report().reused_tokens > 0) == change.seen
            assert (cache.report().reason == "") == change.seen
        if change.comes_back:
            cache = segments(setup, store)
            assert_like(ask(setup, cache), before)
            assert cache.report().reused_tokens >= 64
    with store_in(tmp_path) as store:
        cache = segments(Setup(untouched), store)
        assert_like(ask(Setup(untouched), cache), before)
        assert cache.report().reused_tokens >= 64


@pytest.mark.parametrize("name", [name for name, change in CHANGES.items() if not change.other_type])
def test_a_chat_that_goes_on_under_a_change_stores_nothing_of_the_later_turns(name: str, segments: Segments, tmp_path: Path) -> None:
    change = CHANGES[name]
    setup = Setup(change.make())
    untouched = Setup(copy.deepcopy(setup.runner))
    cache, reference = None, DynamicCache(config=setup.model.config)
    with store_in(tmp_path) as store:
        cache = segments(setup, store)
        first = ask(setup, cache, PROMPT)[0]
        ask(setup, reference, PROMPT)
        later = torch.cat([first, tiny.ids(1, 80, seed=3)], dim=1)
        with change.enter(setup):
            answered = ask(setup, cache, later)
            assert_like(answered, ask(setup, reference, later))
            assert cache.report().reason
        if change.comes_back and name != "adapter added":
            last = torch.cat([answered[0], tiny.ids(1, 80, seed=4)], dim=1)
            assert_like(ask(setup, cache, last, 1), ask(setup, reference, last, 1))
            assert cache.report().reason
            later = last
        cache.reset()
        store.flush()
    with store_in(tmp_path) as store:
        again = segments(untouched, store)
        assert_like(ask(untouched, again, later), plainly(untouched, later))
        assert 64 <= again.report().reused_tokens <= PROMPT.shape[1]


def test_an_activated_adapter_is_not_shared(segments: Segments, tmp_path: Path) -> None:
    setup = Setup(activated())
    base = Setup(plain())
    calls = [torch.cat([PROMPT, torch.tensor([INVOCATION]), tiny.ids(1, 30, seed=seed)], dim=1) for seed in (5, 6)]
    with store_in(tmp_path) as store:
        for ids in (*calls, calls[0]):
            cache = segments(setup, store)
            assert_like(ask(setup, cache, ids), plainly(setup, ids))
            assert cache.report().reason
            store.flush()
        for _ in range(2):
            cache = segments(base, store)
            assert_like(ask(base, cache, calls[0]), plainly(base, calls[0]))
            store.flush()


def test_what_is_written_in_the_background_belongs_to_the_model_that_computed_it(segments: Segments, tmp_path: Path) -> None:
    setup = Setup(plain())
    untouched = Setup(copy.deepcopy(setup.runner))
    with store_in(tmp_path) as store:
        ask(setup, segments(setup, store), PROMPT)
        for parameter in setup.model.parameters():
            parameter.data.mul_(1.5)
        store.flush()
        cache = segments(setup, store)
        assert_like(ask(setup, cache), plainly(setup))
        assert cache.report().reused_tokens == 0
    with store_in(tmp_path) as store:
        cache = segments(untouched, store)
        assert_like(ask(untouched, cache), plainly(untouched))
        assert cache.report().reused_tokens >= 64


@pytest.mark.parametrize("name", CHANGES)
def test_a_library_serves_the_model_that_it_was_made_with_alone(name: str) -> None:
    change = CHANGES[name]
    setup = Setup(change.make())
    before = plainly(setup)
    library = library_of(setup.runner, PROMPT)
    with change.enter(setup):
        cache = WarmStartCache(setup.runner, library, strategy="exact" if change.bypassed else "align", gate=OPEN)
        assert_like(ask(setup, cache), plainly(setup))
        report = cache.report()
        assert (report.reused_tokens, report.strategy) == (0, "cold")
        assert report.refused
        if not change.in_call:
            with pytest.raises(ValueError, match=r"changed|may change|replaced|autocast|training mode|transformers knows"):
                library.add([QUESTION[0]])
    assert len(library) == 1
    if change.comes_back:
        cache = WarmStartCache(setup.runner, library, strategy="align", gate=OPEN)
        assert_like(ask(setup, cache), before)
        assert cache.report().reused_tokens >= 96
