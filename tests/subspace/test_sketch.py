"""Sketches against the exact sum of outer products: the bound for any stream in any blocks, and what must change nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.codec.moments import descending
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.subspace.adaptive.sketch import FrequentDirections, Gram, Sketch

SKETCHES = [Gram(), FrequentDirections(3), FrequentDirections(4, buffer=1), FrequentDirections(20)]


def exact(rows: torch.Tensor) -> torch.Tensor:
    """The sum of outer products, one row after the other in float64."""
    total = torch.zeros(*rows.shape[:-2], rows.shape[-1], rows.shape[-1], dtype=torch.float64)
    for row in rows.double().unbind(-2):
        total += row.unsqueeze(-1) * row.unsqueeze(-2)
    return total


def spectral(symmetric: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(symmetric).abs().amax(-1)


def fed(sketch: Sketch, rows: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The state after the rows came in blocks, cut at these places."""
    state = sketch.start(rows.shape[:-2], rows.shape[-1])
    places = [0, *sorted(cuts), rows.shape[-2]]
    for start, end in itertools.pairwise(places):
        state = sketch.update(state, rows[..., start:end, :])
    return state


@st.composite
def streams(draw: st.DrawFn) -> torch.Tensor:
    """(2, n, d) rows: spread out, in few directions, repeated, with zeros, from tiny to huge."""
    n, dim = draw(st.integers(0, 70)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(2, n, dim, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["spread", "decaying", "deficient", "repeated", "axes"]))
    if kind == "decaying":
        rows *= 3.0 ** -torch.arange(dim)
    elif kind == "deficient":
        rows = rows[..., :1] * torch.randn(2, 1, dim, generator=generator, dtype=torch.float64)
    elif kind == "repeated":
        rows = rows[:, :1].expand(2, n, dim).clone()
    elif kind == "axes":
        rows = torch.eye(dim, dtype=torch.float64)[torch.randint(dim, (2, n), generator=generator)]
    if draw(st.booleans()):
        rows[:, :: draw(st.integers(1, 4))] *= draw(st.sampled_from([0.0, 1e-3, 1e3]))
    return (rows * 10.0 ** draw(st.sampled_from([-42, -25, -3, 0, 3, 18, 30]))).float()


# Rounding that breaks the bound is rare.
@settings(max_examples=8 * settings.default.max_examples)
@given(rows=streams(), size=st.integers(1, 14), buffer=st.sampled_from([None, 1, 2, 9]), data=st.data())
def test_frequent_directions_keeps_its_bound_in_any_blocks(rows: torch.Tensor, size: int, buffer: int | None, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, rows.shape[-2]), max_size=12) | st.just(list(range(rows.shape[-2]))))
    sketch = FrequentDirections(size, buffer)
    state, truth = fed(sketch, rows, cuts), exact(rows)
    assert state.dtype == torch.float32
    assert state.isfinite().all()
    energies = torch.linalg.eigvalsh(truth).flip(-1).clamp_min(0)
    lost = truth - sketch.gram(state)
    # Of float32 rows; below, what is smaller than the smallest float32 number.
    rounding = 2e-6 * energies.sum(-1) + 1e-80
    for r in range(min(size, rows.shape[-1]) + 1):
        assert (spectral(lost) <= energies[:, r:].sum(-1) / (size + 1 - r) + rounding).all()
    assert (torch.linalg.eigvalsh(lost)[:, 0] >= -rounding).all()
    if rows.shape[-1] <= size:
        assert (spectral(lost) <= rounding).all()


def test_a_late_direction_in_small_pieces_is_not_lost() -> None:
    early, late = torch.eye(8)[:4], 0.9 * torch.eye(8)[4:5].expand(400, 8)
    state = fed(FrequentDirections(4, buffer=1), torch.cat((early, late)), list(range(404)))
    energies, directions = descending(FrequentDirections(4, buffer=1).gram(state))
    assert energies[0] > 100
    assert directions[0, 4].abs() > 0.999


