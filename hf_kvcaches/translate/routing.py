"""Which layers are patched and which are reused, by what it does to a metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_kvcaches.errors import ArtifactError, ConfigError, is_number, whole_number

# The metric, greater is better, with exactly these layers patched and all others reused.
Score = Callable[[frozenset[int]], float]


@dataclass(frozen=True)
class Step:
    """One layer more, taken by `greedy`.

    Args:
        gain: What it added to the score of those before it.
        total: What they all have over no patched layer at all.
    """

    layer: int
    gain: float
    total: float


@dataclass(frozen=True)
class Route:
    """The patched layers, and the tables that they were chosen by. Tables are empty where the caller chose.

    Args:
        sensitivity: For each layer, what patching it alone gains.
        steps: The greedy order, beyond the patched layers where more was tried.
        efficiencies: For the first 1, 2, ... of the steps, what they gain together for each unit of cost.
    """

    patched: tuple[int, ...]
    sensitivity: Mapping[int, float] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    efficiencies: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain dict that JSON can hold."""
        return {
            "patched": list(self.patched),
            "sensitivity": {str(layer): gain for layer, gain in self.sensitivity.items()},
            "steps": [{"layer": step.layer, "gain": step.gain, "total": step.total} for step in self.steps],
            "efficiencies": list(self.efficiencies),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Route:
        """Reads what `to_json` made; damage is an `ArtifactError`."""
        try:
            route = cls(
                patched=tuple(_index(layer) for layer in _listed(data["patched"])),
                sensitivity={_index(int(layer)): _number(gain) for layer, gain in data["sensitivity"].items()},
                steps=tuple(Step(_index(s["layer"]), _number(s["gain"]), _number(s["total"])) for s in _listed(data["steps"])),
                efficiencies=tuple(_number(value) for value in _listed(data["efficiencies"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"A route over layers is stored incompletely or damaged: {error!r}. Store all of to_json().") from error
        if list(route.patched) != sorted(set(route.patched)) or len(route.efficiencies) != len(route.steps):
            raise ArtifactError(f"A route over layers doesn't fit together: {dict(data)!r}. Store what to_json() gave.")
        return route


def restore_one(score: Score, layers: Iterable[int]) -> dict[int, float]:
    """What each layer gains when it alone is patched (equation 21), in the order of `layers`.

    Args:
        score: Asked once for each layer, and once for none.
    """
    known, indices = _Known.over(score), _indices("layers", layers)
    return {layer: known({layer}) - known(()) for layer in indices}


def greedy(score: Score, candidates: Iterable[int], most: int, *, least: int = 0) -> list[Step]:
    """Layers in the order in which each adds most to those before it (equation 22). Of equals, the lowest goes first.

    Stops when no candidate improves the score, or there are `most`. No set is scored twice.

    Args:
        least: Steps that are taken even where they improve nothing, because a pair may where neither of the two does alone.
    """
    known, left = _Known.over(score), sorted(_indices("candidates", candidates))
    most, least = whole_number("most", most, 0), whole_number("least", least, 0)
    taken: frozenset[int] = frozenset()
    steps: list[Step] = []
    while left and len(steps) < most:
        best = max(left, key=lambda layer: known(taken | {layer}))  # The first of equals, and `left` is in order.
        gain = known(taken | {best}) - known(taken)
        if gain <= 0 and len(steps) >= least:
            break
        taken |= {best}
        left.remove(best)
        steps.append(Step(best, gain, known(taken) - known(())))
    return steps


def select(
    score: Score,
    layers: Iterable[int],
    *,
    pool: int | None,
    least: int = 0,
    most: int | None,
    cost: Callable[[frozenset[int]], float] | float = 1.0,
) -> Route:
    """Chooses the layers to patch, as the appendix A of "Semantic Cache Distillation".

    The layers that gain most alone form a pool; from it `greedy` takes one after the other; and of the sets on its way that gain anything,
    the one that gains most for its cost is patched. Where none gains, nothing is patched.

    It asks for at most `1 + layers + pool * most` scores, each set once.

    Args:
        score: The metric, greater is better. It should not be noisy: with a sampled metric the best of many candidates looks better than
            it is, so measure the choice again on other prompts.
        layers: Those that may be patched. Leave out layers that the consumer has exactly for nothing.
        pool: How many enter the greedy search; None for all.
        least: The smallest number to patch if any is.
        most: The largest number; None for no limit.
        cost: What patching a set costs, above 0, or the cost of each layer.
    """
    known, indices = _Known.over(score), _indices("layers", layers)
    size = len(indices) if pool is None else whole_number("pool", pool, 1)
    limit = len(indices) if most is None else whole_number("most", most, 0)
    if whole_number("least", least, 0) > min(limit, size, len(indices)):
        raise ConfigError.of("least", f"at most {min(limit, size, len(indices))}: no more than most, pool and the layers", least)
    sensitivity = restore_one(known, indices)
    candidates = sorted(indices, key=lambda layer: (-sensitivity[layer], layer))[:size]
    steps = greedy(known, candidates, limit, least=least)
    order = [step.layer for step in steps]
    efficiencies = tuple(step.total / _cost(cost, frozenset(order[: k + 1])) for k, step in enumerate(steps))
    allowed = [k for k, step in enumerate(steps, start=1) if k >= least and step.total > 0]
    best = max(allowed, key=lambda k: efficiencies[k - 1], default=0)  # Of equals the first: the fewest layers.
    return Route(tuple(sorted(order[:best])), sensitivity, tuple(steps), efficiencies)


class _Known:
    """A score that is asked for each set at most once, and whose answers are numbers."""

    def __init__(self, score: Score) -> None:
        self._score, self._values = score, dict[frozenset[int], float]()

    @classmethod
    def over(cls, score: Score) -> _Known:
        return score if isinstance(score, cls) else cls(score)

    def __call__(self, layers: Iterable[int]) -> float:
        key = frozenset(layers)
        if key not in self._values:
            value = self._score(key)
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError):
                number = math.nan
            if not math.isfinite(number):
                raise ConfigError.of("score", f"a finite number for the patched layers {sorted(key)}", value)
            self._values[key] = number
        return self._values[key]


def _indices(argument: str, layers: Iterable[int]) -> list[int]:
    found = list(layers)
    if any(isinstance(layer, bool) or not isinstance(layer, int) or layer < 0 for layer in found) or len(set(found)) != len(found):
        raise ConfigError.of(argument, "indices of layers from 0, each once", found)
    return found


def _cost(cost: Callable[[frozenset[int]], float] | float, layers: frozenset[int]) -> float:
    value = cost(layers) if callable(cost) else cost * len(layers)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError.of("cost", f"a finite number above 0 for the patched layers {sorted(layers)}", value)
    return float(value)


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r} is not a list")
    return value


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not the index of a layer")
    return value


def _number(value: Any) -> float:
    if not is_number(value) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)
