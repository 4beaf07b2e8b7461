"""Whatever the padding and the chunks: each real token has one slot, the first and the newest of a row are exact, and none is lost."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.subspace.placement import Placement

CPU = torch.device("cpu")


class Text(NamedTuple):
    """Rows with padding, and how they are fed in.

    Args:
        real: False where a token is padding, (batch, tokens).
        chunks: How many tokens at a time.
    """

    real: torch.Tensor
    chunks: list[int]


@st.composite
def texts(draw: st.DrawFn, padded: bool = True) -> Text:
    chunks = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    rows, tokens = draw(st.integers(1, 3)), sum(chunks)
    flags = st.lists(st.booleans() if padded else st.just(True), min_size=tokens, max_size=tokens)
    return Text(torch.tensor([draw(flags) for _ in range(rows)]), chunks)


class Slots(NamedTuple):
    """What a layer holds, each number one token: its column in the text, or -1 where a slot is empty.

    Args:
        placement: What says so.
        sinks: (batch, slots).
        codes: Likewise.
        recent: Likewise.
    """

    placement: Placement
    sinks: torch.Tensor
    codes: torch.Tensor
    recent: torch.Tensor


def fed(
    text: Text, sinks: int, recent: int, chunks: list[int] | None = None, positions: torch.Tensor | None = None, warmup: int = 0
) -> Slots:
    """Feeds tokens that are their own columns through the placements, as a layer does with keys."""
    placement, start, rows = Placement(sinks, recent, warmup), 0, len(text.real)
    held_sinks = held_recent = None
    codes = torch.zeros(rows, 0, dtype=torch.int64)
    for tokens in text.chunks if chunks is None else chunks:
        span = slice(start, start + tokens)
        valid = None if bool(text.real[:, span].all()) else text.real[:, span]
        intake = placement.place(tokens, valid, None if positions is None else positions[:, span], rows, CPU)
        new = torch.arange(start, start + tokens).where(text.real[:, span], -1)[:, None, :, None]
        held_sinks, held = intake.exact(held_sinks, held_recent, new)
        before = codes
        codes = torch.cat([codes, held[:, 0, : intake.leaving, 0]], 1)
        if intake.slots is not None:
            codes = codes.scatter(1, intake.slots, held[:, 0, : intake.leaving, 0])[:, : intake.after.coded]
        for row, (stop, count) in enumerate(intake.spans):
            assert torch.equal(codes[row, :stop], before[row, :stop])
            assert bool((codes[row, stop : stop + count] >= 0).all())
            expected = intake.after.code_positions(stop, stop + count, CPU).expand(rows, -1)[row]
            assert torch.equal(intake.positions(count, CPU).expand(rows, -1)[row], expected)
        held_recent, placement, start = held[:, :, intake.leaving :], intake.after, start + tokens
        assert placement.seen == start
        assert (placement.first, placement.coded, placement.newest) == (held_sinks.shape[2], codes.shape[1], held_recent.shape[2])
    assert held_sinks is not None
    assert held_recent is not None
    parts = held_sinks[:, 0, :, 0], codes, held_recent[:, 0, :, 0]
    if placement.columns is not None:  # what is in an empty slot does not matter
        empty = placement.columns.split([part.shape[1] for part in parts], 1)
        parts = tuple(part.masked_fill(none < 0, -1) for part, none in zip(parts, empty, strict=True))  # type: ignore[assignment]
    return Slots(placement, *parts)


def in_use(slots: Slots, row: int) -> tuple[list[int], list[int], list[int]]:
    """The columns of a row's sinks, codes and recent tokens, as the placement has them."""
    placement = slots.placement
    columns = torch.arange(placement.seen) if placement.columns is None else placement.columns[row]
    parts = columns.split([placement.first, placement.coded, placement.newest])
    return tuple([column for column in part.tolist() if column >= 0] for part in parts)  # type: ignore[return-value]


limits = st.integers(0, 5)


