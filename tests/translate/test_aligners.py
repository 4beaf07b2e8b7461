"""Ridge regressions against least squares, and trainings that are killed against trainings that are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.aligners import MLPAligner, Trained, fit_ridge, train_aligner

RUN = {"steps": 40, "lr": 5e-3, "seed": 3, "every": 8, "rows": 16}


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


def data(count: int = 3, length: int = 60) -> list[tuple[Tensor, Tensor]]:
    return [rows(length + index, seed=index) for index in range(count)]


def ridge(batches: Sequence[tuple[Tensor, Tensor]], hidden: int = 32, lam: float = 1e-9) -> MLPAligner:
    x, y = (torch.cat(parts).double() for parts in zip(*batches, strict=True))
    return MLPAligner(fit_ridge(x.T @ x, x.T @ y, lam), hidden=hidden)


def bits(aligner: MLPAligner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in aligner.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


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
    x, y = rows(50)
    for factor in (1e-6, 1e6):
        torch.testing.assert_close(
            fit_ridge(x.T @ x * factor, x.T @ y * factor, 1e-3), fit_ridge(x.T @ x, x.T @ y, 1e-3), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    ("xx", "xy", "lam", "argument"),
    [
        (torch.eye(3)[:2], torch.ones(2, 1), 0.0, "xx"),
        (torch.eye(3), torch.ones(2, 1), 0.0, "xy"),
        (torch.eye(3) * torch.nan, torch.ones(3, 1), 0.0, "xx"),
        (torch.eye(3), torch.ones(3, 1) * torch.inf, 0.0, "xy"),
        (torch.eye(3), torch.ones(3, 1), -1.0, "lam"),
        (torch.eye(3), torch.ones(3, 1), float("nan"), "lam"),
    ],
)
def test_moments_that_make_no_sense_are_refused(xx: Tensor, xy: Tensor, lam: float, argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}: "):
        fit_ridge(xx, xy, lam)


def test_an_untrained_aligner_is_exactly_the_ridge_regression() -> None:
    weight, bias, x = torch.randn(6, 5), torch.randn(5), torch.randn(2, 9, 6)
    assert torch.equal(MLPAligner(weight, bias, hidden=8)(x), x @ weight + bias)
    assert torch.equal(MLPAligner(weight, hidden=8)(x), x @ weight)


def test_training_learns_what_no_linear_map_can() -> None:
    batches, (x, y) = data(4, 300), rows(500, seed=99)
    aligner = ridge(batches, hidden=64)
    linear = float((aligner(x) - y).detach().square().mean())
    report = train_aligner(aligner, batches, steps=600, lr=1e-2, every=100, rows=128)
    learned = float((aligner(x) - y).detach().square().mean())
    assert report.best < report.start / 4
    assert learned < linear / 4


def test_the_linear_path_is_trained_too_and_the_folded_map_is_what_was_measured() -> None:
    batches = data()
    aligner = MLPAligner(torch.zeros(6, 5), hidden=4)
    report = train_aligner(aligner, batches, steps=300, lr=2e-2, every=300, rows=64)
    assert aligner.weight.abs().max() > 0
    assert report.best < 0.1 * report.start
    held = [(x[len(x) - round(0.1 * len(x)) :], y[len(y) - round(0.1 * len(y)) :]) for x, y in batches]
    wrong = sum(float((aligner(x) - y).detach().square().sum()) for x, y in held)
    assert report.best == pytest.approx(wrong / sum(float(y.square().sum()) for _, y in held), rel=1e-3)


@pytest.mark.parametrize("lr", [1e3, 1e30])
def test_where_training_only_harms_the_ridge_solution_is_kept(lr: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(100, 6)
    batches = [(x, x @ torch.randn(6, 5))]
    aligner = ridge(batches)
    before, probe = bits(aligner), torch.randn(7, 6)
    expected = aligner(probe)
    report = train_aligner(aligner, batches, steps=20, lr=lr, every=5)
    assert (report.best, report.best_step) == (report.start, 0)
    assert torch.equal(aligner(probe), expected)
    assert torch.equal(aligner.weight, before["weight"])


def test_what_is_kept_is_the_best_on_rows_that_were_not_trained_on() -> None:
    x, y = rows(40)
    noise = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)) * 200
    batches = [(x, y + noise)]
    reports = []
    for steps in (50, 1500):
        aligner = ridge(batches, hidden=128)
        reports.append(train_aligner(aligner, batches, steps=steps, lr=1e-2, every=25, held_out=0.3))
    assert reports[1].best_step < 1500
    assert all(report.best <= report.start for report in reports)


def test_rows_that_are_kept_apart_are_not_trained_on() -> None:
    trained = []
    for factor in (1.0, 50.0):
        x, y = rows(60)
        aligner = MLPAligner(torch.zeros(6, 5), hidden=8)
        report = train_aligner(aligner, [(x, torch.cat([y[:54], factor * y[54:]]))], **(RUN | {"every": RUN["steps"]}))
        assert report.best_step == RUN["steps"]
        trained.append(aligner)
    assert same(*map(bits, trained))


@pytest.mark.parametrize(
    ("changes", "argument"),
    [({"steps": 0}, "steps"), ({"every": True}, "every"), ({"rows": 0}, "rows"), ({"lr": 0.0}, "lr"), ({"held_out": 1.0}, "held_out"),
     ({"weight_decay": -1.0}, "weight_decay")],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float], argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}: "):
        train_aligner(ridge(data()), data(), **(RUN | changes))


def test_batches_that_do_not_fit_are_refused() -> None:
    x, y = rows(30)
    for batches, name in (
        ([(x, y), (x[:, :5], y)], r"batches\[1\]"),
        ([(x, y[:-1])], r"batches\[0\]"),
        ([], "batches"),
        ([(x[:2], y[:2])], "batches"),
        ([(x * torch.nan, y)], "batches"),
        ([(x, torch.cat([y[:-1], y[-1:] * torch.nan]))], "batches"),
    ):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            train_aligner(MLPAligner(torch.zeros(6, 5), hidden=4), batches, **RUN)


def test_a_trained_aligner_is_not_trained_again_in_place() -> None:
    aligner = ridge(data())
    assert isinstance(train_aligner(aligner, data(), **RUN), Trained)
    with pytest.raises(ConfigError, match=r"^aligner: "):
        train_aligner(aligner, data(), **RUN)


@pytest.mark.parametrize(
    ("changes", "argument"), [({"weight": torch.ones(3)}, "weight"), ({"bias": torch.ones(3)}, "bias"), ({"hidden": 0}, "hidden")]
)
def test_an_aligner_of_shapes_that_do_not_fit_is_refused(changes: dict[str, object], argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}: "):
        MLPAligner(**({"weight": torch.ones(3, 2), "bias": torch.ones(2), "hidden": 2} | changes))
