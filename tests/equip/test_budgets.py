"""Budgets add up, and those that can't work are refused with a reason."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import EquipCache
from hf_kvcaches.equip.budgets import pyramid_budgets, resolve_budgets, slots_for
from hf_kvcaches.errors import ConfigError
from tests import tiny


@pytest.mark.parametrize(
    "budget", [0, -1, True, 0.0, -0.5, 1.5, float("nan"), float("inf"), None, "512", [1, 2], [4, 4, 0], [4, True, 4], []]
)
def test_a_budget_that_can_not_work_is_refused_by_name(budget):
    with pytest.raises(ConfigError, match="budget"):
        resolve_budgets(budget, 3)


def test_a_number_of_tokens_written_as_a_float_is_refused_with_the_number_to_write():
    with pytest.raises(ConfigError, match="Write 512 for tokens"):
        resolve_budgets(512.0, 2)


@pytest.mark.parametrize(("budget", "tokens", "slots"), [(7, 100, 7), (7, 3, 7), (0.25, 101, 25), (1.0, 10, 10), (0.01, 10, 1)])
def test_a_share_is_rounded_down_but_never_to_nothing(budget, tokens, slots):
    assert slots_for(budget, tokens) == slots


def test_a_budget_holds_the_protected_tokens_and_one_token_to_come():
    model = tiny.llama()
    for budget, sinks, recent in ((8, 4, 4), (5, 4, 0), (1, 0, 0)):
        EquipCache(model, "h2o", budget, sinks=sinks, recent=recent)
    with pytest.raises(ConfigError, match=r"budget: 8 tokens are too few for sinks=4 \+ recent=5. Give at least 9"):
        EquipCache(model, "h2o", 8, sinks=4, recent=5)
    with pytest.raises(ConfigError, match="Give at least 5"):
        EquipCache(model, "h2o", 4, sinks=4, recent=0)


@given(
    layers=st.integers(1, 80),
    budget=st.integers(1, 5000),
    beta=st.floats(1, 100),
    floor=st.one_of(st.none(), st.integers(0, 5000)),
)
def test_a_pyramid_falls_and_sums_up_to_the_budget_of_all_layers(layers, budget, beta, floor):
    floor = None if floor is None else min(floor, budget)
    found = pyramid_budgets(layers, budget, beta=beta, floor=floor)
    assert len(found) == layers
    assert sum(found) == layers * budget
    assert min(found) >= (min(68, budget // 2) if floor is None else floor)
    assert all(after <= before + 1 for before, after in pairwise(found))
    steps = [before - after for before, after in pairwise(found)]
    assert not steps or max(steps) - min(steps) <= 2  # a straight line, but for rounding


def test_a_pyramid_has_the_slope_of_the_paper():
    # From twice the mean less its twentieth to its twentieth.
    assert pyramid_budgets(3, 100, floor=0) == [195, 100, 5]
    assert pyramid_budgets(3, 120, floor=20) == [215, 120, 25]
    assert pyramid_budgets(4, 100, beta=1) == [100] * 4
    assert pyramid_budgets(1, 100) == [100]


WRONG = {"model": (0, True), "budget": (0, 0.5, True), "beta": (0.5, True, float("nan")), "floor": (65, -1, 1.0)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_pyramid_that_can_not_stand_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match="layers" if name == "model" else name):
        pyramid_budgets(**{"model": 4, "budget": 64, name: value})
