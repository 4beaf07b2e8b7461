"""Sums over texts against the products of all rows, and closed forms against least squares and searches for something better."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.regression import Group, Products, Regression, pairs_of, passes_of, regress
from tests import tiny
from tests.translate.pairs import filled, models, plain

TINY = 1e-10
SEEDS = st.integers(0, 10**6)
GROUP = Group((1,), (1,))


class Rows(NamedTuple):
    """States of both models, and the inputs of their attention; (tokens, width) each, float64."""

    own: Tensor
    theirs: Tensor
    producer: Tensor
    consumer: Tensor

    @property
    def blocks(self):
        names = ("consumer input", 0), ("producer input", 0), ("producer", 1), ("consumer", 1)
        return dict(zip(names, self, strict=True))


def rows_of(seed: int, tokens: int = 160, side: int = 4, producer: int = 6, consumer: int = 5, noise: float = 0.5) -> Rows:
    """States of two models that are much alike, both partly made of what is known, with means far from 0."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    known, hidden = random(tokens, side) + random(side), random(tokens, 4)
    theirs = known + 0.1 * random(tokens, side)
    made = [
        known @ random(side, width) + hidden @ random(4, width) + noise * random(tokens, width) + 3 * random(width)
        for width in (producer, consumer)
    ]
    return Rows(known, theirs, *made)


def products_of(*rows: Rows, dtype: torch.dtype = torch.float64) -> Products:
    products = Products(pairs_of([GROUP], [0], True), dtype, torch.device("cpu"))
    for each in rows:
        products.add(each.blocks, torch.ones(len(each.own)))
    products.finish(1)
    return products


def metric_of(seed: int, width: int) -> Tensor:
    root = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T + 0.1 * torch.eye(width, dtype=torch.float64)


