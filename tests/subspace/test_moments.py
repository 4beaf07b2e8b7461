"""Moments and projections against sums over the vectors themselves, explicit rotations and brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.rotation import Layout
from hf_kvcaches.subspace.moments import Moments, allocate, in_metric, principal, rank_for_energy, rotation_average


def cloud(seed: int, *shape: int) -> torch.Tensor:
    """Vectors with directions of very different energy."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(*shape[:-2], shape[-1], shape[-1], generator=generator, dtype=torch.float64)
    return torch.randn(shape, generator=generator, dtype=torch.float64) @ (spread * 0.6 ** torch.arange(shape[-1]).unsqueeze(-1))


def moment_of(rows: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...ni,...nj->...ij", rows, rows) / rows.shape[-2]


def loss(projection: torch.Tensor, gram: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """trace(M (I - P) G (I - P)')."""
    rest = torch.eye(gram.shape[-1], dtype=torch.float64) - projection
    return (metric @ rest @ gram @ rest.mT).diagonal(dim1=-2, dim2=-1).sum(-1)


def test_moments_sum_over_batches_blocks_and_merged_parts() -> None:
    rows = cloud(0, 2, 3, 3000, 5)
    valid = torch.rand(2, 1, 3000, generator=torch.Generator().manual_seed(1)) < 0.7
    first, second = Moments((3,), 5), Moments((3,), 5)
    first.add(rows[:1], valid[:1])
    for block, block_valid in zip(rows[1:].split(2500, -2), valid[1:].split(2500, -1), strict=True):
        second.add(block.masked_fill(~block_valid.unsqueeze(-1), float("nan")), block_valid)
    first.merge(second)
    kept = torch.cat([rows[i][:, valid[i, 0]] for i in range(2)], dim=-2)
    assert first.count.tolist() == [kept.shape[-2]] * 3
    assert first.total.dtype == torch.float64
    assert torch.allclose(first.mean, moment_of(kept))


def test_moments_count_in_half_types_and_without_leading_dimensions() -> None:
    rows = torch.randn(70, 4).to(torch.bfloat16)
    moments = Moments((), 4)
    assert (moments.mean == 0).all()
    moments.add(rows)
    assert moments.count == 70
    assert torch.allclose(moments.mean, moment_of(rows.double()))


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


def choices(dim: int, multiple_of: int, minimum: int) -> list[int]:
    """All ranks that may be given."""
    return sorted({min(rank, dim) for rank in range(0, dim + multiple_of, multiple_of) if min(rank, dim) >= min(minimum, dim)})


def cheapest(losses: list[torch.Tensor], budget: float, costs: list[float], multiple_of: int, minimum: int) -> float:
    """The least remaining energy over all choices of ranks."""
    options = [choices(len(each), multiple_of, minimum) for each in losses]
    return min(
        remaining(losses, ranks)
        for ranks in itertools.product(*options)
        if sum(rank * cost for rank, cost in zip(ranks, costs, strict=True)) <= budget
    )


def remaining(losses: list[torch.Tensor], ranks: tuple[int, ...] | list[int]) -> float:
    return float(sum(each[rank:].sum() for each, rank in zip(losses, ranks, strict=True)))


energy_lists = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=4)


@given(numbers=energy_lists, multiple_of=st.sampled_from([1, 2]), minimum=st.integers(0, 2), data=st.data())
def test_allocation_is_the_best_for_equal_costs_and_a_step_from_it_otherwise(
    numbers: list[list[int]], multiple_of: int, minimum: int, data: st.DataObject
) -> None:
    losses = [torch.tensor(sorted(each, reverse=True), dtype=torch.float64) for each in numbers]
    equal = data.draw(st.booleans())
    heads = len(losses)
    costs = [3.0] * heads if equal else data.draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=heads, max_size=heads))
    least = sum(choices(len(each), multiple_of, minimum)[0] * cost for each, cost in zip(losses, costs, strict=True))
    budget = least + data.draw(st.integers(0, 60))
    ranks = allocate(losses, budget, cost=costs, multiple_of=multiple_of, minimum=minimum)
    assert all(rank in choices(len(each), multiple_of, minimum) for rank, each in zip(ranks, losses, strict=True))
    assert sum(rank * cost for rank, cost in zip(ranks, costs, strict=True)) <= budget
    best, have = cheapest(losses, budget, costs, multiple_of, minimum), remaining(losses, ranks)
    # A last step of fewer directions costs less than the others.
    if equal and all(len(each) % multiple_of == 0 for each in losses):
        assert have == best
    else:
        assert have <= best + max(float(each[:multiple_of].sum()) for each in losses)


