"""How the answers of `bench_warmstart.py` become numbers, and how these are shown: tables, files, what was promised, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import environment, table
from _equip_sides import spread
from _sections import Columns
from _segments_report import Bar
from _segments_sides import Row
from _warmstart_timing import ALIGN, AUTO, BACKGROUND, COLD, HITS, PREFIX, SLOTS, SYNC, Answer, Answers, counted

from hf_kvcaches.errors import require

FIELDS = (
    "section measure workload group side length tokens count asked time_ms time_q1_ms time_q3_ms ratio ratio_q1 ratio_q3 "
    "extra_ms extra_q1_ms extra_q3_ms reused same served value unit"
).split()
TEXTS = ("section", "measure", "workload", "group", "side", "served", "unit")
WHOLE = ("length", "tokens", "count", "asked")
COLUMNS = Columns(FIELDS, TEXTS, WHOLE)
COLORS = {COLD: "tab:gray", PREFIX: "tab:orange", ALIGN: "tab:cyan", AUTO: "tab:blue", SLOTS: "tab:green", SYNC: "tab:red"}
COLORS[BACKGROUND] = "tab:purple"
# Rows over all kinds of pairs, and over those that are not the same prompt again.
ALL_KINDS, ALL_BUT_IDENTICAL = "all kinds", "all kinds but identical"
# What is promised, and at how many tokens and among how many prompts.
FASTER, MISS, MISS_MS, LOOK_UP_MS, TOKENS, PROMPTS = 4.0, 1.03, 5.0, 5.0, 800, 100_000

MEASURES: dict[str, Callable[[Answer], float]] = {
    "first token": lambda answer: answer.first,
    "whole answer": lambda answer: answer.seconds,
    "longest pause": lambda answer: answer.pause,
}


def rows_of(answers: Answers, measure: str, group: str = "all", **labels: Any) -> list[Row]:
    """A row for each side."""
    rows = []
    of = MEASURES[measure]
    for name, own in answers.items():
        pairs = [(base, mine) for base, mine in zip(answers[COLD], own, strict=True) if group == "all" or mine.served in HITS]
        # A single one has no quartiles.
        if len(pairs) < 2 or (group == "hits" and name == COLD):
            continue
        mine = [answer for _, answer in pairs]
        whole = sum(answer.tokens for answer in mine)
        row = {**labels, "measure": measure, "group": group, "side": name, "count": len(pairs), "asked": len(own)}
        row |= {"tokens": round(whole / len(mine)), "reused": round(sum(answer.reused for answer in mine) / whole, 4)}
        row |= {"served": counted(Counter(answer.served for answer in mine)), **spread("time", [of(answer) for answer in mine], 1e3)}
        row |= spread("ratio", [of(base) / of(answer) for base, answer in pairs])
        row |= spread("extra", [of(answer) - of(base) for base, answer in pairs], 1e3)
        row["same"] = round(sum(base.new == answer.new for base, answer in pairs) / len(pairs), 4)
        if "swap" in name:
            row |= {"value": round(sum(answer.swapped for answer in mine) / len(mine), 4), "unit": "swapped"}
        rows.append(row)
    return rows


def _worth_showing(row: Row) -> bool:
    """Not what the row of all says as well, and of long answers, which have many rows, what is true of all kinds."""
    pooled = row.get("workload") in (ALL_KINDS, ALL_BUT_IDENTICAL)
    same = row.get("group") == "hits" and row["count"] == row["asked"]
    return pooled or not (same or row["section"] == "answers")


def show(rows: Sequence[Row]) -> str:
    """A table for each section; reused: the share of tokens that were not run; same: the share of answers that are cold's."""
    tables = []
    for section in dict.fromkeys(row["section"] for row in rows):
        lines = []
        for row in (row for row in rows if row["section"] == section and _worth_showing(row)):
            group = f", {row['group']}" if row.get("group") == "hits" else ""
            name = f"{row.get('workload', '')}{group} {row.get('length', row['tokens'])}: {row['side']}, {row['measure']}".strip()
            line = [name, f"{row['count']}/{row['asked']}" if row.get("asked", row["count"]) != row["count"] else str(row["count"])]
            line += [f"{row['time_ms']:.3f}", f"{row['time_q1_ms']:.3f}-{row['time_q3_ms']:.3f}"]
            line += [f"{row['ratio']:.2f}x", f"{row['ratio_q1']:.2f}-{row['ratio_q3']:.2f}"] if "ratio" in row else ["", ""]
            line.append(f"{row['extra_ms']:+.2f}" if "extra_ms" in row else "")
            line += [f"{row[column]:.1%}" if column in row else "" for column in ("reused", "same")]
            line += [row.get("served", ""), f"{row['value']:g} {row['unit']}" if "value" in row else ""]
            lines.append(line)
        header = [section, "n", "ms", "quartiles", "ratio", "quartiles", "extra ms", "reused", "same", "served by", ""]
        kept = [column for column in range(len(header)) if any(line[column] for line in lines)]
        tables.append(table([header[column] for column in kept], [[line[column] for column in kept] for line in lines]))
    return "\n\n".join(tables)


