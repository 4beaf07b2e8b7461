"""Sums over prompts against the products of all rows, and closed forms against least squares and searches for something better."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_kvcaches.translate.regression import BlockMoments, ReducedRank, fit_ridge, reduced_rank

TINY = 1e-9
SEEDS = st.integers(0, 10**6)


class Rows(NamedTuple):
    """Traces of both models, and what is known for nothing; (tokens, width) each, float64."""

    side: Tensor
    producer: Tensor
    consumer: Tensor
    producer_side: Tensor | None = None

    @property
    def known(self) -> Tensor:
        return torch.cat([torch.ones(len(self.side), 1, dtype=torch.float64), self.side], dim=1)

    def moments(self, *left_out: str) -> BlockMoments:
        moments = BlockMoments()
        moments.add(**{name: block for name, block in self._asdict().items() if block is not None and name not in left_out})
        return moments


def rows_of(seed: int, tokens: int = 120, side: int = 4, producer: int = 6, consumer: int = 5, noise: float = 0.5) -> Rows:
    """States of two models that are much alike, both partly made of what is known, with means far from 0."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    known, hidden = random(tokens, side) + random(side), random(tokens, 4)
    made = [
        known @ random(side, width) + hidden @ random(4, width) + noise * random(tokens, width) + 3 * random(width)
        for width in (producer, consumer)
    ]
    return Rows(known, *made)


def metric_of(seed: int, width: int) -> Tensor:
    root = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T + 0.1 * torch.eye(width, dtype=torch.float64)


def said(fit: ReducedRank, rows: Rows, rank: int) -> Tensor:
    """What codes of a rank rebuild."""
    decoder = fit.decoder(torch.arange(rank))
    made = decoder.bias.double() if decoder.side is None else rows.side @ decoder.side.double() + decoder.bias.double()
    return made if decoder.codes is None else made + fit.coefficients(rows.producer, rows.producer_side)[:, :rank] @ decoder.codes.double()


def cost(errors: Tensor, metric: Tensor) -> float:
    return float(((errors @ metric) * errors).sum(1).mean())


def least_squares(inputs: Tensor, targets: Tensor) -> Tensor:
    return inputs @ (torch.linalg.pinv(inputs) @ targets)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@given(seed=SEEDS, producer=st.integers(1, 7), consumer=st.integers(1, 7), side=st.integers(1, 5))
def test_at_full_rank_it_is_least_squares_on_all_that_is_known_and_all_states(seed, producer, consumer, side):
    rows = rows_of(seed, side=side, producer=producer, consumer=consumer)
    fit = reduced_rank(rows.moments(), metric_of(seed, consumer), TINY)
    expected = least_squares(torch.cat([rows.known, rows.producer], dim=1), rows.consumer)
    close(said(fit, rows, min(producer, consumer)), expected)
    close(said(fit, rows, 0), least_squares(rows.known, rows.consumer))


@given(seed=SEEDS, rank=st.integers(1, 4))
def test_no_other_codes_of_a_rank_do_better(seed, rank):
    """Against least squares for random codes, and alternating minimisation from there."""
    rows = rows_of(seed)
    metric = metric_of(seed + 1, 5)
    found = cost(rows.consumer - said(reduced_rank(rows.moments(), metric, TINY), rows, rank), metric)
    straight = torch.linalg.cholesky(metric)
    x, y = (part - least_squares(rows.known, part) for part in (rows.producer, rows.consumer))
    others = []
    for start in range(3):
        encode = torch.randn(6, rank, generator=torch.Generator().manual_seed(start), dtype=torch.float64)
        for _ in range(60):
            decode = torch.linalg.lstsq(x @ encode, y).solution
            others.append(cost(y - x @ encode @ decode, metric))
            encode = torch.linalg.pinv(x) @ (y @ straight) @ torch.linalg.pinv(decode @ straight)
    assert found <= min(others) * (1 + 1e-5)
    assert found == pytest.approx(min(others), rel=0.05)


