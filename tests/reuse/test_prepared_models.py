"""Models as their users prepare them: with weights elsewhere, for training, under autocast, with heads of two sizes."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from transformers import LlamaForCausalLM

from hf_kvcaches import SegmentReuseCache, SegmentStore, WarmStartCache, WarmStartLibrary
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.translate.cache import TranslatedCache
from tests import tiny
from tests.families.models import build, families
from tests.segments.test_cache import A, B, C, D, first_logits, joined, plain
from tests.translate.pairs import fit
from tests.warmstart.warm import OPEN, library_of, logits_of, words

PREPARED = {"offloaded": cpu_offload, "for training": LlamaForCausalLM.enable_input_require_grads}


def family(name: str):
    return build(next(family for family in families() if family.name == name))


def reusing(model, prompt: torch.Tensor, mode: str) -> tuple[torch.Tensor, int]:
    """The logits behind a prompt, and how many tokens came from one before it."""
    store = SegmentStore("memory", quantization=None)
    first_logits(model, joined(A, B, C), SegmentReuseCache(model, store, mode="auto"))
    cache = SegmentReuseCache(model, store, mode=mode)
    return first_logits(model, prompt, cache), cache.report().reused_tokens


@pytest.mark.parametrize("name", PREPARED)
def test_prompts_are_taken_over_in_prepared_models(name: str) -> None:
    model, asked = tiny.llama(), ((joined(A, B, D), "auto"), (joined(D, B, A), "approximate"))
    expected = [reusing(model, *question) for question in asked]
    PREPARED[name](model)
    for question, (logits, reused) in zip(asked, expected, strict=True):
        got = reusing(model, *question)
        torch.testing.assert_close(got[0], logits, atol=1e-4, rtol=0)
        assert got[1] == reused > 0
    library = library_of(model, joined(A, B, C))
    for strategy in ("exact", "align"):
        warm = WarmStartCache(model, library, strategy=strategy, gate=OPEN)
        logits_of(model, joined(A, B, C, D), warm)
        assert warm.report().reused_tokens


def test_a_translator_is_fitted_to_offloaded_models_and_read_by_them() -> None:
    producer, consumer = tiny.llama(seed=1), tiny.llama()
    expected = fit(producer, consumer, payload=0.5, layers_per_code=1)
    codes = expected.encode(producer, joined(A, B))
    cache = TranslatedCache(consumer, expected, codes)
    logits = logits_of(consumer, joined(A, B), cache)
    cpu_offload(consumer)
    made = TranslatedCache(consumer, fit(producer, consumer, payload=0.5, layers_per_code=1), codes)
    torch.testing.assert_close(logits_of(consumer, joined(A, B), made), logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize("mode", ["exact", "auto", "approximate"])
def test_under_autocast_the_model_runs_its_prompts_and_nothing_is_stored(mode: str) -> None:
    model, store = tiny.llama(), SegmentStore("memory")
    library = WarmStartLibrary(model, words())
    library.add(joined(A, B)[0].tolist())
    first_logits(model, joined(A, B), SegmentReuseCache(model, store, mode="auto"))
    store.flush()
    before = store.report().segments
    with torch.autocast("cpu", torch.bfloat16):
        for prompt in (joined(A, B), joined(A, B, D)):
            for cache in (SegmentReuseCache(model, store, mode=mode), WarmStartCache(model, library, gate=OPEN)):
                assert torch.equal(first_logits(model, prompt, cache), plain(model, prompt))
                assert cache.report().reused_tokens == 0
    store.flush()
    assert store.report().segments == before


def test_a_family_that_computes_with_the_length_of_the_cache_keeps_segments_where_they_were() -> None:
    model = family("llama4_text")
    with pytest.raises(UnsupportedError, match="llama4_text"):
        SegmentReuseCache(model, SegmentStore("memory"), mode="approximate")
    assert SegmentReuseCache(model, SegmentStore("memory"), mode="auto").moving_refused


@pytest.mark.parametrize("name", ["gemma4_unified_text", "llama4_text"])
def test_a_start_is_reused_with_heads_of_two_sizes_and_with_chunks(name: str) -> None:
    model, ids = family(name), tiny.ids(1, 40) % 60 + 3
    store = SegmentStore("memory", quantization=None)
    for _ in range(2):
        cache = SegmentReuseCache(model, store, mode="exact")
        torch.testing.assert_close(first_logits(model, ids, cache), plain(model, ids), atol=1e-3, rtol=1e-3)
    assert cache.report().reused_tokens == 39


@pytest.mark.parametrize("name", ["cpmant", "git", "mllama", "bert"])
def test_models_of_whose_keys_too_little_is_known_are_refused_when_a_cache_is_made(name: str) -> None:
    with pytest.raises(UnsupportedError):
        SegmentReuseCache(family(name), SegmentStore("memory"))
