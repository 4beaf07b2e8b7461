"""What becomes of the speed table's rows: a file for each device, one for the command line tool, and the tables of a document."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shared.results import Results, Row, environment, rows_where, write_csv

from hf_kvcaches.cli.bench import SPEED_COLUMNS

ROW = list(SPEED_COLUMNS)
KEY = ROW[: ROW.index("prefill_s")]  # what a row is found by
FULL = "DynamicCache"
BENCHMARKS, PACKAGED = Path("docs", "benchmarks"), Path("hf_kvcaches", "cli", "speed.csv")
MARKERS = "<!-- speed table: begin -->", "<!-- speed table: end -->"


def write_reports(results: Results, device: torch.device, size: Any, root: Path) -> None:
    """Renew all files with the rows of a device; rows of the committed file that were not measured anew stay.

    Args:
        size: Of the model, with `labels()`.
        root: Of the checkout.
    """
    where = {name: environment(device)[name] for name in ("hardware", "device", "threads")}
    measured = [{**where, **row} for row in rows_where(results.rows, **size.labels())]
    path = root / BENCHMARKS / f"speed-{device.type}.csv"
    rows = merged(read(path), [as_text(row) for row in [*full_rows(measured), *measured]])
    write_csv(path, rows, columns=ROW)
    together = [row for file in sorted(path.parent.glob("speed-*.csv")) for row in read(file)]
    write_csv(root / PACKAGED, together, columns=ROW)
    document = path.with_name("speed.md")
    if document.exists():
        begin, end = MARKERS
        text = document.read_text(encoding="utf-8")
        tables = f"{begin}\n{tables_of(together)}\n{end}"
        document.write_text(re.sub(f"{begin}.*{end}", lambda _: tables, text, flags=re.S), encoding="utf-8")
    print(tables_of(rows))


def full_rows(rows: Sequence[Row]) -> list[Row]:
    """DynamicCache's row of each cell: the medians of what it took beside the others."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["dtype"], row["batch"], row["context"]), []).append(row)
    found = []
    for sides in cells.values():
        row = sides[0]
        median = lambda name, sides=sides: round(statistics.median(side[name] for side in sides), 4)  # noqa: E731
        itemsize = getattr(torch, row["dtype"]).itemsize
        nbytes = 2 * row["layers"] * row["kv_heads"] * row["head_dim"] * row["batch"] * row["context"] * itemsize
        times = {"prefill_s": median("base_prefill_s"), "decode_ms": median("base_decode_ms"), "prefill_ratio": 1.0, "decode_ratio": 1.0}
        found.append({**row, "cache": FULL, "setting": "", **times, "mib": round(nbytes / 2**20, 1)})
    return found


def as_text(row: Row) -> dict[str, str]:
    """The columns of the table as a file has them."""
    return {name: str(row.get(name, "")) for name in ROW}


def read(path: Path) -> list[dict[str, str]]:
    """A table's rows; none where the file is not there yet."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def merged(old: Sequence[dict[str, str]], new: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """All rows, the new ones in place of old ones of the same key, ordered by cell with DynamicCache first."""
    rows = {tuple(row[name] for name in KEY): row for row in [*old, *new]}

    def order(row: dict[str, str]) -> tuple[Any, ...]:
        batch, context = int(row["batch"]), int(row["context"])
        return row["hardware"], row["dtype"] != "float32", batch * context, batch, row["cache"] != FULL

    return sorted(rows.values(), key=order)


def tables_of(rows: Sequence[dict[str, str]]) -> str:
    """A Markdown table for each processor and precision."""
    groups = dict.fromkeys((row["hardware"], row["device"], row["threads"], row["dtype"]) for row in rows)
    parts = []
    for hardware, device, threads, dtype in groups:
        group = rows_where(rows, hardware=hardware, device=device, threads=threads, dtype=dtype)
        cells = list(dict.fromkeys((row["batch"], row["context"]) for row in group))
        sides = list(dict.fromkeys((row["cache"], row["setting"]) for row in group))
        lines = [["cache", *(f"{batch} x {int(context):,}" for batch, context in cells)], ["---"] * (len(cells) + 1)]
        for cache, setting in sides:
            found = {(row["batch"], row["context"]): row for row in rows_where(group, cache=cache, setting=setting)}
            lines.append([f"`{cache}({setting})`" if setting else f"`{cache}`", *(cell_text(found.get(cell)) for cell in cells)])
        where = f"{threads} thread{'' if threads == '1' else 's'} of {hardware}" if device == "cpu" else hardware
        parts.append(f"### {dtype}, {where}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def cell_text(row: dict[str, str] | None) -> str:
    if row is None:
        return "-"
    memory = f"{float(row['mib']):,.0f} MiB"
    if row["cache"] == FULL:
        return f"{float(row['prefill_s']):.2f} s, {float(row['decode_ms']):.0f} ms, {memory}"
    return f"{float(row['prefill_ratio']):.2f}x, {float(row['decode_ratio']):.2f}x, {memory}"
