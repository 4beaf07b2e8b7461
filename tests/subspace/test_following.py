"""Bases that follow a text equal a plain walk from token to token, however many tokens come at a time."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_kvcaches import AdaptiveSubspace
from hf_kvcaches.codec.calibrate import LayerSums
from hf_kvcaches.codec.fit import fit_layer, unmeasured
from hf_kvcaches.codec.joint import Shape
from hf_kvcaches.codec.sides import CalibratedSide
from hf_kvcaches.kernels.codes import TILE, decode_codes
from hf_kvcaches.subspace.adaptive.following import Follower, Track
from tests.reference.following import FollowingOracle, Step

BATCH, HEADS, DIM, TOKENS = 2, 2, 6, 200
GAMMA = torch.tensor([1.0, 0.9])
# The sketch is in float32, which turns directions by that share of how far apart their energies are.
TOLERANCE = {"atol": 5e-3, "rtol": 1e-3}


@cache
def texts(seed: int) -> torch.Tensor:
    """Vectors of each row and head that go from a few directions to others, each at its own time, (batch, heads, tokens, d)."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(BATCH, HEADS, TOKENS, DIM, generator=generator) * 2.0 ** -torch.arange(DIM)
    for row, head in itertools.product(range(BATCH), range(HEADS)):
        start = int(torch.randint(30, 60, (1,), generator=generator))
        while start < TOKENS:
            stop = start + int(torch.randint(30, 110, (1,), generator=generator))
            rows[row, head, start:stop] = rows[row, head, start:stop] @ torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0]
            start = stop
    return rows


@cache
def calibrated(widths: tuple[tuple[int, ...], ...], spread: float = 2.0) -> CalibratedSide:
    """What a codec knows of a side, with these bits of each head."""
    generator = torch.Generator().manual_seed(3)
    sample = (torch.randn(HEADS, 400, DIM, generator=generator) * spread ** -torch.arange(DIM) + 0.1).double()
    half = torch.randn(HEADS, DIM, DIM, generator=generator).double()
    sums = LayerSums(Shape(HEADS, DIM, DIM), torch.device("cpu"))
    whole = torch.nn.functional.pad(sample, (0, 0, 4, 0))[None]
    sums.observe(whole, whole, torch.rand(1, 404, generator=generator))
    gradients = torch.linalg.cholesky(half @ half.mT / DIM + torch.eye(DIM)).mT
    sums.observe_gradients(*[torch.nn.functional.pad(gradients, (0, 0, 4, 0))[None]] * 2)
    return fit_layer(sums, "loss").keys.with_widths(torch.tensor(widths))


def plain(widths: tuple[tuple[int, ...], ...]) -> CalibratedSide:
    return unmeasured(HEADS, DIM).with_widths(torch.tensor(widths))


def follower(side: CalibratedSide, limit: float | None = None, **settings: Any) -> Follower:
    return Follower(side, AdaptiveSubspace(**settings), limit, GAMMA, torch.float64, torch.device("cpu"))


def fed(own: Follower, rows: torch.Tensor, cuts: list[int], warmup: int = 0) -> tuple[Track, torch.Tensor, torch.Tensor]:
    """The last track, the basis of each token, and what the codes stand for, of rows that came in pieces with these ends."""
    track = own.begin(rows[:, :, :warmup]) if warmup else own.start(len(rows))
    codes, places = [], sorted({0, *cuts, rows.shape[2]})
    for start, stop in itertools.pairwise(places):
        track, new = own.advance(track, rows[:, :, start:stop], start, warmup)
        codes.append(new)
    assert track.basis_of.shape[2] == -(-rows.shape[2] // TILE)
    basis = track.basis_of.repeat_interleave(TILE, 2)[:, :, : rows.shape[2]]
    return track, basis, decode_codes(torch.cat(codes, 2), own.map(track), track.basis_of)


FEW = ((4, 3, 0, 2, 0, 0), (5, 0, 16, 0, 0, 0))
ALL = ((24,) * DIM,) * HEADS


@given(
    seed=st.integers(0, 40),
    cuts=st.lists(st.integers(1, TOKENS), max_size=12) | st.just(list(range(1, TOKENS))),
    widths=st.sampled_from([FEW, ((3, 6, 3, 0, 0, 0), (1, 2, 8, 24, 0, 0))]),
    warmup=st.sampled_from([0, 0, 16, 48]),
    limit=st.sampled_from([None, 0.2, 0.6]),
    chunk=st.sampled_from([32, 80, 128]),
    decay=st.sampled_from([1.0, 0.5]),
    agreement=st.sampled_from([0.0, 0.2]),
    rows=st.sampled_from([None, 4, 12]),
)
def test_each_head_equals_the_plain_walk_however_tokens_come(
    seed: int, cuts: list[int], widths: Any, warmup: int, limit: float | None, chunk: int, decay: float, agreement: float, rows: int | None
) -> None:
    side = plain(widths) if warmup else calibrated(widths)
    options: dict[str, Any] = {"chunk": chunk, "decay": decay, "agreement": agreement}
    walked: list[list[Step]] = []
    for row, head in itertools.product(range(BATCH), range(HEADS)):
        oracle = FollowingOracle(side, head, limit=limit, rows=rows, **options)
        walked.append(oracle.follow(texts(seed)[row, head], warmup))
        assume(not oracle.close)
    sketch = {} if rows is None else {"sketch": "fd", "sketch_size": rows}
    _, basis, vectors = fed(follower(side, limit, **options, **sketch), texts(seed), cuts, warmup)
    for steps, (row, head) in zip(walked, itertools.product(range(BATCH), range(HEADS)), strict=True):
        assert basis[row, head].tolist() == [step.basis for step in steps]
        sure = torch.tensor([not step.near for step in steps])
        expected = torch.stack([step.vector for step in steps]) * GAMMA[head]
        torch.testing.assert_close(vectors[row, head, sure], expected[sure], **TOLERANCE)
        assert sure.float().mean() > 0.5


@pytest.mark.parametrize("sketch", ["gram", "fd"])
def test_an_older_track_is_as_it_was_and_goes_on_alike(sketch: Any) -> None:
    own = follower(calibrated(FEW), chunk=32, decay=0.5, agreement=0.0, sketch=sketch)
    tokens = texts(4)
    old, _ = own.advance(own.start(BATCH), tokens[:, :, :40], 0)
    copied = Track(*(each.clone() for each in old))
    ends = [own.advance(old, tokens[:, :, 40:], 40) for _ in range(2)]
    assert int(ends[0][0].current.min()) > int(old.current.max())
    assert all(torch.equal(a, b) for a, b in zip(old, copied, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*ends[0][0], ends[0][1]), (*ends[1][0], ends[1][1]), strict=True))


