"""Numbers of the CSV files in docs/benchmarks, as the documents show them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
Row = dict[str, str]


@cache
def rows(name: str) -> list[Row]:
    with (BENCHMARKS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def where(name: str, **values: str) -> list[Row]:
    """The rows of a file with these values in these columns; at least one."""
    found = [row for row in rows(name) if all(row[column] == value for column, value in values.items())]
    if not found:
        raise LookupError(
            f"{name}.csv has no row with {values}. A renewed measurement may name it otherwise: change the scripts _docs_*.py."
        )
    return found


def one(name: str, **values: str) -> Row:
    """The first of these rows."""
    return where(name, **values)[0]


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [f"| {' | '.join(line)} |" for line in (header, *lines)]
    return "\n".join([cells[0], f"|{'---|' * len(header)}", *cells[1:]])


def times(number: str | float, digits: int = 1) -> str:
    return f"{float(number):.{digits}f}x"


def percent(share: str | float, digits: int = 0) -> str:
    return f"{100 * float(share):.{digits}f}%"


def nats(divergence: str | float) -> str:
    return f"{float(divergence):.2g}"


def first_token(section: str, side: str, stored: str = "bit-equal") -> str:
    return times(one("reuse-speed-cpu", section=section, side=side, stored=stored)["ratio"])


def translated_recall(pair: str, side: str = "joint 0.025 (default)") -> Row:
    return one("translation-quality", pair=pair, side=side, workload="documents")
