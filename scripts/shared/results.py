"""Rows of results: as an aligned table, and in a CSV file with the computer that they were measured on."""

from __future__ import annotations

import csv
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_kvcaches import __version__
from hf_kvcaches.errors import ConfigError

Row = dict[str, Any]


def hardware(device: torch.device) -> str:
    """The name of the processor that does the work."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, str | int]:
    """What a measurement depends on beside its settings."""
    return {
        "hardware": hardware(device),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_kvcaches": __version__,
    }


def print_environment(device: torch.device) -> None:
    print(", ".join(f"{name} {value}" for name, value in environment(device).items()))


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right; columns without a single entry are left out."""
    kept = [column for column in range(len(header)) if column == 0 or not lines or any(line[column] for line in lines)]
    cells = [[line[column] for column in kept] for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    aligned = ([cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
    return "\n".join("  ".join([line[0].ljust(widths[0]), *rest]).rstrip() for line, (_, *rest) in zip(cells, aligned, strict=True))


def filled(template: str, row: Row) -> str:
    """A format string with the row's columns; empty where the row lacks one."""
    try:
        return template.format(**row)
    except (KeyError, ValueError):
        return ""


def show(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """A table of rows, with a format string for each heading, as in `{"ms": "{time_ms:.3f}"}`."""
    return table(list(columns), [[filled(template, row) for template in columns.values()] for row in rows])


def show_measured(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of the settings that a calibration measured, the chosen ones marked."""
    as_text = lambda value: "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)  # noqa: E731
    texts = [{name: as_text(value) for name, value in row.items()} | {"chosen": "*" if row["chosen"] else ""} for row in rows]
    names = [name for row in texts[:1] for name in row if name != "chosen"]
    return show(texts, {"": "{chosen}", **{name: f"{{{name}}}" for name in names}})


def show_sections(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A table for each section, which is the heading of the first column."""
    parts = []
    (_, first), *rest = columns.items()
    for section in dict.fromkeys(row["section"] for row in rows):
        parts.append(show((row for row in rows if row["section"] == section), {section: first, **dict(rest)}))
    return "\n\n".join(parts)


def write_csv(path: Path, rows: Sequence[Row], fixed: Mapping[str, Any] | None = None, columns: Iterable[str] | None = None) -> None:
    """Write a file, and its folder: first the `fixed` columns, which are the same in all rows, then `columns`, or those of the rows."""
    names = dict.fromkeys([*(fixed or {}), *(columns or (name for row in rows for name in row))])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(names), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**(fixed or {}), **row} for row in rows)


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
