"""What a plan reuses, which tokens it repairs, and which run when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse.index import Piece, Record, as_ids
from hf_kvcaches.reuse.plan import PlannedSpan, PromptRow, plan_row
from hf_kvcaches.reuse.policy import Admission
from tests.reuse.test_policy import match

STORED = Record("", np.zeros(1, np.uint32), "", "", 0, np.zeros(0, np.uint32))


@st.composite
def rows(draw: st.DrawFn) -> PromptRow:
    """Rows of computed, exact and repaired spans, with some new tokens at their end."""
    spans, start = list[PlannedSpan](), 0
    for kind in draw(st.lists(st.sampled_from(("computed", "exact", "repaired")), min_size=1, max_size=6)):
        stop = start + draw(st.integers(1, 30))
        sources = () if kind == "computed" else (Piece(start, stop, STORED, 0),)
        repair = draw(st.integers(0, stop - start)) if kind == "repaired" else 0
        spans.append(PlannedSpan(start, stop, kind, sources, tuple(range(start, start + repair))))
        start = stop
    end = start + draw(st.integers(0, 12))
    return PromptRow(0, 0, np.arange(end + 1, dtype=np.uint32), 0, (*spans, PlannedSpan(start, end)))


@given(rows(), st.integers(0, 2**32 - 1))
def test_first_tokens_of_spans_and_those_with_the_largest_shares_are_repaired_as_many_as_before(row: PromptRow, seed: int) -> None:
    shares = np.random.default_rng(seed).random(len(row.ids), dtype=np.float32)
    probed = len(row.last(8))
    picked = row.picking(shares, probed)
    candidates = {index for span in row.spans if span.repaired for index in range(span.start, span.stop)}
    repaired = [index for span in picked.spans if span.sources for index in span.computed.tolist()]
    assert set(repaired) <= candidates
    assert repaired == sorted(repaired)
    assert len(repaired) == sum(len(span.repaired) for span in row.spans)
    first = {index for span in row.spans for index in range(span.start, span.start + -(-len(span.repaired) // 3))}
    assert first <= set(repaired)
    by_share = [shares[index] for index in repaired if index not in first]
    assert max((shares[index] for index in candidates - set(repaired)), default=0) <= min(by_share, default=1)
    assert picked.reused == row.reused


@pytest.mark.parametrize(("repaired", "left"), [((), [(0, 10), (20, 30)]), ((3,), [])])
def test_a_lost_blob_costs_its_own_tokens_and_all_of_a_repaired_span(repaired: tuple[int, ...], left: list[tuple[int, int]]) -> None:
    records = [Record("", np.zeros(10, np.uint32), "", f"{index}", 0, np.zeros(0, np.uint32)) for index in range(3)]
    pieces = tuple(Piece(start, start + 10, record, 0) for start, record in zip((0, 10, 20), records, strict=True))
    row = PromptRow(0, 0, np.arange(36, dtype=np.uint32), 0, (PlannedSpan(0, 30, "rule", pieces, repaired), PlannedSpan(30, 35)), 30)
    found = row.without({records[1].key}, "It is gone.")
    assert [(span.start, span.stop) for span in found.spans if span.sources] == left
    assert [span.reason for span in found.spans if span.reason] == ["It is gone."]
    assert [span.start for span in found.spans[1:]] == [span.stop for span in found.spans[:-1]]
    assert (found.spans[-1].stop, found.prefix) == (35, 10)


@given(rows())
def test_new_tokens_run_before_tokens_are_picked_and_these_and_the_last_ones_behind_it(row: PromptRow) -> None:
    probed = len(row.last(len(row.ids)))
    picked = row.picking(np.ones(len(row.ids), np.float32), probed)
    last = len(row.ids) - 1
    first_pass, second_pass = set(row.new.tolist()), set(picked.running().tolist())
    assert first_pass | second_pass | set(range(len(row.ids) - probed, last)) == set(picked.computed.tolist())
    assert second_pass & first_pass == set(range(len(row.ids) - probed, last)) & first_pass
    assert row.running().tolist() == row.computed.tolist(), "a row that is not probed runs all at once"


ROW = PromptRow(0, 0, as_ids([*range(10), *range(1000, 1040), 7]), 0)


@pytest.mark.parametrize("answer", [None, True, Admission("exact"), Admission("computed"), Admission("mine", -1), Admission("mine", 41)])
def test_a_rule_that_answers_with_anything_else_is_refused(answer: Any) -> None:
    found = match(list(range(10)), [3, 4])
    with pytest.raises(ConfigError, match="admit: expected an Admission"):
        plan_row(ROW, [], [found], lambda found: answer, 4)


@pytest.mark.parametrize(("share", "depth"), [(1.0, None), (0.5, 2), (0.3, 2), (0.0, None)])
def test_a_plan_has_no_gaps_and_ends_before_the_last_token(share: float, depth: int | None) -> None:
    found = match(list(range(10)), [3, 4])
    planned = plan_row(ROW, [], [found], lambda found: Admission("mine", 5, share), 4)
    assert [(span.start, span.stop, span.rule) for span in planned.spans] == [(0, 10, "computed"), (10, 50, "mine")]
    assert planned.spans[1].repair_depth == depth
    assert planned.reused == (40 if share == 0.0 else 35)
    assert plan_row(ROW, [], [found], None, 4).reused == 0
