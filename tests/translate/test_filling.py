"""Where the codes of some prompts go in a batch of others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.filling import Filling, place
from hf_kvcaches.translate.head import CodesHead, Row
from hf_kvcaches.translate.states import PromptTokens
from tests import tiny
from tests.translate.pairs import FAMILIES, HALF, changed, fit, fitted, models
from tests.warmstart.warm import left_padded


def head_of(rows: list[list[int]]) -> CodesHead:
    return CodesHead("t", "p", "c", "joint", "float32", tuple(Row.of(row) for row in rows), ())


def batch_of(texts: list[list[int]]) -> PromptTokens:
    return PromptTokens.of(*left_padded(*(torch.tensor([text]) for text in texts)))


def usable(coded: list[int], text: list[int]) -> int | None:
    """How many tokens of a text a coded row stands for; the last one is always left to be run."""
    if len(text) >= len(coded):
        return min(len(coded), len(text) - 1) if text[: len(coded)] == coded else None
    return len(text) // 8 * 8 - (len(text) % 8 == 0) if text[: len(text) // 8 * 8] == coded[: len(text) // 8 * 8] else None


# Few beginnings, so that texts begin alike, and are each other's beginnings.
BEGINNINGS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9], [4] * 9, [4] * 17]
ends = st.lists(st.integers(1, 3), max_size=4)
texts = st.lists(st.builds(lambda beginning, end: beginning + end, st.sampled_from(BEGINNINGS), ends), min_size=1, max_size=4)


@given(coded=texts, wanted=texts)
def test_each_slot_that_is_filled_gets_the_codes_of_its_own_token(coded: list[list[int]], wanted: list[list[int]]) -> None:
    tokens, head = batch_of(wanted), head_of(coded)
    counts = [max((n for row in coded if (n := usable(row, text)) is not None), default=None) for text in wanted]
    placed = place(head, tokens)
    if None in counts:
        assert placed is None
        return
    assert placed is not None
    places, slots = placed
    longest = max(map(len, wanted))
    padding = [longest - len(text) for text in wanted]
    assert places.padding == tuple(padding)
    assert slots == min(pad + count for pad, count in zip(padding, counts, strict=True))
    assert sorted([*places.rows, *places.copies]) == list(range(len(wanted)))
    if any(pad >= slots for pad in padding):
        return  # such a prompt is run
    filling = Filling.__new__(Filling)
    filling.tokens, filling.places = PromptTokens.of(tokens.ids[:, :slots], tokens.real[:, :slots]), places
    index = filling._codes_of(head)
    ids = torch.tensor([token for row in coded for token in row])
    found = ids if index is None else ids[index]
    expected = [token for row in places.rows for token in wanted[row][: slots - padding[row]]]
    assert found.tolist() == expected
    for row, twin in places.copies.items():
        assert (wanted[row][: slots - padding[row]], padding[row]) == (wanted[twin][: slots - padding[twin]], padding[twin])


def test_codes_in_their_own_order_are_used_as_they_came() -> None:
    coded = [[5, 6, 7, 8], [9, 8, 7, 6, 5, 4]]
    # Each text has one token more than was coded.
    tokens, head = batch_of([[*row, 3] for row in coded]), head_of(coded)
    placed = place(head, tokens)
    assert placed is not None
    filling = Filling.__new__(Filling)
    filling.tokens, filling.places = PromptTokens.of(tokens.ids[:, :-1], tokens.real[:, :-1]), placed[0]
    assert filling._codes_of(head) is None


def test_rows_that_say_the_same_are_rebuilt_once() -> None:
    codes = fitted().encode(models()[0], tiny.ids(1, 20))
    placed = place(codes.head, PromptTokens.of(tiny.ids(1, 20).repeat(4, 1)))
    assert placed is not None
    assert (placed[0].rows, placed[0].copies) == ((0,), {1: 0, 2: 0, 3: 0})


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gpt2"}))
def test_running_each_different_token_once_fills_what_running_all_does(family: str) -> None:
    model = FAMILIES[family]()
    translator = fit(model, changed(FAMILIES[family]()), **HALF)
    assert translator.settings.of_tokens_alone
    consumer = changed(FAMILIES[family]())
    whole = dataclasses.replace(translator, settings=dataclasses.replace(translator.settings, of_tokens_alone=False))
    # Rows of several lengths, one of them twice, few different tokens.
    rows = [tiny.ids(1, length, seed=length) % 7 for length in (20, 31)]
    codes = translator.encode(model, *left_padded(*rows))
    ids, mask = left_padded(rows[1], rows[0], rows[1])
    caches = [TranslatedCache(consumer, each, codes) for each in (translator, whole)]
    assert [cache.prefill(ids, mask) for cache in caches] == [30, 30]
    for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
        for made, expected in ((layer.keys, other.keys), (layer.values, other.values)):
            real = mask[:, None, :-1, None].bool().expand_as(expected)
            torch.testing.assert_close(made[real], expected[real], rtol=1e-4, atol=1e-4)
            assert made.isfinite().all()


def test_where_tokens_are_not_known_alone_all_are_run() -> None:
    model = tiny.gpt2()
    translator = fit(model, model, **HALF)
    assert not translator.settings.of_tokens_alone
    assert not fitted(recompute_layers=1).settings.of_tokens_alone