@given(seed=SEEDS)
def test_each_direction_takes_the_square_of_its_strength_off_the_error(seed):
    rows, metric = rows_of(seed), metric_of(seed, 5)
    fit = reduced_rank(rows.moments(), metric, TINY)
    costs = [cost(rows.consumer - said(fit, rows, rank), metric) for rank in range(6)]
    for rank in range(5):
        assert costs[rank] - costs[rank + 1] == pytest.approx(float(fit.strengths[rank]) ** 2, rel=1e-3, abs=1e-5 * costs[0])
    assert costs == sorted(costs, reverse=True)
    assert fit.strengths.tolist() == sorted(fit.strengths.tolist(), reverse=True)


@given(seed=SEEDS, scale=st.sampled_from([1e-12, 1e-3, 1e6]))
def test_the_unit_of_the_metric_does_not_matter(seed, scale):
    rows, metric = rows_of(seed), metric_of(seed, 5)
    one, other = (reduced_rank(rows.moments(), metric * by, 1e-4) for by in (1.0, scale))
    torch.testing.assert_close(other.strengths, one.strengths * scale**0.5, rtol=1e-6, atol=0)
    for rank in range(6):
        close(said(other, rows, rank), said(one, rows, rank))


@given(seed=SEEDS)
def test_the_basis_of_the_producers_states_does_not_matter(seed):
    rows, metric = rows_of(seed), metric_of(seed, 5)
    turn = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 3 * torch.eye(6, dtype=torch.float64)
    one = reduced_rank(rows.moments(), metric, 1e-12)
    turned = rows._replace(producer=rows.producer @ turn)
    other = reduced_rank(turned.moments(), metric, 1e-12)
    for rank in range(6):
        close(said(other, turned, rank), said(one, rows, rank), 1e-3)


@given(seed=SEEDS, ridge=st.sampled_from([1e-6, 1e-3, 1e-1]))
def test_where_states_are_centred_does_not_matter(seed, ridge):
    """Regularisation pulls maps towards 0, and no mean with them."""
    rows, metric = rows_of(seed), metric_of(seed, 5)
    moved = rows._replace(side=rows.side - 7.0, producer=rows.producer + 20.0, consumer=rows.consumer - 11.0)
    one, other = (reduced_rank(each.moments(), metric, ridge) for each in (rows, moved))
    for rank in range(6):
        close(said(other, moved, rank) + 11.0, said(one, rows, rank), 1e-3)


