"""What a benchmark or an evaluation promises, printed with its numbers as met or missed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.results import Row, rows_where


def bar(claim: str, is_met: bool, numbers: str) -> str:
    """One line."""
    return f"  {claim}: {'met' if is_met else 'NOT met'} ({numbers})"


def not_measured(claim: str) -> str:
    return f"  {claim}: not measured"


@dataclass(frozen=True)
class Bar:
    """A bar on rows of results."""

    claim: str
    where: Mapping[str, Any]  # values that the rows have in some columns
    value: str | Callable[[Row], float] = "ratio"  # the compared number of a row, or the name of its column
    least: float | None = None
    most: float | None = None
    unit: str = "x"
    mean: bool = False  # judge the geometric mean of the rows instead of each of them
    name: str = "side"  # the column that tells several rows apart
    also: Callable[[Row], bool] = field(default=lambda row: True)  # which of these rows count

    def verdict(self, rows: Sequence[Row]) -> str:
        has = lambda row: not isinstance(self.value, str) or row.get(self.value, "") != ""  # noqa: E731
        chosen = [row for row in rows_where(rows, **self.where) if has(row) and self.also(row)]
        if not chosen:
            return not_measured(self.claim)
        values = [float(row[self.value]) if isinstance(self.value, str) else float(self.value(row)) for row in chosen]
        judged = [statistics.geometric_mean(values)] if self.mean else values
        missed = sum(not self._holds(value) for value in judged)
        if len(values) > 4 or self.mean:
            numbers = f"{statistics.geometric_mean(values):.2f}{self.unit} in geometric mean, {min(values):.2f} to {max(values):.2f}"
            numbers += f" in {len(values)} cells" if self.mean else f", {missed} of {len(values)} cells miss it"
        else:
            names = [f"{row.get(self.name, '')} " if len(values) > 1 else "" for row in chosen]
            numbers = ", ".join(f"{name}{value:.4g}{self.unit}" for name, value in zip(names, values, strict=True))
        return bar(self.claim, not missed, numbers)

    def _holds(self, value: float) -> bool:
        # Written so that what is not a number is missed.
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def verdicts(bars: Sequence[Bar], rows: Sequence[Row]) -> str:
    return "\n".join(["Bars", *(promise.verdict(rows) for promise in bars)])
