"""The choice of the layers to patch (appendix A)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# The score with exactly these layers patched and all others reused; greater is better.
Score = Callable[[frozenset[int]], float]


class Route(NamedTuple):
    """The patched layers, and the scores that they were chosen by.

    Args:
        patched: In ascending order.
        sensitivity: The gain in score of patching each layer alone (equation 21).
        order: The layers of the greedy search.
        efficiencies: The gain of the first 1, 2, ... of them together, divided by their number.
    """

    patched: tuple[int, ...]
    sensitivity: Mapping[int, float] = {}
    order: tuple[int, ...] = ()
    efficiencies: tuple[float, ...] = ()


def select(score: Score, layers: Sequence[int], *, pool: int, most: int) -> Route:
    """Choose the layers to patch.

    The layers that gain most alone form a pool; a greedy search takes from it the layer with the largest gain over those before (equation
    22), as long as there is a gain; the number of its steps with the largest gain for each layer is patched. Of equals, the lowest layer.

    Args:
        pool: How many layers enter the search.
        most: The largest number of patched layers.
    """
    score = functools.cache(score)
    nothing = score(frozenset())
    sensitivity = {layer: score(frozenset({layer})) - nothing for layer in layers}
    candidates = sorted(sorted(layers, key=lambda layer: (-sensitivity[layer], layer))[:pool])
    chosen, order, efficiencies = frozenset[int](), list[int](), list[float]()
    while candidates and len(order) < most:
        best = max(candidates, key=lambda layer: score(chosen | {layer}))
        if score(chosen | {best}) <= score(chosen):
            break
        chosen |= {best}
        candidates.remove(best)
        order.append(best)
        efficiencies.append((score(chosen) - nothing) / len(order))
    patched = order[: efficiencies.index(max(efficiencies)) + 1] if order else []
    return Route(tuple(sorted(patched)), sensitivity, tuple(order), tuple(efficiencies))
