"""What is reused of a prompt: equal tokens, behind guards, before the tail; whatever the prompts are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.reuse.alignment import Block, align
from hf_kvcaches.reuse.tokens import Ids, as_ids
from hf_kvcaches.warmstart.library import Neighbour
from hf_kvcaches.warmstart.planning import SHORTEST, SHORTEST_MOVED, Choice, best_aligned, reusable_blocks

R = np.random.default_rng(0)
TEXT = as_ids(R.permutation(500)[:120])
OTHER = as_ids(1000 + R.permutation(500)[:120])


def joined(*parts: Ids) -> Ids:
    return np.concatenate(parts)


def pairs_of(blocks: tuple[Block, ...]) -> dict[int, int]:
    """For each place of the target that is reused, where it stands in the source."""
    return {b.target + n: b.source + n for b in blocks for n in range(b.length)}


def slow(source: Ids, target: Ids, guard: int, tail: int) -> dict[int, int]:
    """The rule, token by token, on the blocks of the alignment."""
    found: dict[int, int] = {}
    before: Block | None = None
    for block in align(source, target, SHORTEST, moved=True):
        head = block.source == 0 and block.target == 0
        moved = not head and before is not None and block.source < before.source + before.length
        for n in range(block.length):
            s, t = block.source + n, block.target + n
            last = t >= len(target) - max(tail, 1)
            # How many tokens before this one are the same, on the same diagonal.
            alike = 0
            while alike < min(s, t) and source[s - alike - 1] == target[t - alike - 1]:
                alike += 1
            exact = s == t == alike
            if not last and not (moved and block.length < SHORTEST_MOVED) and (exact or alike >= guard):
                found[t] = s
        before = block
    return found


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Ids, Ids]:
    """Two prompts: pieces of a text that are kept, moved, dropped or put in, and tokens that are changed."""
    size = draw(st.sampled_from([2, 5, 300]))
    source = as_ids(draw(st.lists(st.integers(0, size), min_size=1, max_size=70)))
    target: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(source)))
        target += source[start : start + draw(st.integers(0, 60))].tolist()
        target += draw(st.lists(st.integers(0, size), max_size=6))
    return source, as_ids(target or [0])


@given(prompts(), st.integers(0, 12), st.integers(0, 20))
def test_what_is_reused_is_equal_guarded_and_before_the_tail(case: tuple[Ids, Ids], guard: int, tail: int) -> None:
    source, target = case
    blocks = reusable_blocks(source, target, guard=guard, tail=tail)
    place = 0
    for block in blocks:
        assert block.length > 0
        assert block.target >= place, "blocks overlap, or are out of order"
        place = block.target + block.length
        assert (source[block.source :][: block.length] == target[block.target : place]).all()
    assert place <= max(0, len(target) - max(1, tail))
    for t, s in pairs_of(blocks).items():
        exact = s == t and (source[:s] == target[:t]).all()
        guarded = s >= guard and t >= guard and (source[s - guard : s] == target[t - guard : t]).all()
        assert exact or guarded


@given(prompts(), st.integers(0, 12), st.integers(0, 20))
def test_all_that_the_rule_allows_is_reused(case: tuple[Ids, Ids], guard: int, tail: int) -> None:
    source, target = case
    assert pairs_of(reusable_blocks(source, target, guard=guard, tail=tail)) == slow(source, target, guard, tail)


@given(st.integers(0, 119), st.integers(1, 10), st.integers(0, 12), st.integers(0, 20))
def test_around_one_change_all_but_the_change_the_guard_and_the_tail_is_reused(place: int, size: int, guard: int, tail: int) -> None:
    target = TEXT.copy()
    stop = min(place + size, 120)
    target[place:stop] = OTHER[place:stop]
    end = 120 - max(1, tail)
    head = set(range(place)) if place >= SHORTEST else set()
    rest = set(range(stop + guard, 120)) if 120 - stop >= SHORTEST else set()
    expected = {t: t for t in head | rest if t < end}
    assert pairs_of(reusable_blocks(TEXT, target, guard=guard, tail=tail)) == expected


@pytest.mark.parametrize("guard", [0, 8])
def test_what_both_begin_with_needs_no_guard_and_what_follows_an_insertion_does(guard: int) -> None:
    target = joined(TEXT[:40], OTHER[:3], TEXT[40:])
    assert reusable_blocks(TEXT, target, guard=guard, tail=16) == (Block(0, 0, 40), Block(40 + guard, 43 + guard, 80 - guard - 16))


def test_short_stretches_are_reused_where_they_are_in_order_and_not_where_they_have_moved() -> None:
    kept = joined(OTHER[:5], TEXT[10:30], OTHER[5:10], TEXT[50:70], OTHER[10:20])
    assert reusable_blocks(TEXT, kept, guard=8, tail=1) == (Block(18, 13, 12), Block(58, 38, 12))
    moved = joined(OTHER[:5], TEXT[50:70], OTHER[5:10], TEXT[10:30], OTHER[10:20])
    assert reusable_blocks(TEXT, moved, guard=8, tail=1) == (Block(58, 13, 12),)
    longer = joined(OTHER[:5], TEXT[50:70], OTHER[5:10], TEXT[10 : 10 + SHORTEST_MOVED], OTHER[10:20])
    assert reusable_blocks(TEXT, longer, guard=8, tail=1)[1:] == (Block(18, 38, SHORTEST_MOVED - 8),)


def test_a_stretch_no_longer_than_its_guard_is_run() -> None:
    target = joined(OTHER[:5], TEXT[10:18], OTHER[5:40])
    assert reusable_blocks(TEXT, target, guard=8, tail=1) == ()
    assert reusable_blocks(TEXT, target, guard=7, tail=1) == (Block(17, 12, 1),)


def test_the_tail_is_run_though_the_prompts_are_the_same() -> None:
    assert reusable_blocks(TEXT, TEXT, guard=8, tail=16) == (Block(0, 0, 104),)
    assert reusable_blocks(TEXT, TEXT, guard=8, tail=0) == (Block(0, 0, 119),)
    assert reusable_blocks(TEXT, TEXT, guard=8, tail=120) == ()


def test_what_is_in_no_block_is_computed_but_for_the_last_token() -> None:
    choice = Choice("align", Neighbour("key", TEXT), (Block(0, 0, 3), Block(9, 5, 2)))
    assert choice.reused == 5
    spans = choice.spans(9, {})
    assert [(span.start, span.stop, span.tier) for span in spans] == [
        (0, 3, "align"),
        (3, 5, "computed"),
        (5, 7, "align"),
        (7, 8, "computed"),
    ]
    assert [tokens.offset for span in spans for tokens in span.stored] == [0, 9]
    assert [(span.start, span.stop) for span in Choice().spans(3, {})] == [(0, 2)]


def test_of_several_neighbours_the_one_is_taken_that_most_comes_from_and_the_nearer_of_two_alike() -> None:
    near = [Neighbour("far", OTHER), Neighbour("some", TEXT[:50]), Neighbour("most", TEXT[:90]), Neighbour("as many", TEXT[:90])]
    best, blocks = best_aligned(near, TEXT, guard=8, tail=16)
    assert best is not None
    assert (best.key, blocks) == ("most", (Block(0, 0, 90),))
    assert best_aligned(near[:1], TEXT, guard=8, tail=16) == (None, ())
    assert best_aligned([], TEXT, guard=8, tail=16) == (None, ())
