"""Pictures of rows: panels beside each other, each with a line for every side.

Rules of all pictures: at most eight series in a panel, each with a colour and a marker of its own; legends off the data; panels without
rows are left out; nothing is clipped.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hf_kvcaches.errors import ConfigError, require
from shared.results import Row, environment, filled

# Told apart with colour-blindness, too, and in grey by their markers.
STYLES = tuple(zip("#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #8C6D31".split(), "os^DvPX*", strict=True))
TITLE_WIDTH, PANEL_TITLE_WIDTH = 75, 48  # characters, by panel
FEW_TICKS = 8


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
    unit: str = ""  # label of the y axis; default: the column
    along: str = ""  # label of the x axis; default: the column

    def with_values(self) -> list[Row]:
        """The rows that have something to draw, from left to right where x is a number."""
        rows = [row for row in self.rows if row.get(self.y) not in (None, "")]
        return rows if "{" in self.x else sorted(rows, key=lambda row: float(row[self.x]))


def series_of(panel: Panel, rows: Sequence[Row]) -> list[str]:
    """The names of a panel's lines, of which there may be eight."""
    names = list(dict.fromkeys(filled(panel.line, row) for row in panel.rows if row in rows))
    if len(names) > len(STYLES):
        hint = "Draw fewer rows, or split them between panels."
        raise ConfigError.of(f"panel {panel.title!r}", f"at most {len(STYLES)} series", f"{len(names)}: {', '.join(names)}", hint)
    return names


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write a picture; panels without rows are left out."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    full = [(panel, rows) for panel in panels if (rows := panel.with_values())]
    if not full:
        raise ConfigError.of("rows", "rows with values for some panel", "none", "Measure first.")
    series = [series_of(panel, rows) for panel, rows in full]
    names = list(dict.fromkeys(name for group in series for name in group))
    wide = 2 if len(full) == 4 else min(3, len(full))
    tall = -(-len(full) // wide)
    together = len(names) <= len(STYLES)  # a name has one style in the whole picture, and one legend explains it
    size = ((6 if together else 8) * wide, 4.5 * tall)
    figure, axes = plots.subplots(tall, wide, figsize=size, squeeze=False, layout="constrained")
    for axis, (panel, rows), group in zip(axes.flat, full, series, strict=False):
        styles = dict(zip(names if together else group, STYLES, strict=False))
        _panel(axis, panel, rows, styles)
        if not together:
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    for axis in list(axes.flat)[len(full) :]:
        axis.remove()
    if together:
        by_name = {name: handle for axis in figure.axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend([by_name[name] for name in names], names, loc="outside lower center", ncols=min(2 * wide, 4, len(names)), fontsize=8)
    figure.suptitle(textwrap.fill(title, TITLE_WIDTH * wide), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plots.close(figure)


def title_of(device: torch.device, text: str) -> str:
    """The title of a benchmark's picture: where it was measured, and what."""
    return title_from(environment(device), text)


def title_from(where: Mapping[str, Any], text: str) -> str:
    """A title with the environment that a row of a file has."""
    threads = f"{where['threads']} thread{'' if where['threads'] == 1 else 's'}"
    return f"{where['hardware']}, {threads}, torch {where['torch']}, transformers {where['transformers']}: {text}"


def _panel(axis: Any, panel: Panel, rows: Sequence[Row], styles: Mapping[str, tuple[str, str]]) -> None:
    places = list(dict.fromkeys(filled(panel.x, row) for row in rows)) if "{" in panel.x else None
    names = [name for name in styles if any(filled(panel.line, row) == name for row in rows)]
    bottoms = dict.fromkeys(places or (), 0.0)
    for number, name in enumerate(names):
        points = [row for row in rows if filled(panel.line, row) == name]
        if panel.stacked:
            _bars(axis, panel, points, bottoms, color=styles[name][0], label=name)
            continue
        offset = 0.7 * (number - (len(names) - 1) / 2) / len(names)
        across = [float(row[panel.x]) if places is None else places.index(filled(panel.x, row)) + offset for row in points]
        _line(axis, panel, points, across, styles[name], name)
    axis.set_title(textwrap.fill(panel.title, PANEL_TITLE_WIDTH), fontsize=10)
    axis.set(xlabel="" if places else panel.along or panel.x, ylabel=panel.unit or panel.y)
    for side in panel.log:
        getattr(axis, f"set_{side}scale")("symlog" if side == "y" and min(float(row[panel.y]) for row in rows) <= 0 else "log")
    _ticks(axis, panel, rows, places)


def _bars(axis: Any, panel: Panel, points: Sequence[Row], bottoms: dict[str, float], **style: Any) -> None:
    """Bars on top of those that are there, up to `bottoms`."""
    keys, values = [filled(panel.x, row) for row in points], [float(row[panel.y]) for row in points]
    axis.bar(keys, values, bottom=[bottoms[key] for key in keys], **style)
    for key, value in zip(keys, values, strict=True):
        bottoms[key] += value


def _line(axis: Any, panel: Panel, points: Sequence[Row], across: Sequence[float], style: tuple[str, str], name: str) -> None:
    """A line with quartiles, or points where x are places."""
    values = [float(row[panel.y]) for row in points]
    stem, unit = (panel.y[:-3], "_ms") if panel.y.endswith("_ms") else (panel.y, "")
    ends = []
    for row, value in zip(points, values, strict=True):
        low, high = (float(row.get(f"{stem}_{quartile}{unit}") or value) for quartile in ("q1", "q3"))
        ends.append([max(0.0, value - low), max(0.0, high - value)])
    line = "" if "{" in panel.x else "-"
    look = {"color": style[0], "marker": style[1], "markersize": 4, "linewidth": 1.2, "capsize": 2, "label": name}
    axis.errorbar(across, values, list(zip(*ends, strict=True)), linestyle=line, **look)


def _ticks(axis: Any, panel: Panel, rows: Sequence[Row], places: Sequence[str] | None) -> None:
    """Names of places, or the numbers themselves where they are few."""
    axis.tick_params(labelsize=7, which="both")
    if places is not None:
        axis.set_xticks(range(len(places)), places, rotation=30, fontsize=7, ha="right")
        axis.set_xlim(-0.6, len(places) - 0.4)
        return
    numbers = sorted({float(row[panel.x]) for row in rows})
    scaled = [math.log(number) for number in numbers] if "x" in panel.log else numbers
    apart = all((right - left) * 2 * FEW_TICKS > scaled[-1] - scaled[0] for left, right in pairwise(scaled))
    if 1 < len(numbers) <= FEW_TICKS and apart:
        axis.set_xticks(numbers, [f"{number:,.4g}" for number in numbers])
        axis.set_xticks([], minor=True)