@given(text=texts(), sinks=limits, recent=limits, warmup=st.integers(0, 12))
def test_the_first_and_the_newest_real_tokens_of_a_row_are_exact_and_all_others_codes_in_order(
    text: Text, sinks: int, recent: int, warmup: int
) -> None:
    slots = fed(text, sinks, recent, warmup=warmup)
    for row, real in enumerate(text.real):
        columns = real.nonzero()[:, 0].tolist()
        first, rest = columns[:sinks], columns[sinks:]
        coded = len(rest) - min(recent, len(rest)) if len(rest) >= warmup else 0
        assert in_use(slots, row) == (first, rest[:coded], rest[coded:])


@given(text=texts(), sinks=limits, recent=limits)
def test_tensors_lie_where_the_placement_says(text: Text, sinks: int, recent: int) -> None:
    slots = fed(text, sinks, recent)
    held = torch.cat([slots.sinks, slots.codes, slots.recent], 1)
    columns = slots.placement.columns
    if columns is None:
        assert bool(text.real.all())
        assert torch.equal(held, torch.arange(slots.placement.seen).expand_as(held))
    else:
        assert torch.equal(held, columns)


@given(text=texts(), sinks=limits, recent=limits, data=st.data())
def test_chunks_do_not_change_what_is_exact(text: Text, sinks: int, recent: int, data: st.DataObject) -> None:
    tokens = sum(text.chunks)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, tokens - 1)), max_size=5)) - {tokens})
    others = [stop - start for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True)]
    one, other = fed(text, sinks, recent), fed(text, sinks, recent, others)
    for row in range(len(text.real)):
        assert in_use(one, row) == in_use(other, row)


@given(text=texts(padded=False), sinks=limits, recent=limits)
def test_without_padding_nothing_is_looked_up(text: Text, sinks: int, recent: int) -> None:
    placement = fed(text, sinks, recent).placement
    assert placement.columns is placement.positions is None
    assert placement.shown(None, len(text.real), CPU) == (None, None)
    expected = torch.arange(placement.first, placement.first + placement.coded)[None]
    assert torch.equal(placement.code_positions(0, placement.coded, CPU), expected)


@given(text=texts(), sinks=limits, recent=limits)
def test_codes_are_rotated_to_the_positions_that_the_model_gave_their_tokens(text: Text, sinks: int, recent: int) -> None:
    positions = (text.real.cumsum(1) - 1).clamp(min=0) + 3
    slots = fed(text, sinks, recent, positions=positions)
    found = slots.placement.code_positions(0, slots.placement.coded, CPU).expand(len(text.real), -1)
    for row, codes in enumerate(slots.codes.tolist()):
        for slot, column in enumerate(codes):
            if column >= 0:
                assert int(found[row, slot]) == int(positions[row, column])


@given(text=texts(), sinks=limits, recent=limits, data=st.data())
def test_a_query_sees_the_slots_of_the_real_tokens_that_its_mask_allows(text: Text, sinks: int, recent: int, data: st.DataObject) -> None:
    slots, (rows, seen) = fed(text, sinks, recent), text.real.shape
    flags = data.draw(st.none() | st.lists(st.booleans(), min_size=2 * rows * seen, max_size=2 * rows * seen))
    allowed = None if flags is None else torch.tensor(flags).view(rows, 1, 2, seen)
    exact, codes = slots.placement.shown(allowed, rows, CPU)
    for held, shown in ((torch.cat([slots.sinks, slots.recent], 1), exact), (slots.codes, codes)):
        if shown is None:
            assert allowed is None
            assert bool(text.real.all())
            continue
        assert shown.shape[2] == held.shape[1]
        for query in range(2):
            own = shown[:, min(query, shown.shape[1] - 1)].expand(rows, -1)
            for row in range(rows):
                columns = set(held[row][own[row]].tolist())
                expected = {column for column in held[row].tolist() if column >= 0 and text.real[row, column]}
                assert columns == {column for column in expected if allowed is None or bool(allowed[row, 0, query, column])}