@dataclass(frozen=True)
class Miss(Bar):
    """That a miss costs little: by its share of the time, or in milliseconds."""

    def verdict(self, rows: Sequence[Row]) -> str:
        own = [row for row in rows if all(row.get(name) == value for name, value in self.chosen.items())]
        if not own:
            return f"{self.text}: not measured"
        met = all(1 / row["ratio"] <= MISS or row["extra_ms"] <= MISS_MS for row in own)
        found = ", ".join(f"{row['length']} tokens {1 / row['ratio']:.3f}x, {row['extra_ms']:+.2f} ms" for row in own)
        return f"{self.text}: {'met' if met else 'NOT met'} ({found})"


def bars() -> list[Bar]:
    ratio = lambda row: float(row["ratio"])  # noqa: E731
    promised: list[Bar] = []
    for workload in (ALL_KINDS, ALL_BUT_IDENTICAL):
        hits = {"section": "hits", "measure": "first token", "workload": workload, "group": "hits", "side": AUTO, "length": TOKENS}
        promised.append(
            Bar(f"auto at least {FASTER:g}x as fast as cold to the first token, hits at {TOKENS} tokens, {workload}", hits, ratio, FASTER)
        )
    for workload in ("unrelated", "other text"):
        text = f"a miss takes at most {MISS:g}x the time of cold, or {MISS_MS:g} ms more, {workload}"
        chosen = {"section": "misses", "measure": "first token", "workload": workload, "group": "all", "side": AUTO}
        promised.append(Miss(text, chosen, ratio))
    chosen = {"section": "look-up", "measure": "all", "length": PROMPTS}
    text = f"look-up among {PROMPTS} prompts in at most {LOOK_UP_MS:g} ms"
    return [*promised, Bar(text, chosen, lambda row: float(row["time_ms"]), most=LOOK_UP_MS, unit=" ms")]


def write_plot(path: Path, rows: Sequence[Row], device: torch.device) -> None:
    """How many times as fast each side is, what the time goes to, and look-ups."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    figure, axes = plots.subplots(2, 3, figsize=(19, 10), layout="constrained")
    first = [row for row in rows if row.get("measure") == "first token" and row["side"] != COLD]
    hits = [row for row in first if row["section"] == "hits" and row["group"] == "hits"]
    pooled = [row for row in hits if row["workload"] == ALL_BUT_IDENTICAL]
    _ratios(axes[0, 0], pooled, [str(row["length"]) for row in pooled], f"first token, hits, {ALL_BUT_IDENTICAL}, by tokens")
    longest = max((row["length"] for row in hits), default=0)
    kinds = [row for row in hits if row["length"] == longest and row["workload"] not in (ALL_KINDS, ALL_BUT_IDENTICAL)]
    _ratios(axes[0, 1], kinds, [row["workload"].replace("_", "\n") for row in kinds], f"first token, hits at {longest} tokens")
    larger = [row for row in first if row["section"] == "larger"]
    _ratios(axes[0, 2], larger, [str(row["length"]) for row in larger], "first token, larger model, by tokens")
    whole = [row for row in rows if row["section"] == "answers" and row["side"] != COLD]
    whole = [row for row in whole if (row["workload"], row["group"]) == (ALL_KINDS, "hits")]
    _ratios(axes[1, 0], whole, [f"{row['measure']}\n{row['length']}" for row in whole], "hits with 32 tokens more")
    _stacked(axes[1, 1], [row for row in rows if row["section"] == "phases"])
    _lookups(axes[1, 2], [row for row in rows if row["section"] == "look-up" and row["measure"] != "add"])
    where = environment(device)
    figure.suptitle(f"{where['hardware']}, {where['threads']} threads, torch {where['torch']}: WarmStartCache", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plots.close(figure)


def _ratios(axis: Any, rows: Sequence[Row], groups: Sequence[str], title: str) -> None:
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
    axis.set(title=title, ylabel="times as fast as cold, median and quartiles")
    axis.set_xlim(-0.6, max(len(places), 1) - 0.4)
    if rows:
        axis.legend(fontsize=7)


def _stacked(axis: Any, rows: Sequence[Row]) -> None:
    """One column for each length and side, made of the medians of its phases."""
    columns = list(dict.fromkeys((row["length"], row["side"]) for row in rows))
    below = dict.fromkeys(columns, 0.0)
    for color, phase in enumerate(dict.fromkeys(row["measure"] for row in rows)):
        own = {(row["length"], row["side"]): row["time_ms"] for row in rows if row["measure"] == phase}
        # Ten colors come round again.
        style = {"color": f"C{color % 10}", "hatch": "//" * (color // 10)}
        names = [f"{length}\n{side}" for length, side in own]
        axis.bar(names, list(own.values()), bottom=[below[key] for key in own], label=phase, **style)
        for key, height in own.items():
            below[key] += height
    axis.set(title="time to the first token, hits", ylabel="ms, medians")
    axis.tick_params(axis="x", labelsize=6)
    if rows:
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _lookups(axis: Any, rows: Sequence[Row]) -> None:
    """The parts of a look-up by the size of the library."""
    for part in dict.fromkeys(row["measure"] for row in rows):
        own = [row for row in rows if row["measure"] == part]
        axis.plot([row["length"] for row in own], [row["time_ms"] for row in own], marker="o", label=part)
    axis.axhline(LOOK_UP_MS, color="black", linewidth=1)
    axis.set(title="look-up", xlabel="prompts in the library", ylabel="ms, medians", xscale="log", yscale="log")
    if rows:
        axis.legend(fontsize=7)
