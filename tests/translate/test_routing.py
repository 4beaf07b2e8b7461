"""Choosing layers against plain searches that score every set, and over functions with ties, rivals and partners."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.translate.paper.routing import Route, Step, select

Table = dict[frozenset[int], float]


def subsets(layers: int) -> list[frozenset[int]]:
    return [frozenset(chosen) for size in range(layers + 1) for chosen in combinations(range(layers), size)]


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, Table]:
    """Any function of sets; small whole numbers make ties likely."""
    layers = draw(st.integers(1, 5))
    values = st.integers(-3, 3).map(float) if draw(st.booleans()) else st.floats(-2, 2)
    return layers, {chosen: draw(values) for chosen in subsets(layers)}


class Counting:
    """A table as a score that remembers how often each set was asked for."""

    def __init__(self, table: Callable[[frozenset[int]], float]) -> None:
        self.table, self.asked = table, Counter[frozenset[int]]()

    def __call__(self, layers: frozenset[int]) -> float:
        assert isinstance(layers, frozenset)
        self.asked[layers] += 1
        return self.table(layers)


def slow_greedy(table: Table, pool: list[int], most: int) -> list[int]:
    """The order alone, looking at every candidate at every step."""
    order: list[int] = []
    while len(order) < most:
        now = table[frozenset(order)]
        best, best_value = None, -math.inf
        for layer in sorted(pool):
            if layer not in order and table[frozenset([*order, layer])] > best_value:
                best, best_value = layer, table[frozenset([*order, layer])]
        if best is None or best_value - now <= 0:
            break
        order.append(best)
    return order


@given(case=tables(), data=st.data())
def test_the_route_is_the_most_efficient_set_on_the_greedy_way(case: tuple[int, Table], data: st.DataObject) -> None:
    layers, table = case
    pool, most = data.draw(st.integers(1, layers)), data.draw(st.integers(0, layers))
    score = Counting(table.__getitem__)
    route = select(score, range(layers), pool=pool, most=most)

    alone = {layer: table[frozenset({layer})] - table[frozenset()] for layer in range(layers)}
    order = slow_greedy(table, sorted(range(layers), key=lambda layer: (-alone[layer], layer))[:pool], most)
    best: tuple[float, list[int]] = (-math.inf, [])
    for count in range(1, len(order) + 1):
        gain = table[frozenset(order[:count])] - table[frozenset()]
        before = table[frozenset(order[: count - 1])]
        assert route.steps[count - 1] == Step(order[count - 1], table[frozenset(order[:count])] - before, gain)
        if gain / count > best[0]:
            best = gain / count, order[:count]
    assert route.patched == tuple(sorted(best[1]))
    assert route.sensitivity == alone
    assert len(route.steps) == len(route.efficiencies) == len(order)
    assert max(score.asked.values()) == 1
    assert Route.from_json(json.loads(json.dumps(route.to_json()))) == route


def test_where_layers_only_add_up_the_best_alone_is_the_most_efficient() -> None:
    worth = [0.0, 5.0, -1.0, 3.0, 1.0]
    route = select(lambda chosen: sum(worth[i] for i in chosen), range(5), pool=5, most=5)
    assert route.patched == (1,)
    assert [step.layer for step in route.steps] == [1, 3, 4]
    assert [step.total for step in route.steps] == [5.0, 8.0, 9.0]
    assert route.efficiencies == (5.0, 4.0, 3.0)


def test_of_two_layers_that_replace_each_other_one_is_taken() -> None:
    def score(chosen: frozenset[int]) -> float:
        return 5.0 * bool(chosen & {1, 2}) + 1.0 * (3 in chosen)

    route = select(score, range(4), pool=5, most=5)
    assert route.sensitivity == {0: 0.0, 1: 5.0, 2: 5.0, 3: 1.0}
    assert [step.layer for step in route.steps] == [1, 3]


def test_partners_of_a_sensitive_layer_are_taken_with_it() -> None:
    def score(chosen: frozenset[int]) -> float:
        return 1.0 * (2 in chosen) + 4.0 * (chosen >= {0, 2})

    route = select(score, range(3), pool=5, most=5)
    assert [step.layer for step in route.steps] == [2, 0]
    assert route.patched == (0, 2)


@pytest.mark.parametrize("worth", [0.0, -1.0])
def test_nothing_is_patched_where_nothing_helps(worth: float) -> None:
    assert select(lambda chosen: worth * len(chosen), range(3), pool=3, most=3).patched == ()


def test_ties_go_to_the_lower_layer_and_to_fewer_layers() -> None:
    route = select(lambda chosen: float(len(chosen)), [3, 1, 2], pool=2, most=5)
    assert [step.layer for step in route.steps] == [1, 2]
    assert route.efficiencies == (1.0, 1.0)
    assert route.patched == (1,)


def stored() -> dict[str, object]:
    return select(lambda chosen: float(len(chosen)), range(3), pool=5, most=5).to_json()


@pytest.mark.parametrize(
    "damage",
    [
        {"patched": [2, 1]},
        {"patched": [1, 1]},
        {"patched": "12"},
        {"patched": [1.0]},
        {"sensitivity": {"x": 1.0}},
        {"sensitivity": {"-1": 1.0}},
        {"sensitivity": []},
        {"steps": [{"layer": 1, "gain": 1.0}]},
        {"steps": [3]},
        {"efficiencies": [math.nan, 1.0, 1.0]},
        {"efficiencies": [1.0]},
    ],
)
def test_a_damaged_table_is_refused(damage: dict[str, object]) -> None:
    assert Route.from_json(stored()).to_json() == stored()
    with pytest.raises(ArtifactError):
        Route.from_json(stored() | damage)
    with pytest.raises(ArtifactError):
        Route.from_json({name: value for name, value in stored().items() if name not in damage})


def test_layers_that_the_caller_chose_are_a_route_without_tables() -> None:
    route = Route((0, 4))
    assert Route.from_json(json.loads(json.dumps(route.to_json()))) == route
