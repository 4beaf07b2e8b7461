"""Timing: sides in turns, medians with quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(works: Mapping[str, Callable[[int], T]], rounds: int, warm_up: int = 0) -> dict[str, list[T]]:
    """Call every work with the number of the round, round by round, each time another one first: what slows the computer for a while
    slows all. Results of the warm-up rounds are dropped."""
    names = list(works)
    results: dict[str, list[T]] = {name: [] for name in names}
    for index in range(-warm_up, rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            result = works[name](max(index, 0))
            if index >= 0:
                results[name].append(result)
    return results


def spread(name: str, values: Sequence[float], factor: float = 1.0) -> dict[str, float]:
    """Median and quartiles as columns; in milliseconds with a factor of 1,000."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    unit = "" if factor == 1 else "_ms"
    numbers = {"": statistics.median(values), "_q1": low, "_q3": high}
    return {f"{name}{quartile}{unit}": round(value * factor, 4) for quartile, value in numbers.items()}


def ratios(base: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """Columns of how many times as fast a side is, taken round by round."""
    return spread("ratio", [before / after for before, after in zip(base, seconds, strict=True)])