def test_zeros_are_no_reason_for_another_basis() -> None:
    track, _, vectors = fed(follower(plain(FEW)), torch.zeros(BATCH, HEADS, 300, DIM), [50], 48)
    assert not track.current.any()
    assert vectors.abs().max() < 1e-6


def turned(seed: int = 0) -> torch.Tensor:
    """One row that stays as the calibration has it, and one that turns after 96 tokens and is louder then."""
    rows = torch.randn(BATCH, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(seed)) * 2.0 ** -torch.arange(DIM)
    rows[1, :, 96:] = 2 * rows[1, :, 96:].flip(-1)
    return rows


@pytest.mark.parametrize("warmup", [0, 64])
def test_a_text_that_turns_gets_a_new_basis_in_the_next_tile_and_a_calm_one_keeps_its_own(warmup: int) -> None:
    widths, rows = ((4, 4, 3, 0, 0, 0),) * HEADS, turned()
    own = follower(plain(widths) if warmup else calibrated(widths), chunk=256)
    _, basis, vectors = fed(own, rows, [130], warmup)
    assert not basis[0].any()
    assert basis[1, :, :112].sum() == 0
    assert bool((basis[1, :, 112:] >= 1).all())
    lost = (vectors / GAMMA[:, None, None] - rows)[1].square().sum(-1)
    assert lost[:, 112:].mean() < 0.7 * lost[:, 96:112].mean()


def test_without_a_calibration_a_second_turn_is_found_as_soon() -> None:
    rows = turned()
    rows[1, :, 144:] = 2 * rows[1, :, 144:].roll(3, -1)
    _, basis, _ = fed(follower(plain(((4, 4, 3, 0, 0, 0),) * HEADS), chunk=128), rows, [], 64)
    assert bool((basis[1, :, 112:128] == 1).all())
    assert bool((basis[1, :, 160:] > basis[1, :, 159:160]).all())


def test_a_tile_that_loses_more_than_one_that_no_other_basis_served_is_a_reason_to_look_again() -> None:
    rows = turned()[1:]
    rows[:, :, 96:] = rows[:, :, :104] * 1e-3
    rows[:, :, 96:112] += 1e-3 * turned()[1:, :, 96:112]  # too faint to count in the sketch
    rows[:, :, 144:] = turned()[1:, :, 144:]
    _, basis, _ = fed(follower(calibrated(((4, 4, 3, 0, 0, 0),) * HEADS), chunk=256, agreement=0.5), rows, [])
    assert not basis[:, :, :160].any()
    assert bool((basis[:, :, 176:] > 0).all())


@pytest.mark.parametrize("spread", [2.0, 100.0])
@pytest.mark.parametrize("warmup", [0, 16])
def test_24_bits_of_all_directions_lose_nothing_however_the_text_turns(warmup: int, spread: float) -> None:
    side = plain(ALL) if warmup else calibrated(ALL, spread)
    _, _, vectors = fed(follower(side, 0.0, chunk=32, agreement=0.0), texts(4), [50], warmup)
    torch.testing.assert_close(vectors / GAMMA[:, None, None].double(), texts(4).double(), atol=3e-4, rtol=0)


@pytest.mark.parametrize("width", [3, 8, 16])
def test_a_direction_that_the_calibration_did_not_use_serves_a_text_that_uses_it(width: int) -> None:
    """Its bits go to whichever direction the text uses most."""
    side, rows = calibrated(((2, 2, 0, 0, 0, width),) * HEADS, 1e3), turned()
    track, basis, vectors = fed(follower(side, chunk=32, agreement=0.0), rows, [])
    assert bool((basis[:, :, -1] > 0).all())
    lost = (vectors / GAMMA[:, None, None] - rows)[0, :, 64:].square().sum() / rows[0, :, 64:].square().sum()
    assert lost < 0.2
    assert track.decode.isfinite().all()


@pytest.mark.parametrize("width", [8, 24])
def test_a_text_louder_than_the_calibration_gets_steps_that_reach_it(width: int) -> None:
    rows = turned()
    rows[:, :, 64:] *= 300
    _, basis, vectors = fed(follower(calibrated(((width,) * DIM,) * HEADS), chunk=32), rows, [])
    lost = (vectors / GAMMA[:, None, None] - rows).square().sum(-1) / rows.square().sum(-1)
    assert bool((basis[:, :, 96:] > 0).all())
    assert float(lost[:, :, 64:80].mean()) > 0.1
    assert float(lost[:, :, 160:].mean()) < 0.02
