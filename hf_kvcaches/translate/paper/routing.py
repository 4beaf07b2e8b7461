"""The choice of the layers to patch, by a score."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_kvcaches.errors import ArtifactError, is_number

# The score with exactly these layers patched and all others reused; greater is better.
Score = Callable[[frozenset[int]], float]


@dataclass(frozen=True)
class Step:
    """One step of the greedy search.

    Args:
        layer: The layer that is added.
        gain: The gain in score over the step before.
        total: The gain in score over no patched layer.
    """

    layer: int
    gain: float
    total: float


@dataclass(frozen=True)
class Route:
    """The patched layers, and the scores that they were chosen by, which are empty where the caller chose.

    Args:
        sensitivity: The gain in score of patching each layer alone.
        steps: The greedy search, of which the first steps' layers are patched.
        efficiencies: The total gain of the first 1, 2, ... steps, divided by their number.
    """

    patched: tuple[int, ...]
    sensitivity: Mapping[int, float] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    efficiencies: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values."""
        return {
            "patched": list(self.patched),
            "sensitivity": {str(layer): gain for layer, gain in self.sensitivity.items()},
            "steps": [{"layer": step.layer, "gain": step.gain, "total": step.total} for step in self.steps],
            "efficiencies": list(self.efficiencies),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Route:
        """Read the dict of `to_json`; damage is an `ArtifactError`."""
        try:
            route = cls(
                tuple(data["patched"]),
                {int(layer): gain for layer, gain in data["sensitivity"].items()},
                tuple(Step(**step) for step in data["steps"]),
                tuple(data["efficiencies"]),
            )
            numbers = [*route.patched, *route.sensitivity, *(step.layer for step in route.steps)]
            sound = all(type(layer) is int and layer >= 0 for layer in numbers) and list(route.patched) == sorted(set(route.patched))
            gains = [*route.sensitivity.values(), *route.efficiencies, *(gain for step in route.steps for gain in (step.gain, step.total))]
            sound &= all(is_number(gain) and math.isfinite(gain) for gain in gains) and len(route.efficiencies) == len(route.steps)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"A route over layers is stored incompletely or damaged: {error!r}. Store all of to_json().") from error
        if not sound:
            raise ArtifactError(f"A route over layers doesn't fit together: {dict(data)!r}. Store what to_json() gave.")
        return route


def select(score: Score, layers: Sequence[int], *, pool: int, most: int) -> Route:
    """Choose the layers to patch, as appendix A of "Semantic Cache Distillation".

    The layers that gain most alone (equation 21) form a pool; a greedy search takes from it the layer with the largest gain over those
    before (equation 22), as long as there is a gain; and of its steps the one with the largest gain for each layer decides what is patched.
    Of equals, the lowest layer and the smallest set. Each set is scored once.

    Args:
        score: Without noise: of many candidates the best looks better than it is, so measure the choice again on other prompts.
        layers: Those that may be patched.
        pool: How many layers enter the greedy search.
        most: The largest number of patched layers.
    """
    score = functools.cache(score)
    nothing = score(frozenset())
    sensitivity = {layer: score(frozenset({layer})) - nothing for layer in layers}
    candidates = sorted(sorted(layers, key=lambda layer: (-sensitivity[layer], layer))[:pool])
    chosen: frozenset[int] = frozenset()
    steps: list[Step] = []
    while candidates and len(steps) < most:
        best = max(candidates, key=lambda layer: score(chosen | {layer}))  # The first of equals.
        gain = score(chosen | {best}) - score(chosen)
        if gain <= 0:
            break
        chosen |= {best}
        candidates.remove(best)
        steps.append(Step(best, gain, score(chosen) - nothing))
    efficiencies = tuple(step.total / count for count, step in enumerate(steps, start=1))
    patched = efficiencies.index(max(efficiencies)) + 1 if steps else 0
    return Route(tuple(sorted(step.layer for step in steps[:patched])), sensitivity, tuple(steps), efficiencies)
