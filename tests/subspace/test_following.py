"""Bases that follow a text equal a plain walk from token to token, however many tokens come at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_kvcaches.core.moments import roots
from hf_kvcaches.kernels.coefficients import TILE
from hf_kvcaches.subspace.following import Follower, Track, in_metric
from hf_kvcaches.subspace.sketch import FrequentDirections, Gram
from tests.reference.following import FollowingOracle, Step

BATCH, HEADS, DIM, TOKENS = 2, 2, 6, 250
# The sketch is in float32, which turns directions by that share of how far apart their energies are.
MARGIN, TOLERANCE = 1e-4, {"atol": 2e-3, "rtol": 1e-3}
# Rows that remain, and rows more that fit: shrunk with every tile, and with every third.
DIRECTIONS = [None, (5, 5), (5, 35)]


@cache
def texts(seed: int, heads: int = HEADS) -> torch.Tensor:
    """Vectors of each row and head that go from a few directions to others, each at its own time, (batch, heads, tokens, d)."""
    generator = torch.Generator().manual_seed(seed)
    size = 2.0 ** -torch.arange(DIM)
    rows = torch.randn(BATCH, heads, TOKENS, DIM, generator=generator, dtype=torch.float64) * size
    for row, head in itertools.product(range(BATCH), range(heads)):
        start = 0
        while start < TOKENS:
            stop = start + int(torch.randint(30, 110, (1,), generator=generator))
            turn = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator, dtype=torch.float64))[0]
            rows[row, head, start:stop] = rows[row, head, start:stop] @ turn
            start = stop
    return rows


@cache
def metric_roots(seed: int) -> torch.Tensor:
    """A metric's root for each row and head, (batch, heads, d, d)."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(BATCH, HEADS, DIM, DIM, generator=generator, dtype=torch.float64)
    return roots(half @ half.mT / DIM + 0.1 * torch.eye(DIM))[0]


def follower(oracle: FollowingOracle, *, even: bool = False) -> Follower:
    """The same settings."""
    sketch = Gram() if oracle.directions is None else FrequentDirections(*oracle.directions)
    return Follower(sketch, oracle.rank, oracle.chunk, oracle.limit, oracle.decay, oracle.agreement, even, torch.float64)


def fed(own: Follower, rows: torch.Tensor, root: torch.Tensor | None, warmup: int, tail: int, cuts: list[int]) -> tuple[Any, Any, Track]:
    """The coefficients, the basis of each tile, and the last track, of rows that came in pieces with these ends."""
    track = own.start(rows[:, :, :warmup], root)
    coefficients, bases = [], [track.current[..., None]]
    before = 0
    for came in [*cuts, rows.shape[2]]:
        start, stop = max(0, before - tail), max(0, came - tail)
        first = start // TILE * TILE
        known = max(warmup, before) // TILE
        track, new, tiles = own.advance(track, rows[:, :, first:came], first, start, stop, known, tail)
        coefficients.append(new)
        bases.append(tiles)
        before = came
    return torch.cat(coefficients, 2), torch.cat(bases, 2), track


