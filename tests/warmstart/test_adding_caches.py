"""`library.add(cache=...)` stores what a cache holds where that is proven to be the prompt's exact states, and refuses all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import EquipCache, GrowingCache, SegmentReuseCache, SegmentStore, WarmStartCache
from hf_kvcaches.errors import ConfigError
from tests import tiny
from tests.segments.test_cache import A, B, C, D, joined
from tests.warmstart.warm import OPEN, answer, library_of, tokens_run, words

EARLIER, CHANGED = joined(A, B, C), joined(A, D[:, :5], B, D[:, 5:8], C)


def entry(library: Any, key: str | None) -> dict[str, torch.Tensor]:
    return library.load({key: library.contents.entries[key].record})[key]


def filled(model: Any, cache: Any, ids: torch.Tensor = EARLIER, new: int = 4) -> Any:
    answer(model, ids, cache, new)
    return cache


CACHES: dict[str, Callable[[Any], Any]] = {
    "DynamicCache": lambda model: DynamicCache(config=model.config),
    "GrowingCache": GrowingCache,
    "WarmStartCache": lambda model: WarmStartCache(model, library_of(model)),
    "an exact prompt": lambda model: WarmStartCache(model, library_of(model, EARLIER)),
    "SegmentReuseCache": lambda model: SegmentReuseCache(model, SegmentStore("memory")),
}


@pytest.mark.parametrize("name", CACHES)
def test_what_is_taken_from_a_cache_is_what_running_the_prompt_gives_and_costs_one_token(name: str) -> None:
    model = tiny.llama()
    cache = filled(model, CACHES[name](model))
    before = {name: tensor.clone() for name, tensor in GrowingCache.from_cache(cache, model).owned_tensors().items()}
    run, taken = library_of(model, EARLIER), library_of(model)
    with tokens_run(model) as tokens:
        (key,) = taken.add(EARLIER[0], {"from": "a cache"}, cache=cache)
    assert tokens == [1]
    expected, found = entry(run, key), entry(taken, key)
    assert expected.keys() == found.keys()
    for part, tensor in expected.items():
        torch.testing.assert_close(found[part], tensor, atol=1e-5, rtol=1e-4)
    assert taken.provenance(str(key)) == {"from": "a cache"}
    after = GrowingCache.from_cache(cache, model).owned_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before), "the cache stays as it was"


def test_a_cache_whose_windows_have_dropped_tokens_is_refused_and_says_why() -> None:
    model = tiny.gemma2()
    cache, library = filled(model, WarmStartCache(model, library_of(model))), library_of(model)
    with pytest.raises(ConfigError, match="layers with a sliding window drop tokens when decoding begins"):
        library.add(EARLIER[0], cache=cache)
    assert not len(library)


def aligned(model: Any) -> Any:
    cache = filled(model, WarmStartCache(model, library_of(model, CHANGED), gate=OPEN))
    assert cache.report().strategy == "align"
    return cache


def rounded(model: Any) -> Any:
    cache = filled(model, WarmStartCache(model, library_of(model, EARLIER, quantization="int8")))
    assert cache.report().strategy == "exact"
    return cache


def approximate_segments(model: Any) -> Any:
    store = SegmentStore("memory")
    filled(model, SegmentReuseCache(model, store), joined(D, A, B))
    cache = filled(model, SegmentReuseCache(model, store, mode="approximate"), EARLIER)
    assert any(tier != "exact" and count for tier, count in cache.report().tiers.items()), cache.report().tiers
    return cache


def own_loop(model: Any) -> Any:
    cache = GrowingCache(model)
    model(input_ids=EARLIER, past_key_values=cache)
    return cache


def batch(model: Any) -> Any:
    return filled(model, GrowingCache(model), EARLIER.repeat(2, 1))


def padded(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(EARLIER)
    mask[:, :9] = 0
    answer(model, EARLIER, cache, 2, attention_mask=mask)
    return cache


def of_another_model(model: Any) -> Any:
    other = tiny.llama(seed=1)
    return filled(other, GrowingCache(other))


def changed_since(model: Any) -> Any:
    cache = filled(model, GrowingCache(model))
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    return cache


REFUSED = {
    "no cache": (lambda model: EARLIER, "a DynamicCache, or a cache of this package"),
    "fewer tokens": (lambda model: filled(model, GrowingCache(model), EARLIER[:, :20], 2), "the prompt has"),
    "other tokens": (lambda model: filled(model, GrowingCache(model), EARLIER.flip(1)), "other tokens"),
    "other tokens in a DynamicCache": (lambda model: filled(model, DynamicCache(), EARLIER.flip(1)), "the prompt's last token"),
    "masked tokens": (padded, "the prompt's last token"),
    "aligned": (aligned, "reused is not exact"),
    "rounded": (rounded, "reused is not exact"),
    "segments": (approximate_segments, "reused is not exact"),
    "a loop of one's own": (own_loop, "not known"),
    "a batch": (batch, "several rows"),
    "a batch in a DynamicCache": (lambda model: filled(model, DynamicCache(), EARLIER.repeat(2, 1)), "one row"),
    "evicted tokens": (lambda model: filled(model, EquipCache(model, "streaming", budget=16)), "every key and value"),
    "another model": (of_another_model, "another when it filled"),
    "a changed model": (changed_since, "another when it filled"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proven_to_be_exact_is_refused_with_the_reason(name: str) -> None:
    make, why = REFUSED[name]
    model = tiny.llama()
    cache = make(model)
    library = library_of(model)
    with pytest.raises(ConfigError, match=why):
        library.add(EARLIER[0], cache=cache)
    assert len(library) == 0


def test_a_cache_holds_one_prompt() -> None:
    model = tiny.llama()
    with pytest.raises(ConfigError, match="one prompt, the one that cache= holds"):
        library_of(model).add([A[0], B[0]], cache=filled(model, GrowingCache(model)))


def test_warming_up_reads_all_entries_or_those_that_are_near(tmp_path: Any) -> None:
    model, location = tiny.llama(), f"disk:{tmp_path / 'library'}"
    library_of(model, A, B, C, EARLIER, location=location)
    library = library_of(model, location=location)
    assert library.warm_up() == 4
    assert library.report().loads == 4
    assert library.warm_up(words().decode(CHANGED[0])) == 3
    assert library.warm_up([A[0].tolist(), A[0].tolist()]) == 3
    assert library_of(model).warm_up() == 0