def test_allocation_prefers_energy_for_its_cost_and_does_not_buy_nothing() -> None:
    losses = [torch.tensor([8.0, 4, 0, 0]), torch.tensor([9.0, 9, 9, 9])]
    assert allocate(losses, 100, cost=1) == [2, 4]
    assert allocate(losses, 6, cost=[1, 4], minimum=0) == [2, 1]
    assert allocate(losses, 4, cost=[1, 4], minimum=0) == [2, 0]
    assert allocate(losses, 7, cost=[4, 1], minimum=0) == [0, 4]
    assert allocate(losses, 8, cost=1, multiple_of=4) == [4, 4]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(8, 8), (4, 8), (4, 7), (2, 3)])
def test_rotation_average_is_the_sum_over_explicit_rotations(layout: Layout, rotary_dim: int, head_dim: int) -> None:
    geometry = RotaryGeometry(10.0 ** -torch.arange(rotary_dim // 2, dtype=torch.float64), head_dim, layout=layout)
    moment = moment_of(cloud(11, 2, 30, head_dim))
    distances, weights = torch.tensor([0, 1, 2, 7, 1000]), torch.tensor([0.5, 0.2, 0.1, 0.1, 0.3])
    expected = torch.zeros_like(moment)
    for distance, weight in zip(distances.tolist(), weights.double().tolist(), strict=True):
        # Each row is where one axis goes: the transpose of the rotation.
        turn = geometry.shift(torch.eye(head_dim, dtype=torch.float64)[None, None], distance)[0, 0].mT
        expected += weight * turn @ moment @ turn.mT
    assert torch.allclose(rotation_average(moment, geometry, distances, weights), expected, atol=1e-12)
    uniform = rotation_average(moment, geometry, distances)
    assert torch.allclose(uniform, rotation_average(moment, geometry, distances, torch.full((5,), 0.2)), atol=1e-7)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_averaged_metric_gives_the_logits_of_rotated_queries_and_keys(layout: Layout) -> None:
    geometry = RotaryGeometry(10.0 ** -torch.arange(3, dtype=torch.float64), 6, layout=layout)
    queries, key = cloud(12, 20, 6), cloud(13, 1, 6)
    logits = [geometry.rotate(queries[None, None], 40) @ geometry.rotate(key[None, None], 40 - distance).mT for distance in (0, 3, 11)]
    metric = rotation_average(moment_of(queries), geometry, torch.tensor([0, 3, 11]))
    assert torch.allclose(torch.stack(logits).square().mean(), key @ metric @ key.mT)


def test_wrong_arguments_are_named() -> None:
    gram, geometry = torch.eye(4), RotaryGeometry(torch.ones(2, dtype=torch.float64), 4)
    one = [torch.tensor([2.0, 1.0])]
    for call, argument in [
        (lambda: Moments((2,), 4).add(torch.zeros(3, 5, 4)), "rows"),
        (lambda: Moments((2,), 4).add(torch.zeros(2, 5, 3)), "rows"),
        (lambda: Moments((2,), 4).merge(Moments((3,), 4)), "other"),
        (lambda: principal(torch.zeros(4, 3), 1), "gram"),
        (lambda: principal(gram, 0), "rank"),
        (lambda: principal(gram, 5), "rank"),
        (lambda: in_metric(gram, torch.eye(3), 2), "metric"),
        (lambda: in_metric(gram, gram, 2, damping=0.0), "damping"),
        (lambda: rank_for_energy(torch.ones(3), 1.5), "share"),
        (lambda: allocate(one, 5, cost=[1.0, 2.0]), "cost"),
        (lambda: allocate(one, 5, cost=0.0), "cost"),
        (lambda: allocate(one, 5, cost=1.0, multiple_of=0), "multiple_of"),
        (lambda: allocate(one, 5, cost=1.0, minimum=-1), "minimum"),
        (lambda: allocate(one, 1, cost=1.0, minimum=2), "budget"),
        (lambda: allocate([torch.tensor([1.0, 2.0])], 5, cost=1.0), r"losses\[0\]"),
        (lambda: rotation_average(torch.eye(3), geometry, torch.arange(3)), "moment"),
        (lambda: rotation_average(gram, geometry, torch.tensor(3)), "distances"),
        (lambda: rotation_average(gram, geometry, torch.arange(3), torch.ones(2)), "weights"),
    ]:
        with pytest.raises(ConfigError, match=rf"^{argument}: expected"):
            call()
    with pytest.raises(UnsupportedError):
        rotation_average(gram, RotaryGeometry(torch.ones(0, dtype=torch.float64), 4, kind="none"), torch.arange(3))
