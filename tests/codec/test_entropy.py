"""The entropy coder gives back what it was given, whatever that is, in about as many bits as there is information."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import ArtifactError
from hf_kvcaches.codec.entropy import (
    ESCAPE,
    LANES,
    LARGEST,
    NOTHING,
    CodedTiles,
    Tables,
    decode,
    encode,
    is_escape,
    side_of,
    tables_of,
    uniform_tables,
)


def laplace(scales: torch.Tensor) -> torch.Tensor:
    """Shares of the integers from -127 to 127, (scales, 255)."""
    shares = (torch.arange(-127, 128).abs() / -scales[:, None].double()).exp()
    return shares / shares.sum(1, keepdim=True)


SCALES = torch.tensor([0.1, 0.4, 1.0, 3.0, 20.0])


def made_tables() -> Tables:
    """Those of 0 to 7 bits, and for each size of a group one for each scale."""
    rows = [uniform_tables(8), *(tables_of(laplace(SCALES), size) for size in LARGEST)]
    sizes = [1] * 8 + [size for size in LARGEST for _ in SCALES]
    integers, frequencies = (torch.cat([getattr(each, name) for each in rows]) for name in ("integers", "frequencies"))
    return Tables(integers, frequencies, torch.tensor(sizes, dtype=torch.uint8), torch.zeros(len(sizes)))


TABLES = made_tables()
FREQUENCIES = TABLES.frequencies.int()


def drawn(rows: torch.Tensor, tiles: int, generator: torch.Generator) -> torch.Tensor:
    """Symbols that the tables expect, (symbols, 2, tiles, lanes)."""
    slots = torch.randint(4096, (len(rows), 2 * tiles * LANES), generator=generator, dtype=torch.int32)
    return torch.searchsorted(FREQUENCIES[rows].cumsum(1, dtype=torch.int32), slots, right=True).view(-1, 2, tiles, LANES)


def intervals(symbols: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    starts = FREQUENCIES.cumsum(1) - FREQUENCIES
    table = rows[:, None, None, None].expand_as(symbols)
    return (starts[table, symbols] << 13 | FREQUENCIES[table, symbols]).int()


def coded(symbols: torch.Tensor, rows: torch.Tensor) -> CodedTiles:
    [(states, words, counts)] = encode(intervals(symbols, rows), [symbols.shape[2]])
    lanes, nothing = torch.full((len(states), 2), LANES, dtype=torch.int32), torch.empty(0, dtype=torch.int16)
    return CodedTiles(lanes, states, words, nothing, torch.stack([counts, torch.zeros_like(counts)], 1))


def decoded(tiles: CodedTiles, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = rows.int()[:, None].expand(-1, len(tiles.states))
    return decode(tiles, table, torch.zeros_like(table), TABLES)


@given(seed=st.integers(0, 10**6), symbols=st.integers(1, 12), tiles=st.integers(1, 3))
def test_symbols_come_back(seed: int, symbols: int, tiles: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(TABLES.sizes), (symbols,), generator=generator)
    expected = drawn(rows, tiles, generator)
    codes = coded(expected, rows)
    assert int(codes.counts.sum()) == len(codes.words)
    found, whole = decoded(codes, rows)
    assert torch.equal(found, expected.to(torch.uint8))
    assert whole


def test_code_takes_as_many_bits_as_there_is_information() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(len(TABLES.sizes)).repeat(20)
    symbols = drawn(rows, 4, generator)
    codes = coded(symbols, rows)
    shares = FREQUENCIES[rows[:, None], symbols.flatten(1)] / 4096
    information = float(-shares.log2().sum())
    # Each of 128 lanes ends with a state of 31 bits, 15 of which say nothing.
    assert information < 16 * len(codes.words) + 128 * 31 < information * 1.001 + 128 * 24


def test_lanes_that_code_nothing_have_no_words() -> None:
    symbols = torch.ones(5, 2, 1, LANES, dtype=torch.int64)
    codes = coded(symbols, torch.full((5,), NOTHING))
    assert len(codes.words) == 0
    assert len(codes.states.unique()) == 1


def test_tables_are_as_short_as_the_entropy_and_use_all_slots() -> None:
    shares = laplace(SCALES)
    entropy = -torch.xlogy(shares, shares).sum(1) / torch.tensor(2.0).log()
    for size in LARGEST:
        rows = tables_of(shares, size)
        assert bool((rows.frequencies.int().sum(1) == 4096).all())
        # Groups of large integers have too many symbols.
        good = {1: 20.1, 2: 1.1, 4: 0.3}[size] > SCALES
        assert bool((rows.bits[good] < entropy[good] * 1.06 + 0.01).all()), size
    uniform = uniform_tables(8)
    assert uniform.bits.tolist() == list(range(8))
    assert bool((uniform.frequencies.int().sum(1) == 4096).all())


@given(seed=st.integers(0, 10**6), size=st.sampled_from(list(LARGEST)), spread=st.sampled_from([0.3, 2.0, 50.0]))
def test_groups_have_symbols_of_their_own_or_the_one_that_says_so(seed: int, size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = (torch.randn(40, 4, generator=generator) * spread).round().int()
    groups[:, size:] = 0
    boxes, centers = TABLES.boxes
    for scale in range(len(SCALES)):
        row = 8 + list(LARGEST).index(size) * len(SCALES) + scale
        index = torch.zeros(40, dtype=torch.int64)
        for digit in groups.T[:size]:
            index = index * side_of(size) + digit.clamp(-LARGEST[size] - 1, LARGEST[size] + 1)
        found = boxes[centers[row] + index]
        starts = FREQUENCIES[row].cumsum(0) - FREQUENCIES[row]
        known = {tuple(TABLES.integers[row, symbol].tolist()): symbol for symbol in range(1, 256) if FREQUENCIES[row, symbol]}
        for interval, group in zip(found, groups.tolist(), strict=True):
            symbol = known.get(tuple(group), ESCAPE)
            assert bool(is_escape(interval)) == (symbol == ESCAPE)
            assert int(interval) == int(starts[symbol]) << 13 | int(FREQUENCIES[row, symbol])


@given(seed=st.integers(0, 10**6))
def test_other_words_do_not_end_where_the_code_ends(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(8, len(TABLES.sizes), (40,), generator=generator)
    symbols = drawn(rows, 1, generator)
    codes = coded(symbols, rows)
    place = int(torch.randint(len(codes.words), (1,), generator=generator))
    words = codes.words.clone()
    words[place] ^= 1 << int(torch.randint(14, (1,), generator=generator))
    found, whole = decoded(codes._replace(words=words), rows)
    assert not whole or not torch.equal(found, symbols.to(torch.uint8))


@pytest.mark.parametrize("change", [{"frequencies": torch.ones(23, 256).short()}, {"sizes": torch.full((23,), 3, dtype=torch.uint8)}])
def test_tables_that_decoders_can_not_rely_on_are_refused(change: dict[str, torch.Tensor]) -> None:
    TABLES.require_valid(23)
    with pytest.raises(ArtifactError, match="Calibrate anew"):
        Tables(**TABLES.tensors() | change).require_valid(23)
    with pytest.raises(ArtifactError, match="Calibrate anew"):
        TABLES.require_valid(24)
