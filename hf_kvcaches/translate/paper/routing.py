"""The choice of the layers to patch (appendix A)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# The score with exactly these layers patched and all others reused; greater is better.
Score = Callable[[frozenset[int]], float]


class Route(NamedTuple):
    """The patched layers, and the scores that they were chosen by."""

    patched: tuple[int, ...]
    sensitivity: Mapping[int, float] = {}  # the gain of patching each layer alone (equation 21)
    order: tuple[int, ...] = ()  # of the greedy search
    efficiencies: tuple[float, ...] = ()  # the gain of the first 1, 2, ... of these together, divided by their number


def select(score: Score, layers: Sequence[int], *, pool: int, most: int) -> Route:
    """Choose the layers to patch.

    A greedy search among the `pool` layers that gain most alone takes the one with the largest gain over those before (equation 22), up to
    `most`. As many of them are patched as give the largest gain for each layer. Of equals, the lowest layer.
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
