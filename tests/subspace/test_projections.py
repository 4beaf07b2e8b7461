"""Projections against the vectors themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.subspace.projections import in_metric, principal, rank_for_energy
from tests.core.test_moments import cloud, moment_of


def loss(projection: torch.Tensor, gram: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """trace(M (I - P) G (I - P)')."""
    rest = torch.eye(gram.shape[-1], dtype=torch.float64) - projection
    return (metric @ rest @ gram @ rest.mT).diagonal(dim1=-2, dim2=-1).sum(-1)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_principal_loses_exactly_the_energies_beyond_its_rank(rank: int) -> None:
    rows = cloud(2, 4, 300, 6)
    gram, best = moment_of(rows), principal(moment_of(rows), rank)
    back = rows @ best.encode.mT @ best.decode.mT
    lost = (rows - back).square().sum(-1).mean(-1)
    _, values, directions = torch.linalg.svd(rows, full_matrices=False)
    assert torch.allclose(lost, best.energies[..., rank:].sum(-1), atol=1e-10)
    assert torch.allclose(best.energies, values**2 / 300)
    assert torch.allclose(best.decode @ best.encode, directions[:, :rank].mT @ directions[:, :rank], atol=1e-8)
    assert torch.allclose(best.encode @ best.decode, torch.eye(rank, dtype=torch.float64).expand(4, rank, rank), atol=1e-12)
    assert torch.allclose(best.kept, 1 - lost / gram.diagonal(dim1=-2, dim2=-1).sum(-1))


def test_principal_of_nothing_keeps_all_of_it() -> None:
    best = principal(torch.zeros(2, 4, 4), 2)
    assert best.kept.tolist() == [1, 1]
    assert torch.allclose(best.encode @ best.decode, torch.eye(2, dtype=torch.float64).expand(2, 2, 2))


@given(seed=st.integers(0, 2**20), rank=st.integers(1, 5))
def test_no_projection_of_the_same_rank_loses_less_in_the_metric(seed: int, rank: int) -> None:
    gram, metric = moment_of(cloud(seed, 40, 6)), moment_of(cloud(seed + 1, 40, 6))
    best = in_metric(gram, metric, rank)
    lost = loss(best.decode @ best.encode, gram, metric)
    assert torch.allclose(lost, best.energies[rank:].sum(), rtol=1e-3, atol=1e-5 * float(best.energies[0]))
    slack = 1e-5 * best.energies.sum()
    assert lost <= loss(principal(gram, rank).decode @ principal(gram, rank).encode, gram, metric) + slack
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 1e-1, 10.0):
        encode = best.encode + size * torch.randn(rank, 6, generator=generator, dtype=torch.float64)
        decode = best.decode + size * torch.randn(6, rank, generator=generator, dtype=torch.float64)
        assert lost <= loss(decode @ encode, gram, metric) + slack


def test_the_metric_is_the_mean_squared_error_of_a_logit() -> None:
    keys, queries = cloud(5, 400, 6), cloud(6, 300, 6)
    best = in_metric(moment_of(keys), moment_of(queries), 3)
    error = queries @ (keys - keys @ best.encode.mT @ best.decode.mT).mT
    assert torch.allclose(error.square().mean(), best.energies[3:].sum(), rtol=1e-3)


@pytest.mark.parametrize("metric_rank", [0, 1, 3, 6])
def test_at_full_rank_every_vector_comes_back_even_in_a_singular_metric(metric_rank: int) -> None:
    seen = cloud(7, 3, 50, 6)[..., :metric_rank]
    metric = moment_of(torch.nn.functional.pad(seen, (0, 6 - metric_rank)))
    full = in_metric(moment_of(cloud(8, 3, 50, 6)), metric * 1e-9, 6)
    assert torch.allclose(full.decode @ full.encode, torch.eye(6, dtype=torch.float64).expand(3, 6, 6), atol=1e-5)
    full = in_metric(torch.zeros(3, 6, 6), metric, 6)
    assert torch.allclose(full.decode @ full.encode, torch.eye(6, dtype=torch.float64).expand(3, 6, 6), atol=1e-5)


def test_a_singular_metric_loses_nothing_once_its_own_directions_are_kept() -> None:
    axis = torch.tensor([1.0, 2.0, 0, 0, 0, 0], dtype=torch.float64)
    gram, metric = moment_of(cloud(9, 50, 6)), torch.outer(axis, axis)
    best = in_metric(gram, metric, 1)
    assert loss(best.decode @ best.encode, gram, metric) <= 1e-5 * loss(torch.zeros(6, 6, dtype=torch.float64), gram, metric)


def test_in_the_identity_metric_it_is_the_principal_projection() -> None:
    gram = moment_of(cloud(10, 2, 50, 6))
    oblique, orthogonal = in_metric(gram, torch.eye(6).expand(2, 6, 6), 2), principal(gram, 2)
    assert torch.allclose(oblique.decode @ oblique.encode, orthogonal.decode @ orthogonal.encode, atol=1e-8)


@pytest.mark.parametrize(
    ("energies", "share", "rank"),
    [
        ([4.0, 3, 2, 1], 0.4, 1),
        ([4.0, 3, 2, 1], 0.41, 2),
        ([4.0, 3, 2, 1], 0.9, 3),
        ([4.0, 3, 2, 1], 1.0, 4),
        ([4.0, 3, 0, -1e-17], 1.0, 2),
        ([0.0, 0, 0, 0], 0.9, 1),
    ],
)
def test_rank_for_energy_is_the_smallest_that_reaches_the_share(energies: list[float], share: float, rank: int) -> None:
    assert rank_for_energy(torch.tensor([energies, [1.0, 0, 0, 0]]), share).tolist() == [rank, 1]
    assert rank_for_energy(torch.tensor(energies), share, minimum=3).item() == max(rank, 3)


def test_wrong_arguments_are_named() -> None:
    gram = torch.eye(4)
    for call, argument in [
        (lambda: principal(torch.zeros(4, 3), 1), "gram"),
        (lambda: principal(gram, 0), "rank"),
        (lambda: principal(gram, 5), "rank"),
        (lambda: in_metric(gram, torch.eye(3), 2), "metric"),
        (lambda: in_metric(gram, gram, 2, damping=0.0), "damping"),
        (lambda: rank_for_energy(torch.ones(3), 1.5), "share"),
    ]:
        with pytest.raises(ConfigError, match=rf"^{argument}: expected"):
            call()