@pytest.mark.parametrize(("slots_and_new", "dim"), [(9, 30), (30, 30), (31, 30), (200, 30)])
def test_one_shrink_is_that_of_the_singular_values(slots_and_new: int, dim: int) -> None:
    sketch, rows = FrequentDirections(4, buffer=2), torch.randn(3, slots_and_new, dim, generator=torch.Generator().manual_seed(1))
    state = fed(sketch, rows, [6])
    _, values, directions = torch.linalg.svd(rows.double(), full_matrices=False)
    left = (values[:, :4] ** 2 - values[:, 4:5] ** 2).sqrt().unsqueeze(-1) * directions[:, :4]
    assert torch.allclose(sketch.gram(state), left.mT @ left, rtol=1e-4, atol=1e-4)
    assert (state[:, 4:] == 0).all()


@given(rows=streams(), data=st.data())
def test_gram_is_the_sum_of_outer_products_in_any_blocks(rows: torch.Tensor, data: st.DataObject) -> None:
    state = fed(Gram(), rows, data.draw(st.lists(st.integers(0, rows.shape[-2]), max_size=12)))
    truth = exact(rows)
    assert state.isfinite().all()
    if float(rows.double().square().sum()) < torch.finfo(torch.float32).max:
        assert torch.allclose(Gram().gram(state), truth, rtol=1e-5, atol=1e-6 * float(truth.abs().amax()) + 1e-42)


def test_gram_of_products_that_overflow_with_both_signs_is_finite() -> None:
    # Which sums become NaN on the way hangs on the processor, so many are tried.
    rows = 1e30 * torch.randn(40, 9, 6, generator=torch.Generator().manual_seed(1))
    for count in range(1, 10):
        assert fed(Gram(), rows[:, :count], []).isfinite().all()


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
def test_rows_that_are_not_valid_change_nothing_whatever_they_hold(sketch: Sketch) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(2, 3, 60, 8, generator=generator)
    valid = torch.rand(2, 3, 60, generator=generator) < torch.tensor([0.1, 0.5, 1.0]).unsqueeze(-1)
    state = sketch.start((2, 3), 8)
    alone = [[sketch.start((), 8) for _ in range(3)] for _ in range(2)]
    for block, block_valid in zip(rows.split(7, -2), valid.split(7, -1), strict=True):
        state = sketch.update(state, block.masked_fill(~block_valid.unsqueeze(-1), float("nan")), block_valid)
        for i in range(2):
            for j in range(3):
                alone[i][j] = sketch.update(alone[i][j], block[i, j][block_valid[i, j]])
    expected = torch.stack([torch.stack([sketch.gram(each) for each in line]) for line in alone])
    assert torch.allclose(sketch.gram(state), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(sketch.update(state, torch.full((2, 3, 30, 8), float("nan")), torch.zeros(2, 1, 1, dtype=torch.bool)), state)


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
def test_an_update_leaves_the_old_state_and_the_rows_as_they_are(sketch: Sketch) -> None:
    rows = torch.randn(2, 50, 8, dtype=torch.float64).half()
    state = sketch.update(sketch.start((2,), 8), rows[:, :2])
    before, rows_before = state.clone(), rows.clone()
    for count in (1, 2, 50):
        sketch.update(state, rows[:, :count])
        assert torch.equal(state, before)
        assert torch.equal(rows, rows_before)


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
@pytest.mark.parametrize("shape", [(0, 4, 6, 8), (3, 0, 8), (0, 8)])
def test_empty_batches_and_empty_blocks_are_fine(sketch: Sketch, shape: tuple[int, ...]) -> None:
    state = sketch.start(shape[:-2], 8)
    assert torch.equal(sketch.update(state, torch.ones(shape)), state)
    assert sketch.gram(state).shape == (*shape[:-2], 8, 8)


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1.0, 3e38, -3e38])
def test_any_finite_rows_give_finite_states_and_their_direction(sketch: Sketch, value: float) -> None:
    rows = torch.full((2, 90, 8), value)
    rows[1, ::2] *= -1
    state = fed(sketch, rows, [1, 2, 3, 50, 51])
    _, directions = descending(sketch.gram(state))
    assert state.isfinite().all()
    if abs(value) >= 1:
        assert torch.allclose(directions[:, 0].abs(), torch.full((2, 8), 8**-0.5, dtype=torch.float64), atol=1e-4)


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
def test_rows_in_two_directions_are_known_exactly(sketch: Sketch) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(4, 200, 2, generator=generator) @ torch.randn(4, 2, 8, generator=generator)
    assert torch.allclose(sketch.gram(fed(sketch, rows, [5, 6, 7, 100])), exact(rows), rtol=1e-4, atol=2e-3)


