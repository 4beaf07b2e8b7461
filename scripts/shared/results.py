"""Results of scripts: rows in files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_kvcaches.cli.tables import Row, show, write_csv
from hf_kvcaches.errors import ConfigError

MACHINE = ("hardware", "device", "threads")


def read_csv(path: Path) -> list[Row]:
    """The rows of a file, numbers as numbers; a row lacks what is empty."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _number(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def tabulated(rows: Iterable[Row], names: str) -> str:
    """A table of some columns, which are named with spaces between them."""
    as_text = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)  # noqa: E731
    filled = [{name: as_text(value) for name, value in row.items() if value is not None} for row in rows]
    return show(filled, {name: f"{{{name}}}" for name in names.split()})


def rows_where(rows: Iterable[Row], **values: Any) -> list[Row]:
    """The rows with these values in these columns; an empty value matches a row that lacks the column."""
    return [row for row in rows if all(row.get(name, "") == value for name, value in values.items())]


class Results:
    """The rows of a benchmark's file, or of none. Rows of other machines stay, those of the same point of this machine are replaced.

    `fixed` are the columns that all rows of a run share; of these `hardware`, `device` and `threads` are the machine.
    """

    def __init__(self, path: Path | None, columns: Sequence[str], fixed: Mapping[str, Any]) -> None:
        self.path, self.fixed, self.columns = path, dict(fixed), list(columns)
        self.rows: list[Row] = []
        if path is not None and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                if next(csv.reader(file), None) != self.columns:
                    raise ConfigError.of("--csv", "a file that this script wrote", str(path), "Name another file, or delete it.")
            self.rows = read_csv(path)

    def has(self, **point: Any) -> bool:
        """Whether this machine measured a point, with the same versions of everything."""
        return bool(rows_where(self.rows, **self.fixed, **point))

    def add(self, rows: Iterable[Row], **point: Any) -> list[Row]:
        """Keep the rows of a point, in the file too: what is measured survives an interrupt."""
        machine = {name: self.fixed[name] for name in MACHINE}
        old = rows_where(self.rows, **machine, **point)
        added = [{**self.fixed, **point, **row} for row in rows]
        self.rows = [*(row for row in self.rows if row not in old), *added]
        if self.path is not None:
            write_csv(self.path, self.rows, columns=self.columns)
        return added


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
