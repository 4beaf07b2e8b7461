"""Whatever is not reused says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvcaches import SegmentReuseCache, SegmentStore, WarmStartCache
from hf_kvcaches.reuse.policy import Admission
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


@pytest.mark.parametrize(("admit", "mode", "served"), [(lambda match: Admission("always"), "auto", "always"), (None, "exact", "computed")])
def test_a_rule_of_ones_own_reuses_segments_in_generate_and_the_default_does_not(admit: Any, mode: str, served: str) -> None:
    model, store = tiny.llama(), SegmentStore("memory")
    asked(model, SegmentReuseCache(model, store))
    cache = SegmentReuseCache(model, store, admit=admit)
    model.generate(MOVED, past_key_values=cache, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert cache.mode == mode
    assert cache.report().tiers[served] >= 80


@pytest.mark.parametrize("make", [segments, warm])
def test_token_ids_are_looked_up_however_they_are_passed(make: Any) -> None:
    model = tiny.llama()
    cache, store = make(model)
    if make is segments:
        asked(model, cache)
        store.flush()
        cache = SegmentReuseCache(model, store)
    with torch.no_grad():
        logits = model(PROMPT, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    assert cache.report().reused_tokens == 119
    assert torch.allclose(logits, asked(model, None), atol=1e-5)


def stored_segments(model: Any, folder: Path) -> SegmentStore:
    """A store in a folder that has a prompt in segments of 30 tokens."""
    store = SegmentStore(f"disk:{folder}")
    asked(model, SegmentReuseCache(model, store, spans=[[(start, start + 30) for start in range(0, 120, 30)]]))
    store.flush()
    return store


@pytest.mark.parametrize("gone", range(4))
def test_what_is_lost_between_blobs_that_were_read_is_computed(gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    store = stored_segments(model, tmp_path)
    asked(model, whole := SegmentReuseCache(model, store))
    lost = [key for span in whole.report().spans for key in span.segments][gone]
    load = SegmentStore.load
    monkeypatch.setattr(SegmentStore, "load", lambda self, *args: {key: found for key, found in load(self, *args).items() if key != lost})
    cache = SegmentReuseCache(model, store)
    assert torch.allclose(asked(model, cache), asked(model, None), atol=1e-5)
    assert cache.report().reused_tokens == 119 - (29 if gone == 3 else 30)


def test_a_hit_reads_all_blobs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    store = stored_segments(model, tmp_path)
    reads, get_many = [], type(store.catalog.blobs).get_many
    monkeypatch.setattr(type(store.catalog.blobs), "get_many", lambda self, keys: (reads.append(len(keys)), get_many(self, keys))[1])
    cache = SegmentReuseCache(model, store)
    asked(model, cache)
    assert cache.report().reused_tokens == 119
    assert reads == [4]
