"""Sketches against the exact sum of outer products: the bound for any stream in any blocks."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.codec.moments import descending
from hf_kvcaches.subspace.paper.side import Sketch


def exact(rows: torch.Tensor) -> torch.Tensor:
    return rows.double().mT @ rows.double()


def spectral(symmetric: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(symmetric).abs().amax(-1)


def fed(sketch: Sketch, rows: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The state after the rows came in blocks, cut at these places."""
    state = sketch.start(rows.shape[:-2], rows.shape[-1])
    for start, end in itertools.pairwise([0, *sorted(cuts), rows.shape[-2]]):
        state = sketch.update(state, rows[..., start:end, :])
    return state


@st.composite
def streams(draw: st.DrawFn) -> torch.Tensor:
    """(2, n, d) rows: spread out, in few directions, repeated, with zeros."""
    n, dim = draw(st.integers(0, 70)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(2, n, dim, generator=generator)
    kind = draw(st.sampled_from(["spread", "decaying", "deficient", "repeated", "axes"]))
    if kind == "decaying":
        rows *= 3.0 ** -torch.arange(dim)
    elif kind == "deficient":
        rows = rows[..., :1] * torch.randn(2, 1, dim, generator=generator)
    elif kind == "repeated":
        rows = rows[:, :1].expand(2, n, dim).clone()
    elif kind == "axes":
        rows = torch.eye(dim)[torch.randint(dim, (2, n), generator=generator)]
    if draw(st.booleans()):
        rows[:, :: draw(st.integers(1, 4))] *= draw(st.sampled_from([0.0, 1e-3, 1e3]))
    return rows


def within_bound(truth: torch.Tensor, known: torch.Tensor, size: int) -> None:
    energies, lost = torch.linalg.eigvalsh(truth).flip(-1).clamp_min(0), truth - known
    rounding = 2e-6 * energies.sum(-1) + 1e-30
    for r in range(min(size, truth.shape[-1]) + 1):
        assert (spectral(lost) <= energies[:, r:].sum(-1) / (size + 1 - r) + rounding).all()
    assert (torch.linalg.eigvalsh(lost)[:, 0] >= -rounding).all()


@given(rows=streams(), size=st.integers(1, 14), data=st.data())
def test_frequent_directions_keeps_its_bound_in_any_blocks(rows: torch.Tensor, size: int, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, rows.shape[-2]), max_size=12) | st.just(list(range(rows.shape[-2]))))
    sketch = Sketch(size)
    state = fed(sketch, rows, cuts)
    assert state.dtype == torch.float32
    assert state.shape == (2, min(size, rows.shape[-1]), rows.shape[-1])
    within_bound(exact(rows), sketch.gram(state), size)
    if rows.shape[-1] <= size:
        assert torch.allclose(sketch.gram(state), exact(rows), rtol=1e-5, atol=1e-5 * float(exact(rows).abs().max()) + 1e-30)


@given(rows=streams(), size=st.integers(1, 6), factor=st.sampled_from([0.0, 0.3, 4.0]))
def test_scaling_weighs_what_came_before_and_keeps_the_bound(rows: torch.Tensor, size: int, factor: float) -> None:
    sketch, early, late = Sketch(size), rows[:, : rows.shape[1] // 2], rows[:, rows.shape[1] // 2 :]
    state = sketch.update(fed(sketch, early, []), late, factor)
    within_bound(factor * exact(early) + exact(late), sketch.gram(state), size)


@given(rows=streams(), data=st.data())
def test_gram_is_the_sum_of_outer_products_in_any_blocks(rows: torch.Tensor, data: st.DataObject) -> None:
    state = fed(Sketch(), rows, data.draw(st.lists(st.integers(0, rows.shape[-2]), max_size=12)))
    assert torch.allclose(Sketch().gram(state), exact(rows), rtol=1e-5, atol=1e-6 * float(exact(rows).abs().max()) + 1e-42)


def test_a_late_direction_in_small_pieces_is_not_lost() -> None:
    early, late = torch.eye(8)[:4], 0.9 * torch.eye(8)[4:5].expand(400, 8)
    sketch = Sketch(4)
    energies, directions = descending(sketch.gram(fed(sketch, torch.cat((early, late)), list(range(404)))))
    assert energies[0] > 100
    assert directions[0, 4].abs() > 0.999


@pytest.mark.parametrize("size", [None, 3, 20])
def test_an_update_leaves_the_old_state_and_the_rows_as_they_are(size: int | None) -> None:
    sketch, rows = Sketch(size), torch.randn(2, 50, 8).half()
    state = sketch.update(sketch.start((2,), 8), rows[:, :2])
    before, rows_before = state.clone(), rows.clone()
    sketch.update(state, rows)
    assert torch.equal(state, before)
    assert torch.equal(rows, rows_before)
