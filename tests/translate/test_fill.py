"""Where the codes of some prompts go in a batch of others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.codes import CodedPrompt, CodesHead, Prompt, match_prompts
from tests import tiny
from tests.translate.pairs import FAMILIES, HALF, changed, fit, fitted, models
from tests.warmstart.warm import left_padded


def head_of(rows: list[list[int]]) -> CodesHead:
    return CodesHead("t", tuple(Prompt.of(row) for row in rows), ())


def match(head: CodesHead, wanted: list[list[int]], most: int, run: int = 0) -> CodedPrompt:
    padding = [max(map(len, wanted)) - len(text) for text in wanted]
    return match_prompts(head, [torch.tensor(text) for text in wanted], padding, most, run=run)


# Few beginnings, so that texts begin alike, and are each other's beginnings.
BEGINNINGS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9], [4] * 9, [4] * 17]
ends = st.lists(st.integers(1, 3), max_size=4)
texts = st.lists(st.builds(lambda beginning, end: beginning + end, st.sampled_from(BEGINNINGS), ends), min_size=1, max_size=4)


@given(coded=texts, wanted=texts)
def test_each_slot_that_is_filled_gets_the_codes_of_its_own_token(coded: list[list[int]], wanted: list[list[int]]) -> None:
    head, longest = head_of(coded), max(map(len, wanted))
    padding = [longest - len(text) for text in wanted]
    counts = [max((len(row) for row in coded if text[: len(row)] == row), default=-99) for text in wanted]
    slots = min(longest - 1, *(pad + count for pad, count in zip(padding, counts, strict=True)))
    if slots <= max(padding):
        with pytest.raises(ConfigError, match="another prompt" if min(counts) < 0 else "one row start at or after"):
            match(head, wanted, longest - 1)
        return
    prompt = match(head, wanted, longest - 1)
    assert prompt.slots == slots
    assert sorted([*(span.row for span in prompt.spans), *prompt.copies]) == list(range(len(wanted)))
    ids = [token for row in coded for token in row]
    for start, (row, first, count) in zip(prompt.starts, prompt.spans, strict=True):
        assert first == padding[row]
        assert ids[start : start + count] == wanted[row][: slots - padding[row]]
    for row, twin in prompt.copies.items():
        assert (wanted[row][: slots - padding[row]], padding[row]) == (wanted[twin][: slots - padding[twin]], padding[twin])


def test_rows_that_say_the_same_are_rebuilt_once() -> None:
    codes = fitted().encode(models()[0], tiny.ids(1, 20))
    prompt = match(codes.head, tiny.ids(1, 20).repeat(4, 1).tolist(), 19, run=4)
    assert ([span.row for span in prompt.spans], prompt.copies) == ([0], {1: 0, 2: 0, 3: 0})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_that_come_again_are_filled_as_all_others(family: str) -> None:
    model, consumer = FAMILIES[family](), changed(FAMILIES[family]())
    translator = fit(model, consumer, **HALF | {"payload": 2.0})
    # Rows of several lengths, one of them twice, few different tokens.
    rows = [tiny.ids(1, length, seed=length) % 7 for length in (20, 31)]
    codes = translator.encode(model, *left_padded(*rows))
    ids, mask = left_padded(rows[1], rows[0], rows[1])
    cache = TranslatedCache(consumer, translator, codes)
    assert cache.prefill(ids, mask) == 30
    for number, row in enumerate((rows[1], rows[0], rows[1])):
        alone = TranslatedCache(consumer, translator, translator.encode(model, row))
        alone.prefill(row)
        for layer, other in zip(cache.layers, alone.layers, strict=True):
            for made, expected in ((layer.keys, other.keys), (layer.values, other.values)):
                torch.testing.assert_close(made[number, :, -expected.shape[2] :], expected[0], rtol=1e-4, atol=1e-4)
            assert layer.keys.isfinite().all()