def root_of(metric: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(metric)
    return ((vectors * values.sqrt()) @ vectors.T)[None]


def fit(rows: Rows, metric: Tensor, products: Products | None = None) -> Regression:
    return regress(products or products_of(rows), 0, GROUP, [root_of(metric)], (TINY, TINY))


def said(found: Regression, rows: Rows, rank: int) -> Tensor:
    """What codes of a rank rebuild."""
    directions = torch.arange(rank)
    side, decode, bias = (part.double() for part in found.decoder(directions))
    coefficients = found.coefficients(rows.producer.float(), rows.theirs.float()).double()[:, directions]
    return rows.own @ side + coefficients @ decode + bias


def cost(errors: Tensor, metric: Tensor) -> float:
    return float(((errors @ metric) * errors).sum(1).mean())


def with_ones(*parts: Tensor) -> Tensor:
    return torch.cat([parts[0].new_ones(len(parts[0]), 1), *parts], dim=1)


def least_squares(inputs: Tensor, targets: Tensor) -> Tensor:
    return inputs @ (torch.linalg.pinv(inputs) @ targets)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@given(seed=SEEDS, producer=st.integers(1, 7), consumer=st.integers(1, 7), side=st.integers(1, 5))
def test_at_full_rank_it_is_least_squares_on_all_that_is_known_and_all_states(seed, producer, consumer, side):
    rows = rows_of(seed, side=side, producer=producer, consumer=consumer)
    found = fit(rows, metric_of(seed, consumer))
    # What follows from the producer's own input is taken out of its states.
    left = rows.producer - least_squares(with_ones(rows.theirs), rows.producer)
    close(said(found, rows, len(found.strengths)), least_squares(with_ones(rows.own, left), rows.consumer))
    close(said(found, rows, 0), least_squares(with_ones(rows.own), rows.consumer))


@given(seed=SEEDS, rank=st.integers(1, 4))
def test_no_other_codes_of_a_rank_do_better(seed, rank):
    """Against least squares for random codes, and alternating minimisation from there."""
    rows, metric = rows_of(seed), metric_of(seed + 1, 5)
    found = cost(rows.consumer - said(fit(rows, metric), rows, rank), metric)
    straight = torch.linalg.cholesky(metric)
    left = rows.producer - least_squares(with_ones(rows.theirs), rows.producer)
    x, y = (part - least_squares(with_ones(rows.own), part) for part in (left, rows.consumer))
    others = []
    for start in range(3):
        encode = torch.randn(6, rank, generator=torch.Generator().manual_seed(start), dtype=torch.float64)
        for _ in range(60):
            decode = torch.linalg.lstsq(x @ encode, y).solution
            others.append(cost(y - x @ encode @ decode, metric))
            encode = torch.linalg.pinv(x) @ (y @ straight) @ torch.linalg.pinv(decode @ straight)
    assert found <= min(others) * (1 + 1e-4)
    assert found == pytest.approx(min(others), rel=0.05)


@given(seed=SEEDS)
def test_an_error_of_any_coefficient_costs_its_square(seed):
    rows, metric = rows_of(seed), metric_of(seed, 5)
    found = fit(rows, metric)
    gram = found.decode.double() @ metric @ found.decode.double().T
    close(gram, torch.eye(len(gram), dtype=torch.float64), 1e-3)
    # And each direction takes the square of its strength off the cost.
    costs = [cost(rows.consumer - said(found, rows, rank), metric) for rank in range(len(gram) + 1)]
    for rank, strength in enumerate(found.strengths.tolist()):
        assert costs[rank] - costs[rank + 1] == pytest.approx(strength**2, rel=1e-2, abs=1e-4 * costs[0])


@given(seed=SEEDS)
def test_coefficients_have_the_mean_0_and_are_not_correlated(seed):
    rows = rows_of(seed)
    found = fit(rows, metric_of(seed, 5))
    coefficients = found.coefficients(rows.producer.float(), rows.theirs.float()).double()
    assert float(coefficients.mean(0).abs().max()) < 1e-3 * float(coefficients.std())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_sums_of_several_texts_are_the_covariances_of_all_rows(dtype, tolerance):
    """Also where means are a thousand times as large as what varies."""
    texts = [rows_of(seed) for seed in range(3)]
    texts = [Rows(*(part + 1000 for part in rows)) for rows in texts]
    products = products_of(*texts, dtype=dtype)
    whole = {name: torch.cat([rows.blocks[name] for rows in texts]) for name in texts[0].blocks}
    for first, second in products.pairs:
        expected = torch.cov(torch.cat([whole[first], whole[second]], dim=1).T, correction=0)
        close(products.covariance([first], [second]), expected[: whole[first].shape[1], -whole[second].shape[1] :], tolerance)
        close(products.covariance([second], [first]), products.covariance([first], [second]).T, tolerance)
    for name, mean in products.means.items():
        close(mean, whole[name].mean(0), 1e-6)
    assert int(products.tokens) == 480


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_token_of_weight_2_counts_as_two(dtype, tolerance):
    rows = rows_of(4)
    weights = torch.arange(len(rows.own)) % 3  # some count nothing
    weighted, repeated = (Products(pairs_of([GROUP], [0], True), dtype, torch.device("cpu")) for _ in range(2))
    weighted.add(rows.blocks, weights)
    often = {name: block.repeat_interleave(weights, 0) for name, block in rows.blocks.items()}
    repeated.add(often, torch.ones(int(weights.sum())))
    for products in (weighted, repeated):
        products.finish(1)
    assert weighted.tokens == repeated.tokens == weights.sum()
    for first, second in weighted.pairs:
        close(weighted.covariance([first], [second]), repeated.covariance([first], [second]), tolerance)


def test_states_that_follow_from_each_other_are_solved_for_all_the_same():
    rows = rows_of(3)
    rows = rows._replace(producer=torch.cat([rows.producer, rows.producer, 0 * rows.producer], dim=1))
    found = fit(rows, metric_of(0, 5))
    left = rows.producer - least_squares(with_ones(rows.theirs), rows.producer)
    close(said(found, rows, len(found.strengths)), least_squares(with_ones(rows.own, left), rows.consumer), 1e-3)


# In how many passes over the texts sums fit the memory

KINDS = {"producer": 2048, "consumer": 2048, "producer input": 4096, "consumer input": 4096}
LARGE = {(kind, layer): width for kind, width in KINDS.items() for layer in range(32)}
GIB = 1 << 30


def passes(memory: int, lowest: tuple[int, ...] = (0,)) -> list[list[Group]]:
    groups = [Group.of([layer], range(32)) for layer in range(1, 32)]
    return passes_of(groups, LARGE, lowest, False, 256, memory)


@pytest.mark.parametrize("memory", [12 * GIB, 8 * GIB, 16 * GIB])
def test_a_pair_of_eight_billion_parameters_fits_a_memory_in_passes(memory):
    found = passes(memory)
    assert [layer for groups in found for group in groups for layer in group.layers] == list(range(1, 32))
    assert (len(found) == 1) == (memory == 16 * GIB)
    for groups in found:
        assert 8 * sum(LARGE[one] * LARGE[other] for one, other in {*pairs_of(groups, [0], False)}) < memory


def test_less_memory_takes_more_passes_and_all_settings_that_are_compared_share_them():
    counts = [len(passes(memory * GIB)) for memory in (6, 8, 12, 24)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    assert len(passes(1 << 60, lowest=(0, 1, 2, 4, 8))) == 1
    with pytest.raises(ConfigError, match=r"memory: expected [\d,]+ bytes or more for these models"):
        passes(GIB)


def test_a_fit_in_several_passes_gives_the_translator_of_one():
    producer, consumer = models()
    ids, texts = tiny.ids(1, 30, seed=7), [tiny.ids(60, seed=number).tolist() for number in range(6)]
    whole, parted = (plain(producer, consumer, texts, metric="loss", payload=2.0, memory=memory) for memory in (GIB, 2_240_000))
    for layer, own in filled(whole, producer, consumer, ids).items():
        for found, expected in zip(filled(parted, producer, consumer, ids)[layer], own, strict=True):
            assert float((found - expected).abs().max()) < 1e-3
