"""What must not pass unseen, and what an error leaves behind."""

from __future__ import annotations

import pytest
import torch

from hf_kvcaches import ConfigError, EquipCache, UnsupportedError
from tests.conformance import models
from tests.conformance.driving import feed, tokens


def test_a_saved_stream_comes_back_with_its_keys_as_they_were_rotated(tmp_path) -> None:
    model, text = models.tiny("llama"), tokens(30, seed=1)
    for mask in (None, torch.tensor([[0] * 5 + [1] * 25])):  # a padded row's keys are kept without rotation
        cache = EquipCache(model, "streaming", 12)
        feed(model, cache, text, [24, *[1] * 6], mask)
        cache.save(tmp_path / "cache.safetensors")
        again = EquipCache.load(tmp_path / "cache.safetensors", model)
        more = tokens(8, seed=2)
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 8), value=1)
        torch.testing.assert_close(feed(model, again, more, mask=mask), feed(model, cache, more, mask=mask), rtol=0, atol=1e-5)


def test_logits_of_a_whole_prompt_are_no_drafts() -> None:
    model, text = models.tiny("llama"), tokens(30, seed=1)
    cache, plain = EquipCache(model, "streaming", 12), EquipCache(model, "streaming", 12)
    cache.activate_past_recording()
    torch.testing.assert_close(feed(model, cache, text, [30], keep=30), feed(model, plain, text, [30], keep=30))


def test_after_a_pass_that_failed_on_the_way_a_cache_wants_to_be_reset() -> None:
    model, text = models.tiny("gemma2"), tokens(20, seed=1)
    cache = EquipCache(model, "streaming", 0.5, decode_budget=8)
    with pytest.raises(ConfigError, match="decode_budget"):  # more of this prompt would stay
        feed(model, cache, text, [20])
    with pytest.raises(UnsupportedError, match="reset"):
        feed(model, cache, text[:, :10], [10])
    cache.reset()
    assert torch.isfinite(feed(model, cache, text[:, :10], [10])).all()


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_a_cache_that_forgot_everything_reads_on(policy: str) -> None:
    model, text, more = models.tiny("llama"), tokens(30, seed=1), tokens(5, seed=2)
    cache, fresh = EquipCache(model, policy, 40), EquipCache(model, policy, 40)
    feed(model, cache, text, [30])
    cache.evict(range(30))
    assert cache.report().kept == (0, 0)
    torch.testing.assert_close(feed(model, cache, more, [5]), feed(model, fresh, more, [5]), rtol=0, atol=1e-4)


def test_an_empty_cache_has_nothing_to_forget_or_to_edit() -> None:
    model = models.tiny("llama")
    cache = EquipCache(model, "streaming", 40)
    cache.evict([])
    with pytest.raises(ConfigError, match="positions"):
        cache.evict([0])
    with pytest.raises(ConfigError, match="empty"):
        cache.edit(model, 0, 0, [3, 4])
    with pytest.raises(ConfigError, match="budget"):
        EquipCache(model, "streaming", None)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_a_mask_that_differs_by_head_is_refused(policy: str, drafts: bool) -> None:
    model, text, cache = models.tiny("llama"), tokens(12, seed=1), EquipCache(models.tiny("llama"), policy, 12)
    before = 6 if drafts else 0
    if drafts:
        feed(model, cache, text[:, :6], [6])
        cache.activate_past_recording()
    mask = torch.ones(1, 4, 6, before + 6, dtype=torch.bool).tril(before)
    mask[:, 1, 3:, 0] = False
    with pytest.raises(UnsupportedError, match="head"), torch.no_grad():
        model(input_ids=text[:, before : before + 6], attention_mask=mask, past_key_values=cache)