def by_direction(coefficients: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
    """What each coefficient adds to its vector, (..., rank, d): a basis may point the other way."""
    return coefficients[..., None] * decode.mT


def walks(oracle: FollowingOracle, rows: torch.Tensor, root: torch.Tensor | None) -> list[list[Step]] | None:
    """What the oracle makes of each row and head by itself; None where rounding could make something else of it."""
    oracle.margin = float("inf")
    each = itertools.product(range(BATCH), range(rows.shape[1]))
    found = [oracle.follow(rows[row, head], None if root is None else root[row, head]) for row, head in each]
    return found if oracle.margin > MARGIN else None


def compare(oracle: FollowingOracle, rows: torch.Tensor, root: torch.Tensor | None, cuts: list[int]) -> list[list[Step]]:
    """Asserts that all rows and heads are what the oracle makes of each by itself, and gives that."""
    walked = walks(oracle, rows, root)
    assert walked is not None, "too near to another outcome"
    coefficients, bases, track = fed(follower(oracle), rows, root, oracle.warmup, oracle.tail, cuts)
    assert coefficients.shape[2] == TOKENS - oracle.tail
    assert bases.shape[2] == (TOKENS - oracle.tail) // TILE + 1
    for steps, (row, head) in zip(walked, itertools.product(range(BATCH), range(rows.shape[1])), strict=True):
        expected = [step.basis for step in steps]
        got = bases[row, head].repeat_interleave(TILE)[: len(steps)]
        assert got.tolist() == expected
        decode = track.bank[row, head, got]
        parts = by_direction(torch.stack([s.coefficients for s in steps]), torch.stack([s.decode for s in steps]))
        torch.testing.assert_close(by_direction(coefficients[row, head], decode), parts, **TOLERANCE)
    return walked


def changes(steps: list[Step]) -> tuple[int, ...]:
    """Where a basis begins."""
    return tuple(at for at in range(1, len(steps)) if steps[at].basis != steps[at - 1].basis)


@pytest.mark.parametrize("tail", [0, 7, 20])
@pytest.mark.parametrize("agreement", [0.0, 0.05])
@pytest.mark.parametrize("limit", [None, 0.2])
@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_each_head_equals_the_plain_walk(
    directions: tuple[int, int] | None, decay: float, limit: float | None, agreement: float, tail: int
) -> None:
    oracle = FollowingOracle(3, 64, 32, tail, limit, decay, agreement, directions)
    root = metric_roots(tail) if agreement else None
    for seed in range(50):
        found = [changes(steps) for steps in walks(oracle, texts(seed), root) or []]
        # Otherwise this would be a test of bases that stay, or of heads that change together.
        if found and all(found) and len(set(found)) >= 3:
            break
    else:
        pytest.fail("no text in which all heads change, and not together")
    compare(oracle, texts(seed), root, [40, 41, 42, 90, 160, 161, 200])


@given(
    seed=st.integers(0, 40),
    cuts=st.lists(st.integers(32, TOKENS), max_size=12) | st.just(list(range(32, TOKENS))),
    directions=st.sampled_from(DIRECTIONS),
    decay=st.sampled_from([1.0, 0.5]),
    limit=st.sampled_from([None, 0.05, 0.4]),
    agreement=st.sampled_from([0.0, 0.05]),
    chunk=st.sampled_from([16, 48, 128]),
    tail=st.integers(0, 40),
    rooted=st.booleans(),
)
def test_it_does_not_matter_how_tokens_come(
    seed: int,
    cuts: list[int],
    directions: tuple[int, int] | None,
    decay: float,
    limit: float | None,
    agreement: float,
    chunk: int,
    tail: int,
    rooted: bool,
) -> None:
    oracle = FollowingOracle(2, chunk, 32, tail, limit, decay, agreement, directions)
    root = metric_roots(seed) if rooted else None
    assume(walks(oracle, texts(seed), root))
    compare(oracle, texts(seed), root, sorted(cuts))


def test_a_basis_ends_early_where_a_text_turns_and_is_kept_where_it_does_not() -> None:
    rows = torch.randn(BATCH, 1, TOKENS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4.0 ** -torch.arange(DIM)
    rows[1, :, 100:] = rows[1, :, 100:].flip(-1)
    calm, turned = compare(FollowingOracle(3, 64, 32, 0, None, 1.0, 0.05), rows, None, [50, 130])
    assert changes(calm) == ()
    # The tile that it turns in is lost, and the next one is in a new basis.
    assert changes(turned)[0] == 112


def test_a_basis_stays_for_a_quarter_of_a_chunk_whatever_it_loses() -> None:
    # Every tile is in another direction than the one before, and louder.
    turns = torch.arange(TOKENS) // TILE
    rows = torch.nn.functional.one_hot(turns % DIM, DIM).double() * 2.0 ** turns[:, None]
    rows = rows + 0.05 * texts(1).abs()[:, :1] * 2.0 ** turns[:, None]
    for steps in compare(FollowingOracle(1, 128, 16, 0, 0.0), rows, None, [130]):
        assert changes(steps) == tuple(range(32, TOKENS, 32))


def test_what_is_ahead_counts_in_a_new_basis() -> None:
    """With the same tokens in the sketch, a longer tail has seen more of what comes."""
    rows = torch.randn(BATCH, 1, TOKENS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4.0 ** -torch.arange(DIM)
    rows[:, :, 64:] = rows[:, :, 64:].flip(-1)
    left = []
    for tail in (0, 32):
        own = follower(FollowingOracle(2, 64, 32, tail, 1.0, 0.5))
        coefficients, bases, track = fed(own, rows, None, 32, tail, [100])
        decode = track.bank.gather(2, bases.repeat_interleave(TILE, 2)[:, :, 64:128, None, None].expand(-1, -1, -1, DIM, 2))
        seen = (decode @ coefficients[:, :, 64:128, :, None])[..., 0]
        left.append(float((rows[:, :, 64:128] - seen).square().sum() / rows[:, :, 64:128].square().sum()))
    assert left[1] < 0.1 < 0.5 < left[0]


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_even_coefficients_have_equal_energies_and_mean_the_same(directions: tuple[int, int] | None, rooted: bool) -> None:
    oracle, root = FollowingOracle(3, 64, 48, 5, None, 1.0, 0.0, directions), metric_roots(1) if rooted else None
    rows = texts(4)
    plain, bases, track = fed(follower(oracle), rows, root, 48, 5, [100])
    even, even_bases, even_track = fed(follower(oracle, even=True), rows, root, 48, 5, [100])
    assert torch.equal(bases, even_bases)
    assert int(bases.max())
    own = follower(oracle, even=True)
    seen = own.sketch.gram(own.start(rows[:, :, :48], root).sketch)
    first = own.start(rows[:, :, :48], root)
    basis = first.encode if root is None else first.encode @ torch.linalg.inv(root)
    energies = (basis @ seen @ basis.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(energies, energies[..., :1].expand_as(energies), rtol=1e-4, atol=0)
    index = bases.repeat_interleave(TILE, 2)[:, :, : plain.shape[2], None, None].expand(-1, -1, -1, DIM, 3)
    apart = (track.bank.gather(2, index) @ plain[..., None], even_track.bank.gather(2, index) @ even[..., None])
    torch.testing.assert_close(*apart, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(plain.abs(), even.abs(), rtol=1e-2)


def test_a_direction_in_which_nothing_was_seen_does_not_blow_coefficients_up() -> None:
    rows = texts(3).clone()
    rows[:, :, :48, 1:] = 0
    own = replace(follower(FollowingOracle(2, 64, 48)), even=True)
    coefficients, _, track = fed(own, rows, None, 48, 0, [48])
    assert coefficients[:, :, :64].abs().max() <= rows.norm(dim=-1).max() * 1.01
    assert track.bank.isfinite().all()


@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("even", [False, True])
def test_all_directions_lose_nothing(directions: tuple[int, int] | None, even: bool) -> None:
    oracle, rows = FollowingOracle(DIM, 64, 32, 3, 0.0, directions=directions), texts(4)
    own = follower(oracle, even=even)
    coefficients, bases, track = fed(own, rows, metric_roots(0), 32, 3, [33, 90])
    assert torch.equal(coefficients, rows[:, :, : TOKENS - 3])
    assert not bases.any()
    assert bases.shape[2] == (TOKENS - 3) // TILE + 1
    assert torch.equal(track.bank, torch.eye(DIM).double().expand(BATCH, HEADS, 1, DIM, DIM))
    expected = oracle.follow(rows[1, 0], None)
    assert torch.equal(coefficients[1, 0], torch.stack([step.coefficients for step in expected]))


@pytest.mark.parametrize("directions", DIRECTIONS)
def test_an_older_track_is_as_it_was_and_goes_on_alike(directions: tuple[int, int] | None) -> None:
    rows, root = texts(4), metric_roots(4)
    own = follower(FollowingOracle(3, 32, 32, 0, None, 0.5, 0.0, directions))
    old = own.start(rows[:, :, :32], root)
    old, *_ = own.advance(old, rows[:, :, :70], 0, 0, 70, 2, 0)
    copied = Track(*(None if each is None else each.clone() for each in old))
    ends = [own.advance(old, rows[:, :, 64:], 64, 70, TOKENS, 4, 0) for _ in range(2)]
    assert int(ends[0][0].current.min()) > int(old.current.max())
    assert all(torch.equal(a, b) for a, b in zip(old, copied, strict=True) if a is not None)
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True) if a is not None)
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1:], ends[1][1:], strict=True))


