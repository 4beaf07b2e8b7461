"""Tokens that are taken back were never there: slots, scores and counters, bit for bit."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PersimmonConfig

from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.slots import SlotTable
from hf_kvcaches.errors import UnsupportedError
from tests import tiny
from tests.conformance import models
from tests.conformance.driving import feed, left_padded
from tests.equip.cases import POLICIES, POSITIONS, both_positions, build, held, same, state, text

each_cache = pytest.mark.parametrize(("policy", "positions"), [(policy, positions) for policy in POLICIES for positions in POSITIONS])


def model() -> Any:
    return models.tiny("llama")


def warm(policy: str, positions: str = "compact", rows: int = 1) -> EquipCache:
    """A full cache that begins to record."""
    cache = build(model(), policy, positions=positions)
    feed(model(), cache, torch.cat([text(30, 7 * row) for row in range(rows)]), [25, *[1] * 5])
    cache.activate_past_recording()
    return cache


@each_cache
def test_all_drafts_taken_back_leave_the_cache_bit_for_bit_as_it_was(policy: str, positions: str) -> None:
    cache = warm(policy, positions, rows=2)
    before = state(cache)
    feed(model(), cache, torch.cat([text(7, 50), text(7, 60)]), [7])
    cache.crop(-7)
    assert same(state(cache), before)


@pytest.mark.parametrize(("prompt", "recorded", "taken"), [(6, 1, 5), (3, 17, 17)])
def test_a_stream_without_some_of_its_sinks_gets_others(prompt: int, recorded: int, taken: int) -> None:
    one, other = (build(model(), "streaming", 8) for _ in range(2))
    feed(model(), one, text(prompt), [prompt])
    one.activate_past_recording()
    feed(model(), one, text(recorded, 40))
    one.crop(-taken)
    feed(model(), other, text(prompt + recorded - taken), [prompt + recorded - taken])
    found, expected = (feed(model(), cache, text(14, 60)) for cache in (one, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "gpt2", "persimmon"])
@pytest.mark.parametrize("prompt", [30, 12, 2], ids=["full", "filling", "before the sinks"])
def test_drafts_attend_as_single_tokens_do_and_are_taken_back_as_they_are(policy: str, family: str, prompt: int) -> None:
    # Persimmon does not tell its attention function the positions.
    other = tiny.build(PersimmonConfig(**tiny._SHAPE)) if family == "persimmon" else models.tiny(family)
    together, single = build(other, policy), build(other, policy)
    for cache in (together, single):
        feed(other, cache, text(prompt), [prompt])
        cache.activate_past_recording()
    found = feed(other, together, text(9, 50), [9], keep=0)
    torch.testing.assert_close(found, feed(other, single, text(9, 50), keep=0), rtol=0, atol=1e-4)
    for cache in (together, single):
        cache.crop(-5)
    found, expected = (feed(other, cache, text(9, 30), keep=0) for cache in (together, single))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@both_positions
def test_drafts_of_padded_rows_attend_as_single_tokens_do(positions: str) -> None:
    ids, mask = left_padded([text(30), text(22, 30)])
    together, single = (build(model(), "streaming", positions=positions) for _ in range(2))
    for cache in (together, single):
        feed(model(), cache, ids, [30], mask)
        cache.activate_past_recording()
    new = torch.cat([text(6, 50), text(6, 60)])
    whole = torch.cat([mask, torch.ones_like(new)], 1)
    found = feed(model(), together, new, [6], whole, keep=0)
    torch.testing.assert_close(found, feed(model(), single, new, mask=whole, keep=0), rtol=0, atol=1e-4)


@each_cache
def test_drafts_of_which_some_stay_equal_single_steps_bit_for_bit(policy: str, positions: str) -> None:
    # No token twice: where two keys of one token are worth the same, rounding would decide.
    prompt, last, others = text(95, 1).split([30, 5, 60], 1)
    cache = build(model(), policy, positions=positions)
    feed(model(), cache, prompt, [25, *[1] * 5])
    cache.activate_past_recording()
    plain = copy.deepcopy(cache)
    for kept, drafts in ((3, 5), (1, 6), (4, 0), (0, 3), (2, 9), (1, 14)):
        new, others = others[:, : kept + drafts], others[:, kept + drafts :]
        feed(model(), cache, new, [kept + drafts])
        cache.crop(-drafts)
        if kept:
            feed(model(), plain, new[:, :kept])
            plain.crop(0)
        assert cache.seen == plain.seen
        # A pass over many tokens multiplies its matrices in another order than one token at a time.
        for one, other in zip(held(cache), held(plain), strict=True):
            assert torch.equal(one, other)
        expected = state(plain)
        for name, tensor in ((name, value) for name, value in state(cache).items() if isinstance(value, torch.Tensor)):
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4, equal_nan=True, msg=name)
    logits = feed(model(), cache, last)
    torch.testing.assert_close(logits, feed(model(), plain, last), rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv"])
def test_cuts_leave_the_same_bits_whatever_was_drafted(policy: str) -> None:
    ways = []
    for drafts in (text(4, 70), text(4, 20)):
        cache = warm(policy)
        feed(model(), cache, torch.cat([text(3, 50), drafts], 1), [7])
        cache.crop(-4)
        ways.append(cache)
    assert same(state(ways[0]), state(ways[1]))


@pytest.mark.parametrize("policy", ["streaming", "h2o", "keydiff"])
def test_padded_rows_are_taken_back_as_they_were(policy: str) -> None:
    ids, mask = left_padded([text(30), text(12, 30), text(21, 60)])
    cache = build(model(), policy)
    feed(model(), cache, ids, [30], mask)
    cache.activate_past_recording()
    before = state(cache)
    new = torch.cat([text(6, 5 * row) for row in range(3)])
    feed(model(), cache, new, [6], torch.cat([mask, torch.ones_like(new)], 1))
    cache.crop(-6)
    assert same(state(cache), before)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_with_drafts_behind_it_in_the_first_call_is_pruned_as_the_prompt_alone(policy: str) -> None:
    drafted, plain = build(model(), policy), build(model(), policy)
    for cache in (drafted, plain):
        cache.activate_past_recording()
    feed(model(), plain, text(30), [30])
    # As assisted generation asks: a logit for the prompt's end and one for each draft.
    feed(model(), drafted, text(35), [35], keep=6)
    drafted.crop(-5)
    assert drafted.seen == 30
    for one, other in zip(held(drafted), held(plain), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(feed(model(), drafted, text(9, 50)), feed(model(), plain, text(9, 50)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "keydiff"])
def test_cropping_more_than_was_recorded_is_refused_and_loses_nothing(policy: str) -> None:
    cache = warm(policy)
    feed(model(), cache, text(4, 50), [4])
    before = state(cache)
    with pytest.raises(UnsupportedError, match=r"activate_past_recording\(\)"):
        cache.crop(-5)
    assert same(state(cache), before)
    cache.crop(-4)
    assert cache.seen == 30


def test_cropping_without_a_record_is_refused_once_tokens_are_gone_and_possible_before() -> None:
    cache = build(model(), "streaming")
    feed(model(), cache, text(12), [10, 1, 1])
    cache.crop(-5)
    assert cache.seen == 7
    other = build(model(), "streaming")
    feed(model(), other, text(7), [7])
    logits = feed(model(), cache, text(30, 40))
    torch.testing.assert_close(logits, feed(model(), other, text(30, 40)), rtol=0, atol=1e-4)
    before = state(cache)
    with pytest.raises(UnsupportedError, match="crop"):
        cache.crop(-1)
    assert same(state(cache), before)


def test_a_block_that_failed_is_not_among_what_can_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = warm("h2o")
    before = state(cache)
    feed(model(), cache, text(1, 50), [1])
    monkeypatch.setattr(SlotTable, "append", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        feed(model(), cache, text(4, 60), [4], keep=2)  # a block, and a draft
    monkeypatch.undo()
    feed(model(), cache, text(1, 70), [1])
    cache.crop(-2)
    assert same(state(cache), before)


def test_what_was_recorded_before_a_crop_is_final() -> None:
    cache = warm("h2o")
    feed(model(), cache, text(3, 50), [3])
    cache.crop(0)
    with pytest.raises(UnsupportedError, match="remembers 0"):
        cache.crop(-1)
    assert cache.seen == 33


@pytest.mark.parametrize("policy", ["streaming", "h2o", "keydiff"])
@both_positions
def test_padded_questions_that_are_recorded_equal_those_of_single_rows(policy: str, positions: str) -> None:
    prompts, questions = [text(30), text(20, 30)], [text(5, 60), text(3, 70)]
    ids, mask = left_padded(prompts)
    asked, asked_mask = left_padded(questions)
    cache = build(model(), policy, positions=positions)
    feed(model(), cache, ids, [30], mask)
    cache.activate_past_recording()
    logits = feed(model(), cache, asked, [5], torch.cat([mask, asked_mask], 1))
    for row in range(2):
        alone = build(model(), policy, positions=positions)
        feed(model(), alone, prompts[row], [prompts[row].shape[1]])
        alone.activate_past_recording()
        expected = feed(model(), alone, questions[row], [questions[row].shape[1]])
        torch.testing.assert_close(logits[row], expected[0], rtol=0, atol=1e-4)