@given(rows=streams(), size=st.integers(1, 6), factor=st.sampled_from([0.0, 1e-60, 0.3, 4.0]))
def test_scaling_weighs_what_came_before_and_keeps_the_bound(rows: torch.Tensor, size: int, factor: float) -> None:
    sketch, early, late = FrequentDirections(size), rows[:, : rows.shape[1] // 2], rows[:, rows.shape[1] // 2 :]
    factors = torch.tensor([factor, 1.0])
    past = fed(sketch, early, [3] if early.shape[1] > 3 else [])
    state = sketch.update(sketch.scaled(past, factors), late)
    truth = factors.double()[:, None, None] * exact(early) + exact(late)
    energies = torch.linalg.eigvalsh(truth).flip(-1).clamp_min(0)
    rounding = 2e-6 * energies.sum(-1) + 1e-80
    for r in range(min(size, rows.shape[-1]) + 1):
        assert (spectral(truth - sketch.gram(state)) <= energies[:, r:].sum(-1) / (size + 1 - r) + rounding).all()


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
def test_scaled_multiplies_energies(sketch: Sketch) -> None:
    state = fed(sketch, torch.randn(3, 9, 8), [4])
    assert torch.allclose(sketch.gram(sketch.scaled(state, 0.25)), sketch.gram(state) / 4, rtol=1e-4, atol=1e-4)
    one = sketch.scaled(state, torch.tensor([1.0, 0.0, 1.0]))
    assert torch.equal(one[::2], state[::2])
    assert (one[1] == 0).all()


def test_a_row_that_scaling_made_vanish_is_not_mistaken_for_the_end() -> None:
    sketch = FrequentDirections(4)
    state = fed(sketch, torch.stack((1e-30 * torch.eye(8)[0], torch.eye(8)[1])), [])
    state = sketch.update(sketch.scaled(state, 1e-40), 1e-20 * torch.eye(8)[2:3])
    assert torch.allclose(torch.linalg.eigvalsh(sketch.gram(state))[-2:] * 1e40, torch.ones(2, dtype=torch.float64), rtol=1e-4)


def test_the_state_is_as_large_as_its_settings_say() -> None:
    assert FrequentDirections(4).start((2, 3), 20).shape == (2, 3, 8, 20)
    assert FrequentDirections(4, buffer=1).start((), 20).shape == (5, 20)
    assert FrequentDirections(30).start((2,), 20).shape == (2, 40, 20)
    assert Gram().start((2, 3), 20).shape == (2, 3, 20, 20)


def test_wrong_arguments_are_named() -> None:
    sketch = FrequentDirections(4)
    state = sketch.start((2,), 8)
    for call, argument in [
        (lambda: FrequentDirections(0), "size"),
        (lambda: FrequentDirections(True), "size"),
        (lambda: FrequentDirections(3, buffer=0), "buffer"),
        (lambda: sketch.update(state, torch.zeros(2, 5, 7)), "rows"),
        (lambda: sketch.update(state, torch.zeros(3, 5, 8)), "rows"),
        (lambda: sketch.update(state, torch.zeros(2, 5, 8), torch.ones(2, 5)), "valid"),
        (lambda: sketch.update(state[:, :-1], torch.zeros(2, 5, 8)), "state"),
        (lambda: sketch.scaled(state, -1.0), "factor"),
    ]:
        with pytest.raises(ConfigError, match=rf"^{argument}: expected"):
            call()
