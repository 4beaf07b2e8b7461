"""Whatever is not reused says why, and what takes longer to fetch than to compute is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_kvcaches import SegmentReuseCache, SegmentStore, WarmStartCache
from hf_kvcaches.core.splicing import pipeline
from hf_kvcaches.core.splicing.speed import note_pass, seconds_to_compute
from hf_kvcaches.segments.tiers import Candidate, SegmentTier, TierContext, Verdict
from tests import tiny
from tests.warmstart.warm import library_of

PROMPT = tiny.ids(1, 120, seed=1)
MOVED = torch.cat([tiny.ids(1, 20, seed=2), PROMPT[:, :90], tiny.ids(1, 5, seed=3)], dim=1)


def segments(model: Any) -> tuple[Any, Any]:
    store = SegmentStore("memory")
    return SegmentReuseCache(model, store), store


def warm(model: Any) -> tuple[Any, Any]:
    library = library_of(model, PROMPT)
    return WarmStartCache(model, library), library


def asked(model: Any, cache: Any, ids: torch.Tensor = PROMPT, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True, **{"logits_to_keep": 1, **inputs}).logits[:, -1]


CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "embeddings": (
        lambda model, cache: model(inputs_embeds=model.get_input_embeddings()(PROMPT), past_key_values=cache, logits_to_keep=1),
        "inputs_embeds",
    ),
    "positions of one's own": (lambda model, cache: asked(model, cache, position_ids=torch.arange(3, 123)[None]), "position_ids"),
    "all logits": (lambda model, cache: asked(model, cache, logits_to_keep=0), "logits_to_keep"),
    "several logits": (lambda model, cache: asked(model, cache, logits_to_keep=5), "last 5 tokens"),
    "gradients": (lambda model, cache: model(input_ids=PROMPT, past_key_values=cache, logits_to_keep=1), "Gradients"),
    "the insides of layers": (lambda model, cache: asked(model, cache, output_hidden_states=True), "output_hidden_states"),
    "a mask with a hole": (lambda model, cache: asked(model, cache, attention_mask=(torch.arange(120) != 60).long()[None]), "mask"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("make", [segments, warm])
def test_a_prompt_that_is_not_looked_up_says_why(make: Any, name: str) -> None:
    model = tiny.llama()
    cache, _ = make(model)
    call, words = CALLS[name]
    with torch.set_grad_enabled(name == "gradients"):
        call(model, cache)
    assert words in cache.report().reason
    assert cache.report().reused_tokens == 0
    cache.reset()
    assert cache.report().reason == ""


@pytest.mark.parametrize("make", [segments, warm])
def test_hooks_that_may_change_the_model_are_the_reason(make: Any) -> None:
    model = tiny.llama()
    cache, _ = make(model)
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    asked(model, cache)
    handle.remove()
    assert "hook" in cache.report().reason


@pytest.mark.parametrize("make", [segments, warm])
def test_a_prompt_that_is_looked_up_has_no_reason_and_keeps_none_of_its_decode_steps(make: Any) -> None:
    model = tiny.llama()
    cache, _ = make(model)
    model.generate(PROMPT, past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert cache.report().reason == ""


@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_what_takes_longer_to_fetch_than_to_compute_is_computed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    model, store = tiny.llama(), SegmentStore("memory")
    asked(model, SegmentReuseCache(model, store))
    store.flush()
    expected = asked(model, None)
    monkeypatch.setattr(store.catalog, "seconds_to_read", lambda keys: seconds)
    note_pass(model, 1e6, 1.0)
    cache = SegmentReuseCache(model, store)
    torch.testing.assert_close(asked(model, cache), expected, atol=1e-4, rtol=0)
    report = cache.report()
    assert (report.reused_tokens > 0) == (seconds == 0)
    assert all("To fetch what is stored takes" in span.reason for span in report.spans if seconds)


def test_a_read_that_nobody_would_notice_is_made_however_fast_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = tiny.llama(), SegmentStore("memory")
    asked(model, SegmentReuseCache(model, store))
    store.flush()
    monkeypatch.setattr(store.catalog, "seconds_to_read", lambda keys: pipeline.NOTICED * 0.9)
    note_pass(model, 1e18, 1.0)
    cache = SegmentReuseCache(model, store)
    asked(model, cache)
    assert cache.report().reused_tokens > 0


def test_the_speed_of_a_model_is_that_of_its_fastest_late_prompt() -> None:
    model = tiny.llama()
    assert seconds_to_compute(model, 1e6) is None
    note_pass(model, 1e6, 2.0)
    note_pass(model, 1e6, 1.0)
    note_pass(model, 0.0, 0.0)
    assert seconds_to_compute(model, 2e6) == pytest.approx(2.0)
    for _ in range(20):
        note_pass(model, 1e6, 4.0)
    assert seconds_to_compute(model, 1e6) == pytest.approx(4.0)


class Always(SegmentTier):
    """Reuses everything as it is."""

    name = "always"

    def admit(self, candidate: Candidate, context: TierContext) -> Verdict:
        return Verdict((candidate.reused(self.name, context),))


@pytest.mark.parametrize(("tiers", "mode", "served"), [([Always()], "auto", "always"), (None, "exact", "computed")])
def test_tiers_of_ones_own_reuse_segments_in_generate_and_the_default_does_not(tiers: Any, mode: str, served: str) -> None:
    model, store = tiny.llama(), SegmentStore("memory")
    asked(model, SegmentReuseCache(model, store))
    cache = SegmentReuseCache(model, store, tiers=tiers)
    model.generate(MOVED, past_key_values=cache, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert cache.mode == mode
    assert cache.report().tiers[served] >= 90