@given(seed=SEEDS, ridge=st.sampled_from([1e-9, 1e-4]))
def test_where_what_is_known_says_it_all_codes_take_nothing_off(seed, ridge):
    rows = rows_of(seed)
    rows = rows._replace(consumer=rows.known @ torch.randn(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    metric = metric_of(seed, 5)
    fit = reduced_rank(rows.moments(), metric, ridge)
    spread = rows.consumer - rows.consumer.mean(0)
    assert float(fit.strengths.square().sum()) < 1e-5 * cost(spread, metric)
    for rank in range(6):
        close(said(fit, rows, rank), rows.consumer, 10 * ridge + 1e-4)


@given(seed=SEEDS, ridge=st.sampled_from([1e-10, 1e-7, 1e-4]))
def test_states_that_depend_on_each_other_or_on_what_is_known_do_no_harm(seed, ridge):
    rows = rows_of(seed)
    extra = torch.cat([rows.producer[:, :3], rows.side, torch.zeros(len(rows.side), 1, dtype=torch.float64), rows.known[:, :1]], dim=1)
    more = rows._replace(producer=torch.cat([rows.producer, extra], dim=1))
    metric = metric_of(seed, 5)
    one, other = reduced_rank(rows.moments(), metric, ridge), reduced_rank(more.moments(), metric, ridge)
    assert all(bool(part.isfinite().all()) for part in other if part is not None)
    for rank in range(6):
        left = [cost(each.consumer - said(fit, each, rank), metric) for fit, each in ((one, rows), (other, more))]
        assert left[1] == pytest.approx(left[0], rel=2e-2, abs=1e-6 * cost(rows.consumer, metric))


@given(seed=SEEDS)
def test_what_follows_from_what_the_producer_has_itself_is_not_sent(seed):
    rows = rows_of(seed)
    rows = rows._replace(
        producer_side=rows.side @ torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 2
    )
    one, other = (reduced_rank(each.moments(), metric_of(seed, 5), 1e-10) for each in (rows._replace(producer_side=None), rows))
    coefficients = other.coefficients(rows.producer, rows.producer_side)
    assert float((rows.producer_side - rows.producer_side.mean(0)).T.matmul(coefficients).abs().max()) < 1e-4 * float(
        coefficients.abs().max() * len(rows.producer_side)
    )
    assert float(coefficients.mean(0).abs().max()) < 1e-6
    # Where both have the same, nothing is lost.
    for rank in range(6):
        close(said(other, rows, rank), said(one, rows._replace(producer_side=None), rank), 1e-3)


@given(seed=SEEDS)
def test_an_error_of_a_coefficient_costs_its_square(seed):
    rows, metric = rows_of(seed), metric_of(seed, 5)
    decoder = reduced_rank(rows.moments(), metric, TINY).decoder(torch.arange(5))
    close(decoder.codes.double() @ metric @ decoder.codes.double().T, torch.eye(5, dtype=torch.float64), 1e-3)


def test_columns_of_a_decoder_are_those_of_the_whole():
    rows = rows_of(0)
    fit = reduced_rank(rows.moments(), metric_of(0, 5), 1e-4)
    for kept in (torch.tensor([], dtype=torch.int64), torch.tensor([0, 2, 3])):
        whole, part = fit.decoder(kept), fit.decoder(kept, slice(1, 4))
        for one, other in zip(whole, part, strict=True):
            assert (one is None and other is None) or torch.equal(one[..., 1:4], other)


def test_what_is_known_may_be_nothing_but_a_constant():
    rows = rows_of(0)
    fit = reduced_rank(rows.moments("side"), metric_of(0, 5), TINY)
    assert fit.decoder(torch.arange(5)).side is None
    close(said(fit, rows, 5), least_squares(torch.cat([rows.known[:, :1], rows.producer], dim=1), rows.consumer))


def test_a_direction_that_costs_nothing_is_still_rebuilt_at_full_rank():
    rows = rows_of(0)
    metric = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    fit = reduced_rank(rows.moments(), metric, TINY)
    close(said(fit, rows, 5), least_squares(torch.cat([rows.known, rows.producer], dim=1), rows.consumer))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99))
def test_moments_are_the_mean_products_of_all_rows_at_once(lengths, widths, seed):
    generator = torch.Generator().manual_seed(seed)
    names = [f"block {number}" for number in range(len(widths))]
    moments = BlockMoments()
    prompts = [[torch.randn(length, width, generator=generator) for width in widths] for length in lengths]
    for prompt in prompts:
        moments.add(**dict(zip(names, prompt, strict=True)))
    rows = {name: torch.cat(parts).double() for name, parts in zip(names, zip(*prompts, strict=True), strict=True)}
    for first, one in rows.items():
        torch.testing.assert_close(moments.of("one", first)[0], one.mean(0))
        for second, other in rows.items():
            torch.testing.assert_close(moments.of(first, second), one.T @ other / sum(lengths), rtol=1e-5, atol=1e-6)
    assert int(moments.sums.count) == sum(lengths)


def test_many_prompts_add_up_without_losing_digits():
    """One large number, then many small ones that float32 would drop."""
    moments = BlockMoments()
    moments.add(x=torch.tensor([[1e4]]))
    for _ in range(2000):
        moments.add(x=torch.ones(1, 1))
    assert float(moments.of("x", "x")) * 2001 == 1e8 + 2000


