"""Blocks are exactly those of difflib's matcher, in a fraction of its time, and none is missed that has moved."""

from __future__ import annotations

import difflib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_kvcaches.reuse import alignment as module
from hf_kvcaches.reuse.alignment import Block, align
from tests import testbed
from tests.costs import seconds


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(testbed.FOLDER / "base")


@pytest.fixture(scope="module")
def book(tokenizer) -> list[int]:
    return tokenizer.encode(testbed.held_out()[:60_000], add_special_tokens=False)


def slow_start(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def slow_align(source: list[int], target: list[int], shortest: int) -> list[Block]:
    """What both begin and end with is taken off, where it is long enough; difflib does the rest."""
    head = slow_start(source, target)
    head = head if head >= shortest else 0
    tail = slow_start(source[head:][::-1], target[head:][::-1])
    tail = tail if tail >= shortest else 0
    a, b = source[head : len(source) - tail], target[head : len(target) - tail]
    middle = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    blocks = [Block(0, 0, head), *(Block(m.a + head, m.b + head, m.size) for m in middle)]
    blocks.append(Block(len(source) - tail, len(target) - tail, tail))
    return [block for block in blocks if block.length >= shortest]


def coverage(blocks: list[Block]) -> int:
    return sum(block.length for block in blocks)


@st.composite
def edited(draw: st.DrawFn, alphabet: int = 9, longest: int = 40) -> tuple[list[int], list[int]]:
    """A row, and the same after some stretches were moved, replaced, put in or left out."""
    row = st.lists(st.integers(0, alphabet), max_size=longest)
    source = draw(row)
    target = list(source)
    for _ in range(draw(st.integers(0, 4))):
        start, stop = sorted((draw(st.integers(0, len(target))), draw(st.integers(0, len(target)))))
        cut = target[start:stop]
        target[start:stop] = draw(st.sampled_from([[], cut + cut])) if draw(st.booleans()) else draw(row)[:5]
        if draw(st.booleans()):
            target += cut
    return source, target


@given(pair=edited(), shortest=st.integers(1, 5))
def test_blocks_in_order_are_those_of_difflib(pair, shortest):
    source, target = pair
    assert align(source, target, shortest) == slow_align(source, target, shortest)


@given(seed=st.integers(0, 10**6), edits=st.integers(0, 12), shortest=st.integers(1, 8))
def test_blocks_of_book_text_are_those_of_difflib(book, seed, edits, shortest):
    rng = random.Random(seed)
    start = rng.randrange(len(book) - 2000)
    source = book[start : start + rng.randint(100, 400)]
    target = list(source)
    for _ in range(edits):
        at = rng.randrange(len(target))
        target[at : at + rng.randrange(6)] = book[start + 1000 : start + 1000 + rng.randrange(6)]
    assert align(source, target, shortest) == slow_align(source, target, shortest)


@given(pair=edited(), shortest=st.integers(1, 5), moved=st.booleans(), far=st.sampled_from([1, -1, 2**40]))
def test_blocks_hold_equal_tokens_and_do_not_overlap(pair, shortest, moved, far):
    source, target = ([token * far for token in row] for row in pair)
    blocks = align(source, target, shortest, moved=moved)
    end = s_end = 0
    for s, t, length in blocks:
        assert length >= shortest
        assert source[s : s + length] == target[t : t + length]
        assert len(target[t : t + length]) == length
        assert t >= end
        assert moved or s >= s_end
        end, s_end = t + length, s + length


@given(pair=edited(), shortest=st.integers(1, 5))
def test_every_token_that_stands_in_a_long_enough_run_between_blocks_is_covered_when_blocks_may_move(pair, shortest):
    source, target = pair
    blocks = align(source, target, shortest, moved=True)
    covered = np.zeros(len(target), bool)
    for block in blocks:
        covered[block.target : block.target + block.length] = True
    known = {tuple(source[i : i + shortest]) for i in range(len(source) - shortest + 1)}
    for i in range(len(target) - shortest + 1):
        # What was left over must be too short, or have a token that a longer block took.
        assert covered[i : i + shortest].any() or tuple(target[i : i + shortest]) not in known
    # difflib takes its longest block first as well, but from fewer places: the first block is never longer than here.
    longest = difflib.SequenceMatcher(None, source, target, autojunk=False).find_longest_match().size
    head, tail = slow_start(source, target), slow_start(source[::-1], target[::-1])
    if longest >= shortest and head < shortest and tail < shortest:
        assert max(block.length for block in blocks) == longest


def test_paragraphs_in_another_order_are_found_whole(book):
    parts = [book[i * 100 : i * 100 + 90] for i in range(8)]
    order = [0, 3, 1, 2, 6, 5, 4, 7]
    source, target = [t for p in parts for t in p], [t for i in order for t in parts[i]]
    blocks = align(source, target, moved=True)
    assert coverage(blocks) == len(target)
    assert len(blocks) == 7
    assert 0.5 < coverage(align(source, target)) / len(target) < 0.9


def test_what_comes_twice_in_the_target_is_found_twice_when_moved():
    source = [1, 2, 3, 4, 5, 6]
    assert align(source, [9, 2, 3, 4, 8, 2, 3, 4], 3, moved=True) == [Block(1, 1, 3), Block(1, 5, 3)]
    assert align(source, [9, 2, 3, 4, 8, 2, 3, 4, 7], 3) == [Block(1, 1, 3)]


@pytest.mark.parametrize("moved", [False, True])
def test_identical_rows_are_one_block_and_empty_ones_none(book, moved):
    assert align(book[:900], book[:900], moved=moved) == [Block(0, 0, 900)]
    assert align([], [], moved=moved) == align([], [1, 2, 3], 1, moved=moved) == align([1, 2], [], 1, moved=moved) == []
    assert align(np.array([1, 2, 3]), np.array([1, 2, 3], np.int32), 4, moved=moved) == []


def test_a_common_beginning_is_kept_even_where_a_longer_block_would_break_it():
    source = [1, 2, 3, 4, 9, 2, 3, 4, 5, 6, 7]
    target = [1, 2, 3, 4, 5, 6, 7, 8]
    assert align(source, target, 3) == [Block(0, 0, 4), Block(8, 4, 3)]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("row", [[1] * 700, [1, 2] * 350, [1, 1, 1, 2, 3] * 140], ids=["one", "two", "pattern"])
def test_rows_that_repeat_themselves_take_little_time_and_are_covered_nearly_whole(row, moved):
    target = [*row[:300], 7, 8, *row[320:600], 9, *row[600:]]
    assert seconds(lambda: align(row, target, moved=moved)) < 0.5
    assert coverage(align(row, target, moved=moved)) >= 0.9 * len(target)


def test_it_is_fast_at_900_tokens(book):
    source = book[:900]
    target = [*source[:100], 5, *source[101:400], 6, 7, *source[404:700], *source[702:]]
    # Twice the bar: other tests may be running.
    assert seconds(lambda: align(source, target), times=20) < 2e-3
    assert seconds(lambda: align(source, book[5000:5900]), times=20) < 6e-3


def test_only_the_best_diagonals_are_looked_at_when_nearly_all_is_equal(monkeypatch):
    looked = []
    real = module._likely_runs
    monkeypatch.setattr(module, "_likely_runs", lambda a, b, diagonals, shortest: looked.append(len(diagonals)) or real(a, b, diagonals, 4))
    align([1] * 300 + [2], [3] + [1] * 300)
    assert looked
    assert looked[0] <= 64
