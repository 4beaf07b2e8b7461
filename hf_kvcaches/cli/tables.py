"""Rows of results: as an aligned table, as JSON, and in a CSV file; the computer that they were measured on."""

from __future__ import annotations

import argparse
import csv
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_kvcaches.version import __version__

Row = dict[str, Any]


def environment(device: torch.device) -> dict[str, str | int]:
    """What a measurement depends on beside its settings."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    processors = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processors += [platform.processor() or platform.machine()]
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else processors[0],
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
    padded: list[list[str]] = []
    for column in zip(header, *lines, strict=True):
        if not lines or any(column[1:]):
            width = max(map(len, column))
            cells = (column[0], "-" * width, *column[1:])
            padded.append([cell.rjust(width) if padded else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def show(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """A table of rows, with a format string for each heading, as in `{"ms": "{time_ms:.3f}"}`; what a row lacks is left empty."""

    def cell(template: str, row: Row) -> str:
        try:
            return template.format(**row)
        except (KeyError, ValueError):
            return ""

    return table(list(columns), [[cell(template, row) for template in columns.values()] for row in rows])


def emit(
    args: argparse.Namespace, document: Mapping[str, Any], text: str, rows: Sequence[Row] = (), fixed: Mapping[str, Any] | None = None
) -> None:
    """Print what a command found, with `--json` its document, and write rows to `--csv`, behind `fixed` columns, the same in all."""
    if args.json:  # JSON has no NaN and no infinity: they become null
        finite = json.loads(json.dumps(document), parse_constant=lambda _: None)
        text = json.dumps(finite, indent=2, ensure_ascii=False)
    print(text)
    if rows and args.csv:
        write_csv(args.csv, rows, fixed)


def write_csv(path: Path, rows: Sequence[Row], fixed: Mapping[str, Any] | None = None, columns: Iterable[str] | None = None) -> None:
    """Write a file, and its folder: first the `fixed` columns, which are the same in all rows, then `columns`, or those of the rows."""
    names = dict.fromkeys([*(fixed or {}), *(columns or (name for row in rows for name in row))])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(names), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**(fixed or {}), **row} for row in rows)
