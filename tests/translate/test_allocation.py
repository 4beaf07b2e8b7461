"""A budget shared out, against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.allocation import allocate


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


def test_wrong_arguments_are_named() -> None:
    one = [torch.tensor([2.0, 1.0])]
    for call, argument in [
        (lambda: allocate(one, 5, cost=[1.0, 2.0]), "cost"),
        (lambda: allocate(one, 5, cost=0.0), "cost"),
        (lambda: allocate(one, 5, cost=1.0, multiple_of=0), "multiple_of"),
        (lambda: allocate(one, 5, cost=1.0, minimum=-1), "minimum"),
        (lambda: allocate(one, 1, cost=1.0, minimum=2), "budget"),
        (lambda: allocate([torch.tensor([1.0, 2.0])], 5, cost=1.0), r"losses\[0\]"),
    ]:
        with pytest.raises(ConfigError, match=rf"^{argument}: expected"):
            call()
