"""The entropy coder gives back what it was given, whatever that is, in about as many bits as there is information."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.codec.entropy import ESCAPE, GROUP, HALVES, SYMBOLS, Tables, TileDecoder, encode, tables_of, uniform_tables


def laplace(scales: torch.Tensor) -> torch.Tensor:
    """Shares of the integers from -127 to 127, (scales, 255)."""
    shares = (torch.arange(-127, 128).abs() / -scales[:, None].double()).exp()
    return shares / shares.sum(1, keepdim=True)


SCALES = torch.tensor([0.1, 0.4, 1.0, 3.0, 20.0])


def tables() -> Tables:
    """For each size of a group one for each scale, and those of 0 to 7 bits."""
    rows = [*(tables_of(laplace(SCALES), size) for size in HALVES), uniform_tables(7)]
    sizes = [size for size in HALVES for _ in SCALES] + [1] * 8
    return Tables(torch.cat([each.digits for each in rows]), torch.cat([each.frequencies for each in rows]), torch.tensor(sizes).int())


TABLES = tables()


def drawn(rows: torch.Tensor, tiles: int, lanes: int, generator: torch.Generator) -> torch.Tensor:
    """Symbols that the tables expect, (steps, tiles, lanes), uint8."""
    slots = torch.randint(4096, (len(rows), tiles * lanes), generator=generator)
    ends = TABLES.frequencies[rows].cumsum(1)
    return torch.searchsorted(ends, slots, right=True).to(torch.uint8).view(-1, tiles, lanes)


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 12), tiles=st.integers(1, 3), lanes=st.integers(1, 5))
def test_symbols_come_back(seed: int, steps: int, tiles: int, lanes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(TABLES.sizes), (steps,), generator=generator)
    symbols = drawn(rows, tiles, lanes, generator)
    table = rows.int()[:, None, None].expand_as(symbols)
    coded = encode(symbols, table, TABLES)
    assert coded.counts.shape == (tiles,)
    assert int(coded.counts.sum()) == len(coded.words)
    decoder = TileDecoder(coded, TABLES)
    for step in range(steps):
        assert torch.equal((decoder.step(table[step]) & 255).to(torch.uint8), symbols[step])
    assert decoder.ended()


def test_code_takes_as_many_bits_as_there_is_information() -> None:
    generator, lanes = torch.Generator().manual_seed(0), 32
    rows = torch.arange(len(TABLES.sizes)).repeat(20)
    symbols = drawn(rows, 4, lanes, generator)
    coded = encode(symbols, rows.int()[:, None, None].expand_as(symbols), TABLES)
    shares = TABLES.frequencies[rows[:, None], symbols.flatten(1).long()] / 4096
    information = float(-shares.log2().sum())
    # Each of 128 lanes ends with a state of 31 bits, 15 of which say nothing.
    assert information < 16 * len(coded.words) + 128 * 31 < information * 1.001 + 128 * 24


def test_tables_are_as_short_as_the_entropy_and_use_all_slots() -> None:
    shares = laplace(SCALES)
    entropy = -torch.xlogy(shares, shares).sum(1) / torch.tensor(2.0).log()
    for size in HALVES:
        rows = tables_of(shares, size)
        assert bool((rows.frequencies.sum(1) == 4096).all())
        # Groups of large integers have too many symbols.
        good = {1: 20.1, 2: 1.1, 3: 0.3, 4: 0.3}[size] > SCALES
        assert bool((rows.bits[good] < entropy[good] * 1.06 + 0.01).all()), size
    uniform = uniform_tables(7)
    assert uniform.bits.tolist() == list(range(8))
    assert bool((uniform.frequencies.sum(1) == 4096).all())


@given(seed=st.integers(0, 10**6), size=st.sampled_from(list(HALVES)), spread=st.sampled_from([0.3, 2.0, 50.0]))
def test_groups_have_symbols_of_their_own_or_the_one_that_says_so(seed: int, size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = (torch.randn(GROUP, 3, 17, generator=generator) * spread).round().int()
    groups[size:] = 0
    rows = (torch.randint(len(SCALES), (3, 17), generator=generator) + (size - 1) * len(SCALES)).int()
    symbols = TABLES.symbols_of(groups, rows, torch.full((3,), size))
    found = TABLES.groups_of(symbols, rows).permute(2, 0, 1)
    own = symbols != ESCAPE
    assert torch.equal(found[:, own].int(), groups[:, own])
    for row, group in zip(rows[~own].tolist(), groups[:, ~own].T.tolist(), strict=True):
        assert group not in TABLES.digits[row, 1:][TABLES.frequencies[row, 1:] > 0].tolist()
    bits = TABLES.bits(symbols, rows)
    assert bool((bits[~own] >= 64).all())
    assert bool(((bits[own] >= 0) & (bits[own] <= 12)).all())


@given(seed=st.integers(0, 10**6))
def test_other_words_do_not_end_where_the_code_ends(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(TABLES.sizes) - 8, (40,), generator=generator)
    symbols = drawn(rows, 1, 4, generator)
    table = rows.int()[:, None, None].expand_as(symbols)
    coded = encode(symbols, table, TABLES)
    place = int(torch.randint(len(coded.words), (1,), generator=generator))
    words = coded.words.clone()
    words[place] ^= 1 << int(torch.randint(14, (1,), generator=generator))
    decoder = TileDecoder(coded._replace(words=words), TABLES)
    found = torch.stack([(decoder.step(table[step]) & (SYMBOLS - 1)).to(torch.uint8) for step in range(40)])
    assert not decoder.ended() or not torch.equal(found, symbols)
