"""Caches that reuse keep of a sliding window what the model's own cache keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import SegmentReuseCache, SegmentStore, UnsupportedError, WarmStartCache
from hf_kvcaches.compat import cache_kwargs
from tests import tiny
from tests.warmstart.warm import library_of

PROMPT = tiny.ids(2, 200, seed=3)
MORE = tiny.ids(2, 90, seed=4)
WINDOW = 8


@pytest.fixture(scope="module")
def model():
    return tiny.gemma2()


def segments(model, store=None):
    return SegmentReuseCache(model, store or SegmentStore("memory"))


def warm(model):
    return WarmStartCache(model, library_of(model, PROMPT[:1, :150]))


CACHES = {"segments": segments, "warm start": warm}


def fed(model, cache, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, logits_to_keep=1, **cache_kwargs(model, cache)).logits[:, -1]


def decoded(model, cache, ids: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Logits of a prompt and of the tokens that follow it in `MORE`, one at a time."""
    rows = [fed(model, cache, ids)] + [fed(model, cache, MORE[: len(ids), step : step + 1]) for step in range(steps)]
    return torch.stack(rows)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("rows", [1, 2])
def test_layers_with_a_window_keep_a_window_from_the_first_decode_step_on(model, name, rows):
    cache, plain = CACHES[name](model), DynamicCache(config=model.config)
    found, expected = (decoded(model, each, PROMPT[:rows], steps=80) for each in (cache, plain))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
    sliding = [layer.is_sliding for layer in plain.layers]
    for layer, slides in zip(cache.layers, sliding, strict=True):
        assert layer.seen == 280
        assert layer.keys.shape[2] == layer.kept
        assert (layer.kept == 280) if not slides else (WINDOW - 1 <= layer.kept < WINDOW + 64)
    slots = [buffer.shape[2] for layer in cache.layers for buffer in layer.owned_tensors().values()]
    assert sorted(slots)[: len(slots) // 2][-1] <= WINDOW + 64


@pytest.mark.parametrize("name", CACHES)
def test_chats_go_on_after_tokens_have_left_the_window(model, name):
    cache, plain = CACHES[name](model), DynamicCache(config=model.config)
    for turn in (PROMPT[:1], tiny.ids(1, 120, seed=5), tiny.ids(1, 3, seed=6), tiny.ids(1, 200, seed=7)):
        found, expected = (decoded(model, each, turn, steps=4) for each in (cache, plain))
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
        clone = copy.deepcopy(cache)
        torch.testing.assert_close(fed(model, clone, MORE[:1, 5:6]), fed(model, copy.deepcopy(plain), MORE[:1, 5:6]), atol=2e-4, rtol=1e-3)


def test_what_is_stored_after_tokens_have_left_the_window_is_right(model):
    store = SegmentStore("memory")
    ids = torch.cat([PROMPT[:1], MORE[:1, :80], tiny.ids(1, 150, seed=8)], 1)
    chat = segments(model, store)
    decoded(model, chat, ids[:, :200], steps=80)
    fed(model, chat, ids[:, 280:])
    chat.crop(-1)
    store.flush()
    for _ in range(2):
        cache = segments(model, store)
        found = decoded(model, cache, ids)
        torch.testing.assert_close(found, decoded(model, DynamicCache(config=model.config), ids), atol=2e-4, rtol=1e-3)
        assert cache.report().reused_tokens >= 200


def test_rows_can_be_repeated_after_tokens_have_left_the_window(model):
    cache, plain = segments(model), DynamicCache(config=model.config)
    for each in (cache, plain):
        decoded(model, each, PROMPT)
        each.batch_repeat_interleave(2)
        each.reorder_cache(torch.tensor([3, 0, 1, 1]))
    new = MORE[:1, 7:8].repeat(4, 1)
    torch.testing.assert_close(fed(model, cache, new), fed(model, plain, new), atol=2e-4, rtol=1e-3)


def test_a_saved_cache_has_its_windows(model, tmp_path):
    cache = segments(model)
    decoded(model, cache, PROMPT[:1])
    cache.save(tmp_path / "cache.safetensors")
    loaded = SegmentReuseCache.load(tmp_path / "cache.safetensors", model)
    new = tiny.ids(1, 30, seed=9)
    assert [layer.kept for layer in loaded.layers] == [layer.kept for layer in cache.layers]
    torch.testing.assert_close(decoded(model, loaded, new), decoded(model, cache, new), atol=2e-4, rtol=1e-3)


def test_a_crop_that_would_need_dropped_tokens_is_refused_and_changes_nothing(model):
    cache = segments(model)
    decoded(model, cache, PROMPT[:1])
    with pytest.raises(UnsupportedError, match="have dropped some"):
        cache.crop(-20)
    assert {layer.seen for layer in cache.layers} == {203}
    cache.crop(-3)
    expected = fed(model, DynamicCache(config=model.config), torch.cat([PROMPT[:1], MORE[:1, 9:10]], 1))
    torch.testing.assert_close(fed(model, cache, MORE[:1, 9:10]), expected, atol=2e-4, rtol=1e-3)
    cache.crop(-cache.seen)
    again = decoded(model, cache, PROMPT[:1])
    torch.testing.assert_close(again, decoded(model, DynamicCache(config=model.config), PROMPT[:1]), atol=2e-4, rtol=1e-3)


def test_drafts_can_be_cropped_as_long_as_past_tokens_are_recorded(model):
    cache, text = segments(model), [PROMPT[:1], MORE[:1, :1]]
    fed(model, cache, PROMPT[:1])
    cache.activate_past_recording()
    fed(model, cache, MORE[:1, :1])
    for step in range(20):
        fed(model, cache, MORE[:1, step : step + 6])
        cache.crop(-4)
        text.append(MORE[:1, step : step + 2])
    expected = fed(model, DynamicCache(config=model.config), torch.cat([*text, MORE[:1, 9:10]], 1))
    torch.testing.assert_close(fed(model, cache, MORE[:1, 9:10]), expected, atol=2e-4, rtol=1e-3)
