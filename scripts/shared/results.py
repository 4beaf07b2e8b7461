"""Rows of results: as an aligned table, and in a CSV file with the computer that they were measured on."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_kvcaches.cli.tables import Row, environment, filled, print_environment, show, table, write_csv
from hf_kvcaches.errors import ConfigError

__all__ = [
    "Results",
    "Row",
    "environment",
    "filled",
    "print_environment",
    "read_csv",
    "rows_where",
    "show",
    "table",
    "write_csv",
]


def read_csv(path: Path) -> list[Row]:
    """The rows of a file, numbers as numbers; a row lacks what is empty."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _number(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def rows_where(rows: Iterable[Row], **values: Any) -> list[Row]:
    """The rows with these values in these columns."""
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


class Results:
    """The rows of a benchmark, beside those of earlier runs in its file that have the same `fixed` columns."""

    def __init__(self, path: Path | None, columns: Sequence[str], device: torch.device, **fixed: Any) -> None:
        self.path, self.fixed = path, {**environment(device), **fixed}
        self.names = list(dict.fromkeys([*environment(device), *columns]))
        self.rows: list[Row] = []
        self.others: list[Row] = []  # of other computers, versions or settings
        if path is None or not path.exists():
            return
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != self.names:
                raise ConfigError.of("--csv", "a file that this script wrote", str(path), "Name another file, or delete it.")
            for row in reader:
                same = all(row[name] == str(value) for name, value in self.fixed.items())
                kept = {name: _number(text) for name, text in row.items() if text and name not in self.fixed}
                (self.rows if same else self.others).append(kept if same else row)

    def has(self, **point: Any) -> bool:
        """Whether a row with these values is there."""
        return bool(rows_where(self.rows, **point))

    def drop(self, sections: Sequence[str]) -> None:
        """Forget the rows of sections that are measured anew."""
        self.rows = [row for row in self.rows if row["section"] not in sections]

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows, in the file too: what is measured survives an interrupt."""
        self.rows += rows
        if self.path is not None:
            write_csv(self.path, [*self.others, *({**self.fixed, **row} for row in self.rows)], columns=self.names)


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
