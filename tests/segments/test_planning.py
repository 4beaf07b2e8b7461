"""Which tokens of a prompt are reused, and how: without gaps, in the mode that was asked for, and by the policy's guards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse.plan import PlannedRow, PlannedSpan, PromptRow
from hf_kvcaches.reuse.tokens import Ids, as_ids, common_suffix
from hf_kvcaches.segments.index import SHINGLE, SegmentIndex
from hf_kvcaches.segments.planning import plan_row
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.records import Chain
from hf_kvcaches.segments.tiers import SURROUNDINGS, Candidate, Mode, SegmentTier, TierContext, Verdict, likeness, tiers_of
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


def plan_of(ids: Ids, index: SegmentIndex, policy: SegmentPolicy, tiers: tuple[SegmentTier, ...], begin: int = 0) -> PlannedRow:
    row = PromptRow(0, 0, join(ids, as_ids([7])), begin)
    return plan_row(row, index, tiers, TierContext(policy, LAYERS))


def plan(ids: Ids, index: SegmentIndex, policy: SegmentPolicy, mode: Mode, begin: int = 0) -> PlannedRow:
    return plan_of(ids, index, policy, tiers_of(mode), begin)


def join(*parts: Ids) -> Ids:
    return np.concatenate(parts)


def elsewhere(policy: SegmentPolicy, mode: Mode, before: Ids = HERE, stood: Ids = THERE) -> PlannedSpan:
    """The last span of a prompt that ends in a text that stood behind another one."""
    return plan(join(before, TEXT), stored_behind(stood), policy, mode).spans[-1]


def probed(span: PlannedSpan) -> bool:
    return span.check is not None and span.check.probe


POLICIES = st.builds(
    SegmentPolicy,
    guard=st.sampled_from([(), ((0.5, 8),), ((0.5, 4), (1.0, 16)), ((1.0, 0),)]),
    similarity=st.sampled_from([0.0, 0.3, 0.9, 1.01]),
    repair=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    shortest=st.sampled_from([16, 30]),
)


@given(mosaic=mosaics(), policy=POLICIES, mode=st.sampled_from(["exact", "approximate", "auto"]), begin=st.integers(0, 30))
def test_every_new_token_is_in_one_span_with_the_tokens_that_are_stored_for_it(mosaic, policy, mode: Mode, begin: int) -> None:
    rows, asked = mosaic
    begin = min(begin, len(asked))
    index = SegmentIndex()
    for row, cuts, fresh in rows:
        add(index, row, [begin, *cuts], origin="exact" if fresh else "repaired", fresh=fresh)
    found = plan(asked, index, policy, mode, begin)
    place = begin
    for span in found.spans:
        assert span.start == place
        assert span.stop > span.start
        place = span.stop
        assert bool(span.stored) == (span.tier != "computed")
        edges = [span.start, *(tokens.stop for tokens in span.stored)]
        assert [tokens.start for tokens in span.stored] == edges[:-1]
        assert not span.stored or edges[-1] == span.stop
        for tokens in span.stored:
            ids = index.records[tokens.key].ids
            assert np.array_equal(asked[tokens.start : tokens.stop], ids[tokens.offset : tokens.offset + tokens.stop - tokens.start])
        assert span.recompute.tolist() == list(range(span.start, span.start + len(span.recompute)))
        assert len(span.recompute) <= len(span)
        assert span.reused == (len(span) - len(span.recompute) if span.stored else 0)
        assert not probed(span) or (mode == "auto" and span.tier == "probed")
    assert place == len(asked)
    prefix, _ = index.prefix(asked, Chain().extend(asked[:begin]), begin, exact_only=mode == "exact")
    assert found.prefix == (prefix[-1].stop if prefix else begin)
    assert not any(len(span.recompute) or span.check for span in found.spans if span.start < found.prefix)
    assert sorted(found.recompute()) == sorted(
        place for span in found.spans for place in (span.recompute if span.stored else range(span.start, span.stop))
    )


@given(mosaic=mosaics(), policy=POLICIES)
def test_exact_means_the_start_of_an_earlier_prompt_and_nothing_else(mosaic, policy: SegmentPolicy) -> None:
    rows, asked = mosaic
    index = SegmentIndex()
    for number, (row, cuts, _) in enumerate(rows):
        add(index, row, cuts, origin="exact" if number else "guarded")
    found = plan(asked, index, policy, "exact")
    for span in found.spans:
        assert span.tier == ("exact" if span.start < found.prefix else "computed")
        assert all(index.records[tokens.key].origin == "exact" and tokens.start == tokens.position for tokens in span.stored)


def test_the_start_of_an_earlier_prompt_keeps_the_tier_that_it_came_about_with() -> None:
    index, row = SegmentIndex(), join(HERE, TEXT, THERE)
    add(index, row[:60], [20, 40])
    add(index, row, [100], begin=60, origin="repaired", fresh=False)
    found = plan(row, index, NOTHING_SAFE, "auto")
    assert [(span.start, span.stop, span.tier, len(span.stored)) for span in found.spans] == [(0, 60, "exact", 3), (60, 180, "repaired", 2)]
    assert [(span.stop, span.tier) for span in plan(row, index, NOTHING_SAFE, "exact").spans] == [(60, "exact"), (180, "computed")]


def test_a_segment_that_is_gone_is_computed_and_all_else_stays() -> None:
    index, row = SegmentIndex(), join(HERE, TEXT)
    keys = add(index, row, [20, 40, 60])
    found = plan(row, index, NOTHING_SAFE, "exact").without({keys[1]}, "It is gone.")
    assert [(span.start, span.stop, span.tier, span.reason) for span in found.spans] == [
        (0, 20, "exact", ""),
        (20, 40, "computed", "It is gone."),
        (40, 60, "exact", ""),
        (60, 140, "exact", ""),
    ]
    assert found.prefix == 20


@given(mosaic=mosaics(), stop=st.integers(0, 100))
def test_a_row_that_is_cut_reuses_what_comes_before_and_nothing_else(mosaic, stop: int) -> None:
    rows, asked = mosaic
    index = SegmentIndex()
    for row, cuts, _ in rows:
        add(index, row, cuts)
    whole = plan(asked, index, NOTHING_SAFE, "approximate")
    cut = whole.cut(min(stop, len(asked)))
    reused = {
        (tokens.key, place, tokens.offset + place - tokens.start) for tokens in whole.stored for place in range(tokens.start, tokens.stop)
    }
    kept = {
        (tokens.key, place, tokens.offset + place - tokens.start) for tokens in cut.stored for place in range(tokens.start, tokens.stop)
    }
    assert kept == {entry for entry in reused if entry[1] < stop}
    assert [place for span in cut.spans for place in range(span.start, span.stop)] == list(range(len(asked)))


# Behind another text


def test_in_approximate_mode_the_first_tokens_are_repaired_without_a_probe() -> None:
    span = elsewhere(NOTHING_SAFE, "approximate")
    assert (span.tier, span.check, span.depth) == ("repaired", None, None)
    assert span.recompute.tolist() == list(range(60, 80))


def test_in_auto_mode_other_surroundings_want_a_probe() -> None:
    span = elsewhere(NOTHING_SAFE, "auto")
    assert (span.tier, probed(span), len(span.recompute)) == ("probed", True, 20)


def test_in_auto_mode_surroundings_that_are_alike_want_none() -> None:
    stood = join(THERE, HERE[1:])
    assert elsewhere(NOTHING_SAFE, "auto", stood=stood).tier == "probed"
    loose = SegmentPolicy(guard=(), similarity=0.5)
    assert (elsewhere(loose, "auto", stood=stood).tier, elsewhere(loose, "auto", stood=stood).check) == ("repaired", None)


def test_a_few_other_tokens_before_a_text_are_not_like_as_many_others() -> None:
    span = elsewhere(SegmentPolicy(guard=()), "auto", before=as_ids([1, 2, 3]), stood=as_ids([4, 5, 6]))
    assert (span.tier, probed(span)) == ("probed", True)


@pytest.mark.parametrize("repair", [0.0, 0.01, 0.15, 0.5, 1.0])
def test_as_large_a_share_is_repaired_as_wanted(repair: float) -> None:
    span = elsewhere(SegmentPolicy(guard=(), repair=repair), "approximate")
    assert span.recompute.tolist() == list(range(60, 60 + math.ceil(repair * 80)))


@pytest.mark.parametrize("window", [0, 1, 10, 11, 15, 20, 29, 30, 31, 200])
@pytest.mark.parametrize("mode", ["approximate", "auto"])
def test_only_tokens_with_too_little_of_the_same_text_before_them_are_repaired(window: int, mode: Mode) -> None:
    """Here the ten tokens before the text are the same, and twenty of its own would be repaired."""
    policy = SegmentPolicy(guard=((0.25, 0), (1.0, window)), repair=0.25)
    stood = join(THERE, HERE[-10:])
    assert common_suffix(stood, HERE) == 10
    run = elsewhere(policy, mode, stood=stood)
    unsafe = [place for place in range(run.start, run.stop) if 10 + place - run.start < window]
    if not unsafe:
        assert (run.tier, run.check, len(run.recompute)) == ("guarded", None, 0)
    else:
        assert run.tier == ("repaired" if mode == "approximate" else "probed")
        assert run.recompute.tolist() == [place for place in range(60, 80) if place in unsafe]


def test_without_a_guard_for_all_layers_nothing_is_safe() -> None:
    policy = SegmentPolicy(guard=((0.99, 0),), repair=0.25)
    assert len(elsewhere(policy, "approximate", stood=join(THERE, HERE)).recompute) == 20


def test_runs_are_not_shorter_than_the_policy_wants() -> None:
    assert elsewhere(SegmentPolicy(guard=(), shortest=80), "approximate").tier == "repaired"
    assert elsewhere(SegmentPolicy(guard=(), shortest=81), "approximate").tier == "computed"


def test_a_span_whose_probe_fails_is_computed_as_a_whole_and_says_why() -> None:
    span = elsewhere(NOTHING_SAFE, "auto")
    assert span.check is not None
    (failed,) = span.check.otherwise
    assert (failed.tier, failed.check, failed.stored, failed.start, failed.stop) == ("computed", None, (), span.start, span.stop)
    assert failed.reason


# Tiers of one's own


class NearTheStart(SegmentTier):
    """Reuses what stands among the first tokens of a prompt."""

    name = "near the start"

    def admit(self, candidate: Candidate, context: TierContext) -> Verdict:
        if candidate.start <= 60:
            return Verdict((candidate.reused(self.name, context, recompute=2),))
        return Verdict(reason="It stands too far behind.")


def test_a_tier_of_ones_own_decides_and_gives_its_reason() -> None:
    index = stored_behind(THERE)
    found = plan_of(join(HERE, TEXT), index, NOTHING_SAFE, (NearTheStart(),))
    assert [(span.start, span.stop, span.tier, len(span.recompute)) for span in found.spans] == [
        (0, 60, "computed", 0),
        (60, 140, "near the start", 2),
    ]
    found = plan_of(join(HERE, THERE[:9], TEXT), index, NOTHING_SAFE, (NearTheStart(),))
    assert found.spans[-1].reason == "It stands too far behind."
    assert not found.reused


def test_tiers_are_asked_in_order_until_one_admits() -> None:
    tiers = (NearTheStart(), *tiers_of("approximate"))
    assert plan_of(join(HERE, TEXT), stored_behind(THERE), NOTHING_SAFE, tiers).spans[-1].tier == "near the start"
    assert plan_of(join(HERE, HERE, TEXT), stored_behind(THERE), NOTHING_SAFE, tiers).spans[-1].tier == "repaired"


@pytest.mark.parametrize(
    "verdict",
    [
        lambda candidate, context: True,
        lambda candidate, context: Verdict((candidate.reused("exact", context),)),
        lambda candidate, context: Verdict((PlannedSpan(0, candidate.stop, "mine"),)),
        lambda candidate, context: Verdict((candidate.reused("mine", context).cut(candidate.start + 20),), probe=True),
    ],
)
def test_a_tier_that_returns_what_makes_no_plan_is_refused(verdict) -> None:
    class Wrong(SegmentTier):
        name = "wrong"

        def admit(self, candidate: Candidate, context: TierContext) -> Verdict:
            return verdict(candidate, context)

    with pytest.raises(ConfigError, match="tiers"):
        plan_of(join(HERE, TEXT), stored_behind(THERE), NOTHING_SAFE, (Wrong(),))


# Likeness


def slow_likeness(a: list[int], b: list[int]) -> float:
    first, second = ({tuple(ids[i : i + SHINGLE]) for i in range(len(ids) - SHINGLE + 1)} for ids in (a[-SURROUNDINGS:], b[-SURROUNDINGS:]))
    if not first or not second:
        return float(a == b)
    return len(first & second) / len(first | second)


TOKENS = st.lists(st.integers(0, 3), max_size=160)


@given(a=TOKENS, b=TOKENS, end=TOKENS)
def test_likeness_is_that_of_the_sets_of_shingles(a: list[int], b: list[int], end: list[int]) -> None:
    for first, second in ((a, b), (a + end, b + end), (a[:6], b[:6]), (a, a)):
        assert likeness(as_ids(first), as_ids(second)) == pytest.approx(slow_likeness(first, second))


def test_equal_texts_are_alike_and_unrelated_ones_are_not() -> None:
    text, other = as_ids(range(300)), as_ids(range(300, 600))
    assert likeness(text, text) == 1
    assert likeness(text, other) == 0
    assert likeness(text, join(other, text[-SURROUNDINGS:])) == 1
    changed = text.copy()
    changed[-30] = 0
    # One other token is in eight shingles of the last 121.
    assert likeness(text, changed) == pytest.approx((121 - 8) / (121 + 8))
