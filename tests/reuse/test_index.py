"""Finding stored segments against a list of all earlier prompts, and against comparing every token with every other."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.reuse.index import ALIKE, ANCHOR, CONTEXT, Ids, Match, Record, TokenIndex, as_ids, chain_of, common_prefix

SURE = 2 * ANCHOR - 1


def add(index: TokenIndex, row: Ids, cuts: Iterable[int], begin: int = 0, origin: str = "exact", fresh: bool = True) -> list[str]:
    """Puts a row into an index from a place on, cut at others, and returns the ids of its segments."""
    chain = chain_of(row[:begin])
    edges = sorted({begin, len(row), *(cut for cut in cuts if begin < cut < len(row))})
    keys = []
    for start, stop in pairwise(edges):
        left, chain = chain.hexdigest(), chain_of(row[start:stop], chain)
        context = row[max(0, start - CONTEXT) : start]
        record = Record("scope", row[start:stop], left, chain.hexdigest(), start, context, origin, fresh)
        index.add(record.key, record)
        keys.append(record.key)
    return keys


def feed(index: TokenIndex, row: Ids, cuts: Iterable[int], mode: str = "exact") -> list[str]:
    """What a request does: looks its row up, all but the last token, and stores what lies beyond."""
    pieces = index.prefix(row[:-1], 0, exact_only=mode == "exact")
    return add(index, row, cuts, pieces[-1].stop if pieces else 0, mode)


def longest(row: Ids, earlier: Iterable[Ids]) -> int:
    return max((common_prefix(row, other) for other in earlier), default=0)


def assert_holds(index: TokenIndex, row: Ids, start: int, exact_only: bool) -> int:
    """Every token that `prefix` claims stands so in a segment that stood behind the same tokens; returns where it ends."""
    pieces = index.prefix(row, start, exact_only)
    end = start
    for piece in pieces:
        record, length = piece.record, piece.stop - piece.start
        assert piece.start == end == piece.position
        assert piece.stop > piece.start
        end = piece.stop
        assert np.array_equal(record.ids[piece.offset : piece.offset + length], row[piece.start : piece.stop])
        assert chain_of(row[: record.start]).hexdigest() == record.left
        assert index.records[record.key] is record
        assert not exact_only or record.origin == "exact"
    return end


@st.composite
def families(draw: st.DrawFn) -> list[tuple[Ids, list[int]]]:
    """Rows of which many begin like an earlier one, with places at which they are cut."""
    rows: list[Ids] = []
    for _ in range(draw(st.integers(1, 7))):
        new = draw(st.lists(st.integers(0, 2), min_size=2, max_size=24))
        if rows and draw(st.booleans()):
            old = draw(st.sampled_from(rows)).tolist()
            new = old[: draw(st.integers(0, len(old)))] + new
        rows.append(as_ids(new))
    return [(row, draw(st.lists(st.integers(1, len(row)), max_size=5))) for row in rows]


# What stands left of them


@given(family=families(), data=st.data(), begin=st.integers(0, 12))
def test_whatever_was_stored_and_evicted_the_prefix_reaches_as_far_as_any_segment_left_has_the_next_token(family, data, begin: int) -> None:
    index, keys = TokenIndex(), []
    for row, cuts in family:  # behind a look-up, or as rows of one batch or of several processes: without a look at the others
        keys += data.draw(st.sampled_from([feed, add]))(index, row, [begin, *cuts])
        for key in list(keys):
            if data.draw(st.integers(0, 3)) == 0:
                index.remove(key)
    for row, _ in family:
        asked, start = np.append(row, as_ids([0, 1])), data.draw(st.sampled_from([0, begin]))
        reached = min(start, len(row))
        end = assert_holds(index, asked, reached, exact_only=True)
        # The slow way: one place after the other, among the segments that begin at the first one or behind it.
        left = [record for record in index.records.values() if chain_of(asked[: record.start]).hexdigest() == record.left]
        left = [record for record in left if record.start >= min(start, len(row))]
        while any(record.start <= reached < record.start + common_prefix(record.ids, asked[record.start :]) for record in left):
            reached += 1
        assert end == reached


@given(family=families(), data=st.data())
def test_exact_requests_find_all_that_exact_requests_stored_and_nothing_else(family, data: st.DataObject) -> None:
    index = TokenIndex()
    stored: dict[str, list[Ids]] = {"exact": [], "repaired": []}
    for row, cuts in family:
        assert assert_holds(index, row, 0, exact_only=True) == longest(row, stored["exact"])
        assert assert_holds(index, row, 0, exact_only=False) == longest(row, stored["exact"] + stored["repaired"])
        mode: str = data.draw(st.sampled_from(["exact", "repaired"]))
        feed(index, row, cuts, mode)
        stored[mode].append(row)


def test_exact_segments_are_taken_as_far_as_they_reach_and_approximations_only_beyond() -> None:
    index, row = TokenIndex(), as_ids(range(50))
    add(index, row, [], origin="repaired")
    add(index, row[:30], [20])
    pieces = index.prefix(row, 0, exact_only=False)
    assert [(piece.start, piece.stop, piece.record.origin, piece.offset) for piece in pieces] == [
        (0, 20, "exact", 0),
        (20, 30, "exact", 0),
        (30, 50, "repaired", 30),
    ]


# What they hold


def assert_sound(row: Ids, start: int, shortest: int, found: list[Match]) -> None:
    place = start
    for run in found:
        assert run.start >= place
        assert len(run) >= max(shortest, ANCHOR)
        place = run.start
        for before, piece in zip((None, *run.pieces), run.pieces, strict=False):
            assert piece.start == place
            assert piece.record.fresh
            place = piece.stop
            for token in range(piece.start, piece.stop):
                assert row[token] == piece.record.ids[piece.offset + token - piece.start]
            if before is not None:
                assert before.offset + before.stop - before.start == len(before.record)
                assert (piece.offset, piece.record.left) == (0, before.record.right)
    assert place <= max(start, len(row))


def stretches(row: Ids, ids: Ids) -> list[tuple[int, int, int]]:
    """All (start, stop, offset) at which a row has the tokens of a segment, none of which can be made longer."""
    found = []
    for shift in range(-len(ids) + 1, len(row)):
        first, last = max(0, shift), min(len(row), shift + len(ids))
        same = np.concatenate(([False], row[first:last] == ids[first - shift : last - shift], [False]))
        starts, stops = (np.flatnonzero(same[a] & ~same[b]) for a, b in ((slice(1, None), slice(-1)), (slice(-1), slice(1, None))))
        found += [(first + a, first + b, first + a - shift) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    return found


@st.composite
def mosaics(draw: st.DrawFn) -> tuple[list[tuple[Ids, list[int], bool]], Ids]:
    """BlobHead rows, and a row that is put together from stretches of them and of others."""
    seed = draw(st.integers(0, 2**20))
    random = np.random.default_rng(seed)
    letters = draw(st.sampled_from([3, 50]))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = as_ids(random.integers(0, letters, draw(st.integers(20, 120))))
        rows.append((row, draw(st.lists(st.integers(1, len(row)), max_size=3)), draw(st.integers(0, 4)) > 0))
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        source = rows[draw(st.integers(0, len(rows) - 1))][0] if draw(st.integers(0, 3)) else as_ids(random.integers(0, letters, 40))
        a, b = sorted((draw(st.integers(0, len(source))), draw(st.integers(0, len(source)))))
        parts.append(source[a:b])
    return rows, as_ids(np.concatenate(parts))


@given(mosaic=mosaics(), start=st.integers(0, 20), shortest=st.sampled_from([1, 24, 40]))
def test_runs_hold_what_they_say_and_leave_out_no_stretch_that_holds_an_anchor(mosaic, start: int, shortest: int) -> None:
    rows, asked = mosaic
    index = TokenIndex()
    for row, cuts, fresh in rows:
        add(index, row, cuts, fresh=fresh)
    found = index.runs(asked, start, shortest)
    assert_sound(asked, start, shortest, found)
    # Some anchor of each stretch is in a run, or what the runs before it leave of the stretch is too short.
    for record in index.records.values():
        for first, stop, _ in stretches(asked, record.ids) if record.fresh else []:
            first = max(first, start)
            before = max((run.stop for run in found if run.start < first < run.stop), default=first)
            if stop - before >= max(shortest, SURE):
                assert any(run.start < stop and run.stop > before for run in found), (before, stop)


@given(data=st.data(), shortest=st.sampled_from([24, 40]))
def test_a_stretch_of_one_stored_text_is_taken_from_its_first_token_to_its_last(data: st.DataObject, shortest: int) -> None:
    """No token comes twice here, so that there is only one place where each could have come from."""
    text = as_ids(np.random.default_rng(data.draw(st.integers(0, 99))).permutation(300))
    index = TokenIndex()
    add(index, text[:200], data.draw(st.sets(st.integers(1, 199), max_size=6)))
    a, b = sorted((data.draw(st.integers(0, 200)), data.draw(st.integers(0, 200))))
    lead = data.draw(st.integers(0, 30))
    asked = np.concatenate((text[200 : 200 + lead], text[a:b], text[250:270]))
    found = index.runs(asked, 0, shortest)
    assert_sound(asked, 0, shortest, found)
    covered = {token for run in found for token in range(run.start, run.stop)}
    inside = [(max(r.start, a), min(r.start + len(r), b)) for r in index.records.values()]
    for first, stop in inside:
        if stop - first >= max(SURE, shortest):
            assert set(range(first - a + lead, stop - a + lead)) <= covered
    assert covered <= set(range(lead, lead + b - a))
    assert len(found) <= 1 or min(stop - first for first, stop in inside if stop > first) < SURE


def test_a_run_does_not_go_on_into_what_was_not_computed_where_it_stood() -> None:
    index, text = TokenIndex(), as_ids(range(100))
    add(index, text[:40], [])
    add(index, text, [], begin=40, origin="repaired", fresh=False)
    (run,) = index.runs(np.append(as_ids([200]), text), 0, 24)
    assert (run.start, run.stop) == (1, 41)


def test_of_two_equally_long_runs_the_one_with_more_of_the_same_text_before_it_is_taken() -> None:
    common, first, second = as_ids(range(100, 140)), as_ids(range(10)), as_ids(range(20, 30))
    for order in (1, -1):
        index = TokenIndex()
        for before in (first, second)[::order]:
            add(index, np.concatenate((before, common)), [10])
        (run,) = index.runs(np.concatenate((as_ids([7, 7]), second[4:], common)), 0, 24)
        assert run.pieces[0].record.context.tolist() == second.tolist()


def test_only_the_newest_of_many_alike_are_remembered() -> None:
    index, common = TokenIndex(), as_ids(range(100, 140))
    for number in range(ALIKE + 2):
        add(index, np.concatenate((as_ids([number]), common)), [1])
    assert max(map(len, index._anchored.values())) == ALIKE
    asked = np.concatenate((as_ids([50, 0]), common))
    (run,) = index.runs(asked, 0, 24)
    assert run.pieces[0].record.context.tolist() != [0]


@given(family=families(), mosaic=mosaics(), data=st.data())
def test_removal_leaves_no_trace(family, mosaic, data: st.DataObject) -> None:
    index = TokenIndex()
    keys = [key for row, cuts in family for key in feed(index, row, cuts)]
    keys += [key for row, cuts, fresh in mosaic[0] for key in add(index, row, cuts, fresh=fresh)]
    for key in data.draw(st.permutations(sorted(set(keys)))):
        index.remove(key)
        index.remove(key)
        assert all(entry[0] != key for alike in index._anchored.values() for entry in alike)
        assert_sound(mosaic[1], 0, 24, index.runs(mosaic[1], 0, 24))
    assert vars(index) == vars(TokenIndex())
