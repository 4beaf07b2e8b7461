"""Rows of results: as an aligned table, as JSON, and in a CSV file with the computer that they were measured on."""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_kvcaches.version import __version__

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


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document; numbers that are not finite, which JSON lacks, are null."""
    print(json.dumps(_plain(document), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_csv(path: Path, rows: Sequence[Row], fixed: Mapping[str, Any] | None = None, columns: Iterable[str] | None = None) -> None:
    """Write a file, and its folder: first the `fixed` columns, which are the same in all rows, then `columns`, or those of the rows."""
    names = dict.fromkeys([*(fixed or {}), *(columns or (name for row in rows for name in row))])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(names), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**(fixed or {}), **row} for row in rows)
