"""The aligner with a hidden layer: it starts as the ridge regression, and is never worse on rows kept apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_kvcaches.translate.aligner import MLPAligner, train_aligner
from hf_kvcaches.translate.regression import fit_ridge


def rows(count: int, inputs: int = 6, outputs: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Targets with a part that no linear map gives, inputs of very different sizes, the last of them constant."""
    torch.manual_seed(7)
    mix, bend = torch.randn(inputs, outputs), torch.randn(inputs, outputs)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator)
    y = x @ mix + 3 * (x @ bend).abs() + 20
    x = x * torch.logspace(-2, 2, inputs)
    x[:, -1] = 1.0
    return x, y


def ridge(x: Tensor, y: Tensor, hidden: int = 32) -> MLPAligner:
    x, y = x.double(), y.double()
    return MLPAligner(fit_ridge(x.T @ x, x.T @ y, 1e-9), hidden=hidden)


def test_an_untrained_aligner_is_exactly_the_ridge_regression() -> None:
    weight, bias, x = torch.randn(6, 5), torch.randn(5), torch.randn(2, 9, 6)
    assert torch.equal(MLPAligner(weight, bias, hidden=8)(x), x @ weight + bias)
    assert torch.equal(MLPAligner(weight, hidden=8)(x), x @ weight)


def test_training_learns_what_no_linear_map_can() -> None:
    (x, y), (new_x, new_y) = rows(1200), rows(500, seed=99)
    aligner = ridge(x, y, hidden=64)
    linear = float((aligner(new_x) - new_y).detach().square().mean())
    train_aligner(aligner, x, y, steps=600, lr=1e-2)
    assert float((aligner(new_x) - new_y).detach().square().mean()) < linear / 4


@pytest.mark.parametrize("lr", [1e3, 1e30])
def test_where_training_only_harms_the_ridge_solution_is_kept(lr: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(100, 6)
    y, probe = x @ torch.randn(6, 5), torch.randn(7, 6)
    aligner = ridge(x, y)
    expected = aligner(probe)
    train_aligner(aligner, x, y, steps=20, lr=lr)
    assert torch.equal(aligner(probe), expected)


def test_what_is_kept_is_the_best_on_rows_that_were_not_trained_on() -> None:
    x, y = rows(40)
    noise = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)) * 200
    aligner = ridge(x, y + noise, hidden=128)
    before = float((aligner(x[36:]) - y[36:] - noise[36:]).detach().square().sum())
    train_aligner(aligner, x, y + noise, steps=1500, lr=1e-2)
    assert float((aligner(x[36:]) - y[36:] - noise[36:]).detach().square().sum()) <= before


def test_rows_that_are_kept_apart_are_not_trained_on() -> None:
    trained = []
    for factor in (1.0, 1.5):
        x, y = rows(60)
        aligner = MLPAligner(torch.zeros(6, 5), hidden=8)
        train_aligner(aligner, x, torch.cat([y[:54], factor * y[54:]]), steps=40, lr=5e-3)
        trained.append(aligner(x).detach())
    assert torch.equal(*trained)
