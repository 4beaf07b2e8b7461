"""The entropy coder gives back what it was given, whatever that is, in about as many bits as there is information."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import ArtifactError
from hf_kvcaches.codec.entropy import LANES, LARGEST, CodedTiles, Tables, decode, encode, tables_of, uniform_tables


def laplace(scales: torch.Tensor) -> torch.Tensor:
    """Shares of the integers from -127 to 127, (scales, 255)."""
    shares = (torch.arange(-127, 128).abs() / -scales[:, None].double()).exp()
    return shares / shares.sum(1, keepdim=True)


SCALES = torch.tensor([0.1, 0.4, 1.0, 3.0, 20.0])


def made_tables() -> Tables:
    """Those of 0 to 7 bits, and for each size of a group one for each scale."""
    parts = [uniform_tables(8), *(tables_of(laplace(SCALES), torch.zeros(len(SCALES)), size)[0] for size in LARGEST)]
    return Tables(*map(torch.cat, zip(*(part.tensors().values() for part in parts), strict=True)))


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


@pytest.mark.parametrize("change", [{"frequencies": torch.ones(23, 256).short()}, {"sizes": torch.full((23,), 3, dtype=torch.uint8)}])
def test_tables_that_decoders_can_not_rely_on_are_refused(change: dict[str, torch.Tensor]) -> None:
    TABLES.require_valid(23)
    with pytest.raises(ArtifactError, match="Calibrate anew"):
        Tables(**TABLES.tensors() | change).require_valid(23)
    with pytest.raises(ArtifactError, match="Calibrate anew"):
        TABLES.require_valid(24)
