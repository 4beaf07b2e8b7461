"""Which parts of a prompt are reused, and how: without gaps, in the mode that was asked for, and by the policy's guards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.splicing.tokens import Ids, as_ids, common_suffix
from hf_kvcaches.segments.admission import SHINGLE, SURROUNDINGS, Mode, Plan, PlannedSpan, plan_row, settle, similarity
from hf_kvcaches.segments.index import SegmentIndex
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.records import Chain
from tests.segments.test_index import add, mosaics

LAYERS = 8
NOTHING_SAFE = SegmentPolicy(guard=(), repair=0.25)
# What is stored, what stands before it where it is asked for, and what stood there.
TEXT, HERE, THERE = as_ids(range(100, 180)), as_ids(range(200, 260)), as_ids(range(300, 340))


def stored_behind(before: Ids) -> SegmentIndex:
    """The text alone, as if what it stood behind had been evicted."""
    index = SegmentIndex()
    add(index, join(before, TEXT), [], begin=len(before))
    return index


def plan(ids: Ids, index: SegmentIndex, policy: SegmentPolicy, mode: Mode, begin: int = 0) -> Plan:
    return plan_row(ids, begin, Chain().extend(ids[:begin]), index, policy, mode, LAYERS)


def join(*parts: Ids) -> Ids:
    return np.concatenate(parts)


def elsewhere(policy: SegmentPolicy, mode: Mode, before: Ids = HERE, stood: Ids = THERE) -> PlannedSpan:
    """The last part of a prompt that ends in a text that stood behind another one."""
    return plan(join(before, TEXT), stored_behind(stood), policy, mode).parts[-1]


POLICIES = st.builds(
    SegmentPolicy,
    guard=st.sampled_from([(), ((0.5, 8),), ((0.5, 4), (1.0, 16)), ((1.0, 0),)]),
    similarity=st.sampled_from([0.0, 0.3, 0.9, 1.01]),
    repair=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    shortest=st.sampled_from([16, 30]),
)


@given(mosaic=mosaics(), policy=POLICIES, mode=st.sampled_from(["exact", "approximate", "auto"]), begin=st.integers(0, 30))
def test_every_new_token_is_in_one_part_with_the_tokens_that_are_stored_for_it(mosaic, policy, mode: Mode, begin: int) -> None:
    rows, asked = mosaic
    begin = min(begin, len(asked))
    index = SegmentIndex()
    for row, cuts, fresh in rows:
        add(index, row, [begin, *cuts], origin="exact" if fresh else "repaired", fresh=fresh)
    found = plan(asked, index, policy, mode, begin)
    place = begin
    for part in found.parts:
        assert part.start == place
        assert part.stop > part.start
        place = part.stop
        assert bool(part.pieces) == (part.tier != "computed")
        edges = [part.start, *(piece.stop for piece in part.pieces)]
        assert [piece.start for piece in part.pieces] == edges[:-1]
        assert not part.pieces or edges[-1] == part.stop
        for piece in part.pieces:
            assert np.array_equal(asked[piece.start : piece.stop], piece.record.ids[piece.offset : piece.offset + piece.stop - piece.start])
        assert part.rerun.tolist() == list(range(part.start, part.start + len(part.rerun)))
        assert len(part.rerun) <= len(part)
        assert not len(part.rerun) or part.pieces
        assert part.reused == (len(part) - len(part.rerun) if part.pieces else 0)
        assert not part.probe or (mode == "auto" and part.tier == "probed")
    assert place == len(asked)
    assert found.reuses == any(part.pieces for part in found.parts)
    prefix, chain = index.prefix(asked, Chain().extend(asked[:begin]), begin, exact_only=mode == "exact")
    assert (found.prefix, found.chain.name) == (prefix[-1].stop if prefix else begin, chain.name)
    assert not any(len(part.rerun) or part.probe for part in found.parts if part.start < found.prefix)


@given(mosaic=mosaics(), policy=POLICIES)
def test_exact_means_the_start_of_an_earlier_prompt_and_nothing_else(mosaic, policy: SegmentPolicy) -> None:
    rows, asked = mosaic
    index = SegmentIndex()
    for number, (row, cuts, _) in enumerate(rows):
        add(index, row, cuts, origin="exact" if number else "guarded")
    found = plan(asked, index, policy, "exact")
    for part in found.parts:
        assert part.tier == ("exact" if part.start < found.prefix else "computed")
        assert all(piece.record.origin == "exact" and piece.start == piece.position for piece in part.pieces)


def test_the_start_of_an_earlier_prompt_keeps_the_tier_that_it_came_about_with() -> None:
    index, row = SegmentIndex(), join(HERE, TEXT, THERE)
    add(index, row[:60], [20, 40])
    add(index, row, [100], begin=60, origin="repaired", fresh=False)
    found = plan(row, index, NOTHING_SAFE, "auto")
    assert [(part.start, part.stop, part.tier, len(part.pieces)) for part in found.parts] == [(0, 60, "exact", 3), (60, 180, "repaired", 2)]
    assert [(part.stop, part.tier) for part in plan(row, index, NOTHING_SAFE, "exact").parts] == [(60, "exact"), (180, "computed")]


# Behind another text


def test_in_approximate_mode_the_first_tokens_are_repaired_without_a_probe() -> None:
    part = elsewhere(NOTHING_SAFE, "approximate")
    assert (part.tier, part.probe, part.depth) == ("repaired", False, None)
    assert part.rerun.tolist() == list(range(60, 80))


def test_in_auto_mode_other_surroundings_want_a_probe() -> None:
    part = elsewhere(NOTHING_SAFE, "auto")
    assert (part.tier, part.probe, len(part.rerun)) == ("probed", True, 20)


def test_in_auto_mode_surroundings_that_are_alike_want_none() -> None:
    stood = join(THERE, HERE[1:])
    assert elsewhere(NOTHING_SAFE, "auto", stood=stood).tier == "probed"
    loose = SegmentPolicy(guard=(), similarity=0.5)
    assert (elsewhere(loose, "auto", stood=stood).tier, elsewhere(loose, "auto", stood=stood).probe) == ("repaired", False)


def test_a_few_other_tokens_before_a_text_are_not_like_as_many_others() -> None:
    part = elsewhere(SegmentPolicy(guard=()), "auto", before=as_ids([1, 2, 3]), stood=as_ids([4, 5, 6]))
    assert (part.tier, part.probe) == ("probed", True)


@pytest.mark.parametrize("repair", [0.0, 0.01, 0.15, 0.5, 1.0])
def test_as_large_a_share_is_repaired_as_wanted(repair: float) -> None:
    part = elsewhere(SegmentPolicy(guard=(), repair=repair), "approximate")
    assert part.rerun.tolist() == list(range(60, 60 + math.ceil(repair * 80)))


@pytest.mark.parametrize("window", [0, 1, 10, 11, 15, 20, 29, 30, 31, 200])
@pytest.mark.parametrize("mode", ["approximate", "auto"])
def test_only_tokens_with_too_little_of_the_same_text_before_them_are_repaired(window: int, mode: Mode) -> None:
    """Here the ten tokens before the text are the same, and twenty of its own would be repaired."""
    policy = SegmentPolicy(guard=((0.25, 0), (1.0, window)), repair=0.25)
    stood = join(THERE, HERE[-10:])
    run = elsewhere(policy, mode, stood=stood)
    same = common_suffix(join(run.pieces[0].record.context, run.pieces[0].record.ids[: run.pieces[0].offset]), HERE)
    assert same == 10
    unsafe = [place for place in range(run.start, run.stop) if same + place - run.start < window]
    if not unsafe:
        assert (run.tier, run.probe, len(run.rerun)) == ("guarded", False, 0)
    else:
        assert run.tier == ("repaired" if mode == "approximate" else "probed")
        assert run.rerun.tolist() == [place for place in range(60, 80) if place in unsafe]


def test_without_a_guard_for_all_layers_nothing_is_safe() -> None:
    policy = SegmentPolicy(guard=((0.99, 0),), repair=0.25)
    assert len(elsewhere(policy, "approximate", stood=join(THERE, HERE)).rerun) == 20


def test_runs_are_not_shorter_than_the_policy_wants() -> None:
    assert elsewhere(SegmentPolicy(guard=(), shortest=80), "approximate").tier == "repaired"
    assert elsewhere(SegmentPolicy(guard=(), shortest=81), "approximate").tier == "computed"


def test_after_a_probe_a_part_is_reused_or_computed_as_a_whole() -> None:
    part = elsewhere(NOTHING_SAFE, "auto")
    (passed,), (failed,) = settle(part, True), settle(part, False)
    assert (passed.tier, passed.probe, passed.pieces, passed.rerun.tolist()) == ("probed", False, part.pieces, part.rerun.tolist())
    assert (failed.tier, failed.probe, failed.pieces, len(failed.rerun)) == ("computed", False, (), 0)
    assert (passed.start, passed.stop) == (failed.start, failed.stop) == (part.start, part.stop)


# Likeness


def slow_similarity(a: list[int], b: list[int]) -> float:
    first, second = ({tuple(ids[i : i + SHINGLE]) for i in range(len(ids) - SHINGLE + 1)} for ids in (a[-SURROUNDINGS:], b[-SURROUNDINGS:]))
    if not first or not second:
        return float(a == b)
    return len(first & second) / len(first | second)


TOKENS = st.lists(st.integers(0, 3), max_size=160)


@given(a=TOKENS, b=TOKENS, end=TOKENS)
def test_similarity_is_that_of_the_sets_of_shingles(a: list[int], b: list[int], end: list[int]) -> None:
    for first, second in ((a, b), (a + end, b + end), (a[:6], b[:6]), (a, a)):
        assert similarity(as_ids(first), as_ids(second)) == pytest.approx(slow_similarity(first, second))


def test_equal_texts_are_alike_and_unrelated_ones_are_not() -> None:
    text, other = as_ids(range(300)), as_ids(range(300, 600))
    assert similarity(text, text) == 1
    assert similarity(text, other) == 0
    assert similarity(text, join(other, text[-SURROUNDINGS:])) == 1
    changed = text.copy()
    changed[-30] = 0
    # One other token is in eight shingles of the last 121.
    assert similarity(text, changed) == pytest.approx((121 - 8) / (121 + 8))
