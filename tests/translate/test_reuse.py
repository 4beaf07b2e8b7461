"""Closed forms against least squares on all rows, searches for something better, and brute force."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_kvcaches.translate.moments import BlockMoments
from hf_kvcaches.translate.paper.joint_svd import joint_svd
from hf_kvcaches.translate.reuse import ReducedRank, reduced_rank

TINY = 1e-9
SEEDS = st.integers(0, 10**6)


class Rows(NamedTuple):
    """Traces of both models, and what is known for nothing; (tokens, width) each, float64."""

    side: Tensor
    producer: Tensor
    consumer: Tensor
    own: Tensor | None = None

    @property
    def known(self) -> Tensor:
        return torch.cat([torch.ones(len(self.side), 1, dtype=torch.float64), self.side], dim=1)

    def moments(self) -> BlockMoments:
        blocks = {"one": self.known[:, :1], "side": self.side, "producer": self.producer, "consumer": self.consumer}
        blocks |= {} if self.own is None else {"own": self.own}
        made = BlockMoments({name: block.shape[1] for name, block in blocks.items()})
        made.add(**blocks)
        return made


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
    return made if decoder.codes is None else made + fit.coefficients(rows.producer, rows.own)[:, :rank] @ decoder.codes.double()


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
    rows = rows._replace(own=rows.side @ torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 2)
    one, other = (reduced_rank(each.moments(), metric_of(seed, 5), 1e-10) for each in (rows._replace(own=None), rows))
    coefficients = other.coefficients(rows.producer, rows.own)
    assert float((rows.own - rows.own.mean(0)).T.matmul(coefficients).abs().max()) < 1e-4 * float(coefficients.abs().max() * len(rows.own))
    assert float(coefficients.mean(0).abs().max()) < 1e-6
    # Where both have the same, nothing is lost.
    for rank in range(6):
        close(said(other, rows, rank), said(one, rows._replace(own=None), rank), 1e-3)


@given(seed=SEEDS)
def test_an_error_of_a_coefficient_costs_its_square(seed):
    rows, metric = rows_of(seed), metric_of(seed, 5)
    decoder = reduced_rank(rows.moments(), metric, TINY).decoder(torch.arange(5))
    close(decoder.codes.double() @ metric @ decoder.codes.double().T, torch.eye(5, dtype=torch.float64), 1e-3)


def test_columns_of_a_decoder_are_those_of_the_whole():
    rows = rows_of(0)
    fit = reduced_rank(rows.moments(), metric_of(0, 5), 1e-4)
    for kept in (None, torch.tensor([0, 2, 3])):
        whole, part = fit.decoder(kept), fit.decoder(kept, slice(1, 4))
        for one, other in zip(whole, part, strict=True):
            assert (one is None and other is None) or torch.equal(one[..., 1:4], other)


def test_what_is_known_may_be_nothing_but_a_constant():
    rows = rows_of(0)
    fit = reduced_rank(rows.moments(), metric_of(0, 5), TINY, known=False)
    assert fit.decoder(torch.arange(5)).side is None
    close(said(fit, rows, 5), least_squares(torch.cat([rows.known[:, :1], rows.producer], dim=1), rows.consumer))


def test_a_direction_that_costs_nothing_is_still_rebuilt_at_full_rank():
    rows = rows_of(0)
    metric = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    fit = reduced_rank(rows.moments(), metric, TINY)
    close(said(fit, rows, 5), least_squares(torch.cat([rows.known, rows.producer], dim=1), rows.consumer))


def svd_by_hand(x: Tensor, y: Tensor, rank: int) -> Tensor:
    """What the paper's translator rebuilds of the consumer's states at full length: an SVD of both side by side, and least squares."""
    _, _, directions = torch.linalg.svd(torch.cat([x, y], dim=1), full_matrices=False)
    latents = torch.cat([x, y], dim=1) @ directions[:rank].T
    return least_squares(x, latents) @ directions[:rank, x.shape[1] :]


@given(seed=SEEDS, heads=st.sampled_from([1, 2, 3]), size=st.integers(1, 3), rank=st.integers(1, 9), begin=st.integers(0, 2))
def test_the_papers_factorisation_is_an_svd_of_both_models_states_side_by_side(seed, heads, size, rank, begin):
    width = heads * size
    rows = rows_of(seed, producer=width + begin, consumer=2 * width)
    columns = slice(begin, begin + width), slice(width, 2 * width)
    rank = min(rank, width)
    made = joint_svd(rows.moments(), columns, rank, 1e-12, heads)
    x, y = rows.producer[:, columns[0]], rows.consumer[:, columns[1]]
    assert (made.encode.shape, made.decode.shape) == ((width, rank), (rank, width))
    expected = []
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        share = rank // heads + (1 if head < rank % heads else 0)
        expected.append(svd_by_hand(x[:, own], y[:, own], share))
    close(x @ made.encode.double() @ made.decode.double(), torch.cat(expected, dim=1), 1e-3)


def test_models_of_other_widths_have_a_factorisation_too():
    rows = rows_of(3, producer=6, consumer=4)
    made = joint_svd(rows.moments(), (slice(0, 6), slice(0, 4)), 3, 1e-12, heads=2)
    pieces = [svd_by_hand(rows.producer[:, 3 * h : 3 * h + 3], rows.consumer[:, 2 * h : 2 * h + 2], 2 - h) for h in (0, 1)]
    close(rows.producer @ made.encode.double() @ made.decode.double(), torch.cat(pieces, dim=1), 1e-3)