@given(seed=st.integers(0, 40), rank=st.integers(1, DIM - 1), at=st.integers(0, 10), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_loss_is_what_lengths_of_coefficients_leave_of_those_of_vectors(seed: int, rank: int, at: int, dtype: torch.dtype) -> None:
    """The paper's residual: |k|^2 - |c|^2, for the plain metric."""
    rows = texts(seed)
    own = follower(FollowingOracle(rank, 64, 48))
    track = own.start(rows[:, :, :48], None)
    tile = rows[:, :, at * TILE : (at + 2) * TILE]
    lengths, left = (each.square().sum(-1).unflatten(2, (2, TILE)).sum(-1) for each in (tile, own.encode(track, tile)))
    expected = ((lengths - left).clamp(min=0) / lengths).sqrt()
    found = own.losses(track, tile.to(dtype), own.encode(track, tile.to(dtype))).double()
    torch.testing.assert_close(found, expected, atol=1e-3 if dtype == torch.float32 else 1e-6, rtol=1e-4)


def test_a_loss_is_taken_in_the_metric() -> None:
    rows, root = texts(4), metric_roots(4)
    own = follower(FollowingOracle(2, 64, 48))
    track = own.start(rows[:, :, :48], root)
    tile = rows[:, :, 96:112]
    left = tile - own.encode(track, tile) @ track.bank[:, :, 0].mT
    metric = root @ root
    lost, whole = (torch.einsum("bhnd,bhde,bhne->bh", each, metric, each) for each in (left, tile))
    found = own.losses(track, in_metric(track, tile), own.encode(track, tile))[..., 0]
    torch.testing.assert_close(found, (lost / whole).sqrt())
    plain = (left.square().sum((-1, -2)) / tile.square().sum((-1, -2))).sqrt()
    assert (found - plain).abs().min() > 1e-3


def test_zeros_change_nothing() -> None:
    own = follower(FollowingOracle(2, 32, 32, 0, None, 0.5))
    zeros = torch.zeros(1, 1, 100, DIM, dtype=torch.float64)
    coefficients, bases, track = fed(own, zeros, None, 32, 0, [40])
    assert not coefficients.any()
    assert not bases.any()
    assert all(each.isfinite().all() for each in (track.encode, track.bank, track.limit, track.sketch))
