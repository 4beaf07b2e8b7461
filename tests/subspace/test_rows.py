"""Whatever the padding and the chunks: each real token of a row is in one place, exact or in a tile of codes, and queries see these."""

from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.step import Pass, TokenMask
from hf_kvcaches.kernels.code_format import TILE
from hf_kvcaches.subspace.rows import Encoded, Ends, move, visible

CPU = torch.device("cpu")
NOTHING = -1  # in place of the column of a token that is padding


class Text(NamedTuple):
    """Rows, with `real` False where a token is padding, and how many tokens are fed in at a time."""

    real: torch.Tensor
    chunks: list[int]


@st.composite
def texts(draw: st.DrawFn, padded: bool = True) -> Text:
    chunks = draw(st.lists(st.integers(1, 40) | st.just(1), min_size=1, max_size=8))
    rows, tokens = draw(st.integers(1, 3)), sum(chunks)
    if not padded:
        return Text(torch.ones(rows, tokens, dtype=torch.bool), chunks)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    share = torch.tensor([draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])) for _ in range(rows)])
    return Text(torch.rand(rows, tokens, generator=generator) < share[:, None], chunks)


ends_of = st.builds(Ends, st.integers(0, 5), st.integers(0, 20), st.sampled_from([0, 0, 30]))


class Slots(NamedTuple):
    """What a layer holds, each number one token: its column in the text. There is one count while all rows have as many tokens."""

    counts: tuple[int, ...]
    exact: torch.Tensor
    codes: torch.Tensor | None


def fed(text: Text, ends: Ends, spare: int = 0) -> Slots:
    """Feed tokens that are their own columns through the moves, as a layer does with keys."""
    rows, start, counts, codes = len(text.real), 0, (0,), None
    exact = torch.zeros(rows, 1, 0, 1, dtype=torch.int64)
    for tokens in text.chunks:
        span = slice(start, start + tokens)
        real = text.real[:, span]
        valid = None if bool(real.all()) else real
        running = Pass(TokenMask(valid), None, start, tokens, CPU)
        to = move(ends, counts, exact.shape[2], running, spare, rows)
        columns = torch.arange(start, start + tokens).where(real, NOTHING)[:, None, :, None]
        states = torch.cat([exact, columns], 2)
        if to.encoded is not None:
            codes = written(codes, states, to.encoded, ends)
        exact, counts, start = to.keep(states), to.counts, start + tokens
        assert to.padding == (None if valid is None else int((~real).any(0).nonzero().max()) + 1)
    return Slots(counts, exact[:, 0, :, 0], codes)


def written(codes: torch.Tensor | None, states: torch.Tensor, encoded: Encoded, ends: Ends) -> torch.Tensor:
    """The codes with new tiles, which lie behind those of before."""
    leaving = encoded.of(states)[:, 0, :, 0]
    assert leaving.shape[1] == TILE * max(tiles for *_, tiles in encoded.spans)
    for rows, _, tiles in encoded.spans:
        assert bool((leaving[rows, : TILE * tiles] != NOTHING).all())
    return encoded.written(codes, leaving, TILE)


def tokens_of(slots: Slots, row: int, ends: Ends) -> tuple[list[int], list[int], list[int]]:
    """The columns of a row's sinks, codes and newest tokens, where the counts say that they lie."""
    count = slots.counts[row if len(slots.counts) > 1 else 0]
    sinks, window = min(ends.sinks, max(slots.counts)), ends.window(count)
    exact = slots.exact[row].tolist()
    codes = [] if slots.codes is None else slots.codes[row, : TILE * ends.tiles(count)].tolist()
    return exact[: min(sinks, count)], codes, exact[len(exact) - window :]


@given(text=texts(), ends=ends_of, spare=st.sampled_from([0, 0, 12]))
def test_the_first_and_the_newest_real_tokens_of_a_row_are_exact_and_all_others_whole_tiles_in_order(
    text: Text, ends: Ends, spare: int
) -> None:
    slots = fed(text, ends, spare)
    for row, real in enumerate(text.real):
        columns = real.nonzero()[:, 0].tolist()
        first, rest = columns[: ends.sinks], columns[ends.sinks :]
        coded = max(0, len(rest) - ends.recent) // TILE * TILE if len(rest) >= ends.warmup else 0
        assert tokens_of(slots, row, ends) == (first, rest[:coded], rest[coded:])


@given(text=texts(), ends=ends_of, spare=st.sampled_from([0, 0, 12]))
def test_a_query_sees_the_slots_of_real_tokens_once(text: Text, ends: Ends, spare: int) -> None:
    slots = fed(text, ends, spare)
    exact, codes = visible(ends, slots.counts, slots.exact.shape[1], None, CPU)
    coded = TILE * max(map(ends.tiles, slots.counts))
    held = slots.exact if slots.codes is None else torch.cat([slots.exact, slots.codes[:, :coded]], 1)
    if exact is None:
        assert codes is None
        shown = torch.ones_like(held, dtype=torch.bool)
    else:
        shown = torch.cat([exact[:, 0], codes[:, 0]], 1).expand(len(held), -1)
    assert shown.shape == held.shape
    for row, real in enumerate(text.real):
        assert sorted(held[row, shown[row]].tolist()) == real.nonzero()[:, 0].tolist()


@given(text=texts(padded=False), ends=ends_of, data=st.data())
def test_a_mask_hides_the_slots_of_the_tokens_that_it_hides(text: Text, ends: Ends, data: st.DataObject) -> None:
    slots, (rows, seen) = fed(text, ends), text.real.shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    allowed = torch.rand(rows, 1, 2, seen, generator=generator) < 0.5
    exact, codes = visible(ends, slots.counts, slots.exact.shape[1], allowed, CPU)
    coded = codes.shape[2]
    held = slots.exact if slots.codes is None else torch.cat([slots.exact, slots.codes[:, :coded]], 1)
    shown = torch.cat([exact, codes], 2)
    for row in range(rows):
        for query in range(2):
            assert sorted(held[row, shown[row, query]].tolist()) == allowed[row, 0, query].nonzero()[:, 0].tolist()