def test_states_far_from_zero_keep_their_covariance():
    generator = torch.Generator().manual_seed(0)
    moments, rows = BlockMoments(), []
    for _ in range(20):
        rows.append(torch.randn(50, 3, generator=generator) * torch.tensor([1.0, 0.1, 10.0]) + torch.tensor([1e4, -300.0, 5e3]))
        moments.add(x=rows[-1])
    expected = torch.cat(rows).double().T.cov(correction=0)
    scale = torch.outer(expected.diagonal().sqrt(), expected.diagonal().sqrt())
    torch.testing.assert_close(moments.covariance("x", "x") / scale, expected / scale, rtol=0, atol=1e-5)


def test_blocks_in_half_precision_are_multiplied_in_more():
    moments = BlockMoments()
    moments.add(x=torch.full((3000, 1), 1.0, dtype=torch.bfloat16))
    assert float(moments.sums.total[1, 1]) == 3000.0


def test_weights_count_tokens_more_or_less():
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(50, 3, generator=generator), torch.rand(50, generator=generator)
    moments = BlockMoments()
    moments.add(weights, x=rows)
    torch.testing.assert_close(moments.of("x", "x"), (rows.double().T * weights) @ rows.double() / 50)


def test_what_follows_from_a_block_is_taken_out_of_another():
    generator = torch.Generator().manual_seed(0)
    blocks = {name: torch.randn(50, width, generator=generator).double() for name, width in (("a", 2), ("x", 3), ("y", 4))}
    moments, expected = BlockMoments(), BlockMoments()
    moments.add(**blocks)
    before = moments.sums.total.clone()
    residual, slopes = moments.without("x", "a", 1e-3)
    torch.testing.assert_close(slopes, fit_ridge(moments.covariance("a", "a"), moments.covariance("a", "x"), 1e-3))
    expected.add(**blocks | {"x": blocks["x"] - blocks["a"] @ slopes})
    torch.testing.assert_close(residual.sums.total, expected.sums.total)
    assert torch.equal(moments.sums.total, before)
    same, none = moments.without("x", "absent", 1e-3)
    assert same is moments
    assert none.shape == (0, 3)


@given(inputs=st.integers(1, 8), outputs=st.integers(1, 5), count=st.integers(1, 20), ridge=st.sampled_from([1e-6, 1e-3, 1.0]), seed=SEEDS)
def test_the_ridge_regression_is_least_squares_with_a_row_for_each_penalty(inputs, outputs, count, ridge, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(count, size, generator=generator, dtype=torch.float64) for size in (inputs, outputs))
    penalty = (ridge * x.square().sum() / inputs).sqrt() * torch.eye(inputs, dtype=torch.float64)
    rows, targets = torch.cat([x, penalty]), torch.cat([y, torch.zeros(inputs, outputs, dtype=torch.float64)])
    expected = torch.linalg.lstsq(rows, targets, driver="gelsd", rcond=1e-8).solution
    torch.testing.assert_close(fit_ridge(x.T @ x, x.T @ y, ridge), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max() + 1))


@pytest.mark.parametrize("ridge", [1e-12, 1e-9, 1e-6])
def test_collinear_inputs_give_small_weights_and_the_same_fit(ridge):
    torch.manual_seed(0)
    base, y = torch.randn(200, 3).double(), torch.randn(200, 4).double()
    x = torch.cat([base, base @ torch.randn(3, 4).double(), torch.zeros(200, 1).double()], 1)
    weight = fit_ridge(x.T @ x, x.T @ y, ridge)
    assert weight.abs().max() < 1
    assert weight.dtype == torch.float64
    torch.testing.assert_close(x @ weight, least_squares(base, y), rtol=1e-3, atol=1e-4)


def test_moments_of_nothing_give_a_map_to_nothing_and_scale_does_not_matter():
    assert fit_ridge(torch.zeros(3, 3), torch.zeros(3, 2), 0.1).abs().max() == 0
    x, y = torch.randn(50, 6), torch.randn(50, 5)
    for factor in (1e-6, 1e6):
        torch.testing.assert_close(
            fit_ridge(x.T @ x * factor, x.T @ y * factor, 1e-3), fit_ridge(x.T @ x, x.T @ y, 1e-3), rtol=1e-4, atol=1e-6
        )
