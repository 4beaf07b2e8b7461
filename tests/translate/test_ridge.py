"""Ridge regressions against least squares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_kvcaches.translate.moments import fit_ridge


@given(
    inputs=st.integers(1, 8),
    outputs=st.integers(1, 5),
    count=st.integers(1, 20),
    lam=st.sampled_from([0.0, 1e-3, 1.0]),
    seed=st.integers(0, 999),
)
@example(inputs=4, outputs=1, count=3, lam=0.0, seed=543)  # The Cholesky factor exists, and its last pivot is rounding.
def test_the_ridge_regression_is_least_squares_with_a_row_for_each_penalty(
    inputs: int, outputs: int, count: int, lam: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(count, size, generator=generator, dtype=torch.float64) for size in (inputs, outputs))
    got = fit_ridge(x.T @ x, x.T @ y, lam)
    penalty = (lam * x.square().sum() / inputs).sqrt() * torch.eye(inputs, dtype=torch.float64)
    expected = torch.linalg.lstsq(
        torch.cat([x, penalty]), torch.cat([y, torch.zeros(inputs, outputs, dtype=torch.float64)]), driver="gelsd", rcond=1e-8
    ).solution
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max() + 1))


@pytest.mark.parametrize("lam", [0.0, 1e-12, 1e-6])
def test_collinear_inputs_give_small_weights_and_the_same_fit(lam: float) -> None:
    torch.manual_seed(0)
    base, y = torch.randn(200, 3).double(), torch.randn(200, 4).double()
    x = torch.cat([base, base @ torch.randn(3, 4).double(), torch.zeros(200, 1).double()], 1)
    weight = fit_ridge(x.T @ x, x.T @ y, lam)
    best = base @ torch.linalg.lstsq(base, y).solution
    assert weight.abs().max() < 1
    assert weight.dtype == torch.float64
    torch.testing.assert_close(x @ weight, best, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_a_factorisation_that_only_rounding_let_through_is_not_believed(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base, y = (torch.randn(200, size, generator=generator, dtype=torch.float64) for size in (3, 4))
    x = torch.cat([base, base @ torch.randn(3, 1, generator=generator, dtype=torch.float64)], 1)
    smallest = torch.linalg.lstsq(x, y, driver="gelsd", rcond=1e-8).solution
    torch.testing.assert_close(fit_ridge(x.T @ x, x.T @ y, 0.0), smallest, rtol=1e-5, atol=1e-7)


def test_moments_of_nothing_give_a_map_to_nothing_and_scale_does_not_matter() -> None:
    assert fit_ridge(torch.zeros(3, 3), torch.zeros(3, 2), 0.1).abs().max() == 0
    x, y = torch.randn(50, 6), torch.randn(50, 5)
    for factor in (1e-6, 1e6):
        torch.testing.assert_close(
            fit_ridge(x.T @ x * factor, x.T @ y * factor, 1e-3), fit_ridge(x.T @ x, x.T @ y, 1e-3), rtol=1e-4, atol=1e-6
        )
