"""Pictures of rows: panels beside each other, each with a line for every side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_kvcaches.errors import require
from shared.results import Row, environment, filled


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    rows: Iterable[Row]
    line: str  # a format string that names the line of a row
    x: str  # a column of numbers, or a format string for places beside each other
    y: str  # a column; quartiles beside it are drawn
    log: str = ""  # axes with a logarithmic scale: `x`, `y` or `xy`
    stacked: bool = False  # bars on top of each other instead of lines
    levels: tuple[float, ...] = ()  # horizontal lines, such as a bar


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write a picture; panels without rows are left out."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    full = [(panel, [row for row in panel.rows if row.get(panel.y) not in (None, "")]) for panel in panels]
    full = [(panel, rows) for panel, rows in full if rows]
    wide, tall = min(3, max(1, len(full))), max(1, -(-len(full) // 3))
    figure, axes = plots.subplots(tall, wide, figsize=(6 * wide, 4.5 * tall), squeeze=False, layout="constrained")
    for axis, (panel, rows) in zip(axes.flat, full, strict=False):
        _panel(axis, panel, rows)
    for axis in list(axes.flat)[len(full) :]:
        axis.axis("off")
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plots.close(figure)


def title_of(device: torch.device, text: str) -> str:
    """The title of a benchmark's picture: where it was measured, and what."""
    where = environment(device)
    return f"{where['hardware']}, {where['threads']} threads, torch {where['torch']}, transformers {where['transformers']}: {text}"


def _panel(axis: Any, panel: Panel, rows: Sequence[Row]) -> None:
    places = list(dict.fromkeys(filled(panel.x, row) for row in rows)) if "{" in panel.x else None
    bottoms = dict.fromkeys(places or (), 0.0)
    names = list(dict.fromkeys(filled(panel.line, row) for row in rows))
    for number, name in enumerate(names):
        points = [row for row in rows if filled(panel.line, row) == name]
        values = [float(row[panel.y]) for row in points]
        style = {"color": f"C{number % 10}", "label": name}
        if panel.stacked:
            keys = [filled(panel.x, row) for row in points]
            axis.bar(keys, values, bottom=[bottoms[key] for key in keys], hatch="//" * (number // 10), **style)
            for key, value in zip(keys, values, strict=True):
                bottoms[key] += value
            continue
        offset = 0.5 * (number - (len(names) - 1) / 2) / len(names)
        across = [float(row[panel.x]) if places is None else places.index(filled(panel.x, row)) + offset for row in points]
        stem, unit = (panel.y[:-3], "_ms") if panel.y.endswith("_ms") else (panel.y, "")
        low, high = f"{stem}_q1{unit}", f"{stem}_q3{unit}"
        ends = [[value - row.get(low, value), row.get(high, value) - value] for value, row in zip(values, points, strict=True)]
        line = "-" if places is None else ""
        axis.errorbar(across, values, list(zip(*ends, strict=True)), marker="o", markersize=4, linestyle=line, capsize=2, **style)
    for level in panel.levels:
        axis.axhline(level, color="black", linewidth=1, linestyle=":")
    if places is not None and not panel.stacked:
        axis.set_xticks(range(len(places)), places, rotation=30, fontsize=7, ha="right")
        axis.set_xlim(-0.6, len(places) - 0.4)
    axis.tick_params(axis="x", labelsize=7)
    axis.set(title=panel.title, xlabel="" if places else panel.x, ylabel=panel.y)
    for side in panel.log:
        getattr(axis, f"set_{side}scale")("symlog" if side == "y" and min(float(row[panel.y]) for row in rows) <= 0 else "log")
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "ncols": 1 + len(names) // 25} if len(names) > 12 else {}
    axis.legend(fontsize=5 if beside else 6, **beside)
