"""How the numbers of `bench_segments.py` are shown: tables, what was promised, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import environment, table
from _segments_sides import APPROXIMATE, AUTO, NONE, PREFIX, Row

from hf_kvcaches.errors import require

COLORS = {NONE: "tab:gray", PREFIX: "tab:orange", AUTO: "tab:blue", APPROXIMATE: "tab:green"}
# By how much hit rates may differ: which of two segments that are equally like a third is found first is left to chance.
HIT_RATE = 0.005


def show(rows: Sequence[Row]) -> str:
    """A table for each section."""
    tables = []
    for section in dict.fromkeys(row["section"] for row in rows):
        lines = []
        for row in (row for row in rows if row["section"] == section):
            name = row["side"] if row["measure"] in row["side"] else f"{row['measure']}, {row['side']}"
            line = [f"{row.get('workload', '')} {row['tokens']}: {name}".strip(), str(row["count"]), f"{row['time_ms']:.3f}"]
            line.append(f"{row['time_q1_ms']:.3f}-{row['time_q3_ms']:.3f}")
            line += [f"{row['ratio']:.3f}x", f"{row['ratio_q1']:.2f}-{row['ratio_q3']:.2f}"] if "ratio" in row else ["", ""]
            line.append(f"{row['reused']:.1%}" if "reused" in row else "")
            line.append(f"{row['value']:g} {row['unit']}" if "value" in row else "")
            line.append(f"{row['floor_share']:.0%}" if "floor_share" in row else "")
            lines.append(line)
        header = [section, "n", "ms", "quartiles", "ratio", "quartiles", "reused", "", "of the bandwidth"]
        kept = [column for column in range(len(header)) if any(line[column] for line in lines)]
        tables.append(table([header[column] for column in kept], [[line[column] for column in kept] for line in lines]))
    return "\n\n".join(tables)


@dataclass(frozen=True)
class Bar:
    """What is promised."""

    text: str  # in words
    chosen: dict[str, Any]  # columns of the rows that it is about
    value: Callable[[Row], float]  # what is compared, of one row
    least: float | None = None  # at least this, or None
    most: float | None = None  # at most this, or None
    unit: str = "x"  # of the value

    def verdict(self, rows: Sequence[Row]) -> str:
        own = [row for row in rows if all(row.get(name) == value for name, value in self.chosen.items())]
        if not own:
            return f"{self.text}: not measured"
        missed = [row for row in own if not self._met(self.value(row))]
        names = [row["side"] for row in own] if len(own) > 1 else [""]
        found = ", ".join(f"{name} {self.value(row):.3f}{self.unit}".strip() for name, row in zip(names, own, strict=True))
        return f"{self.text}: {'NOT met' if missed else 'met'} ({found})"

    def _met(self, value: float) -> bool:
        # Written so that what is not a number is missed.
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


class Equal(Bar):
    """That the rows of one workload have the same value, within `most`."""

    def verdict(self, rows: Sequence[Row]) -> str:
        own = [row for row in rows if all(row.get(name) == value for name, value in self.chosen.items())]
        if len(own) < 2:
            return f"{self.text}: not measured"
        values = [self.value(row) for row in own]
        found = ", ".join(f"{row['side']} {value:.2%}" for row, value in zip(own, values, strict=True))
        return f"{self.text}: {'met' if self._met(max(values) - min(values)) else 'NOT met'} ({found})"


def bars() -> list[Bar]:
    ratio = lambda row: float(row["ratio"])  # noqa: E731
    overhead = lambda row: 1 / float(row["ratio"])  # noqa: E731
    first = {"section": "requests", "measure": "first token", "side": AUTO}
    promised = [Bar("auto at least 2.5x as fast as no reuse to the first token, median", first, ratio, least=2.5)]
    for measure in ("first token", "whole request"):
        chosen = {"section": "no repeats", "measure": measure, "side": AUTO}
        promised.append(Bar(f"auto takes at most 1.03x the time of no reuse where nothing repeats, {measure}", chosen, overhead, most=1.03))
    for measure in ("prefix", "runs", "near"):
        chosen = {"section": "look-up", "measure": measure}
        # A thousandth of a second and more is not below it.
        promised.append(Bar(f"look-up below 1 ms, {measure}", chosen, lambda row: float(row["time_ms"]), most=0.9999, unit=" ms"))
    for backend in ("disk", "Redis"):
        chosen = {"section": "sharing", "workload": backend}
        text = f"a second process reuses as much as one alone, {backend}"
        promised.append(Equal(text, chosen, lambda row: float(row["reused"]), most=HIT_RATE))
    return promised


def write_plot(path: Path, rows: Sequence[Row], device: torch.device) -> None:
    """How many times as fast each side is, what the time goes to, and the parts."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    figure, axes = plots.subplots(2, 3, figsize=(17, 9), layout="constrained")
    of = lambda *sections: [row for row in rows if row["section"] in sections]  # noqa: E731
    asked = [row for row in of("requests", "no repeats") if "ratio" in row and row["side"] != NONE]
    _ratios(axes[0, 0], asked, [f"{row['workload']}\n{row['measure']}" for row in asked])
    larger = [row for row in of("larger") if "ratio" in row and row["side"] != NONE]
    _ratios(axes[0, 1], larger, [f"{row['workload'].replace(', ', chr(10))}\n{row['tokens']}" for row in larger])
    _stacked(axes[0, 2], of("phases"))
    for axis, section, column, label in (
        (axes[1, 0], "look-up", "time_ms", "ms"),
        (axes[1, 1], "splice", "value", "GB/s"),
        (axes[1, 2], "sharing", "reused", "share of tokens reused"),
    ):
        own = of(section)
        axis.barh(
            [f"{row.get('workload', '')} {row['side']}".strip() for row in own], [float(row[column]) for row in own], color="tab:blue"
        )
        axis.invert_yaxis()
        axis.set(title=section, xlabel=label)
    where = environment(device)
    figure.suptitle(f"{where['hardware']}, {where['threads']} threads, torch {where['torch']}: SegmentReuseCache", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plots.close(figure)


def _ratios(axis: Any, rows: Sequence[Row], groups: Sequence[str]) -> None:
    """Medians with quartiles, groups beside each other."""
    places = list(dict.fromkeys(groups))
    sides = [side for side in COLORS if any(row["side"] == side for row in rows)]
    for number, side in enumerate(sides):
        own = [(place, row) for place, row in zip(groups, rows, strict=True) if row["side"] == side]
        across = [places.index(place) + (number - (len(sides) - 1) / 2) * 0.15 for place, _ in own]
        ratios = [row["ratio"] for _, row in own]
        away = [[row["ratio"] - row["ratio_q1"] for _, row in own], [row["ratio_q3"] - row["ratio"] for _, row in own]]
        axis.errorbar(across, ratios, away, fmt="o", capsize=3, color=COLORS[side], label=side)
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_xticks(range(len(places)), places, fontsize=7)
    axis.set(title="times as fast as no reuse", ylabel="ratio, median and quartiles")
    axis.set_xlim(-0.6, max(len(places), 1) - 0.4)
    if rows:
        axis.legend(fontsize=7)


def _stacked(axis: Any, rows: Sequence[Row]) -> None:
    """One column for each workload and side, made of the medians of its phases."""
    columns = list(dict.fromkeys((row["workload"], row["side"]) for row in rows))
    below = dict.fromkeys(columns, 0.0)
    for color, phase in enumerate(dict.fromkeys(row["measure"] for row in rows)):
        own = [row for row in rows if row["measure"] == phase]
        keys = [(row["workload"], row["side"]) for row in own]
        names, heights, bottoms = ["\n".join(key) for key in keys], [row["time_ms"] for row in own], [below[key] for key in keys]
        # Ten colors come round again; one more is needed.
        axis.bar(names, heights, bottom=bottoms, label=phase, color="black" if color > 9 else f"C{color}")
        for key, row in zip(keys, own, strict=True):
            below[key] += row["time_ms"]
    axis.set(title="time to the first token", ylabel="ms, medians")
    axis.tick_params(axis="x", labelsize=7)
    if rows:
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
