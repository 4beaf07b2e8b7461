"""Tables, files and pictures of `eval_subspace.py`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import table, write_table
from _subspace_variants import COLUMNS

from hf_kvcaches.errors import require

Rows = Sequence[dict[str, Any]]
FIELDS = {
    "perplexity": [*COLUMNS, "from", "to", "tokens", "perplexity", "change_percent"],
    "recall": [*COLUMNS, "questions", "right", "share"],
    "spectra": ["layer", "what", "rank", "energy"],
    "bounds": "layer rank over what bound points spearman error share_of_bound above_bound".split(),
}
# Ranks in the table of spectra, where a head has so many.
_SHOWN = (4, 8, 16, 24, 32, 48, 64, 96, 128)


def name_of(row: dict[str, Any]) -> str:
    """The variant, with its window."""
    return row["variant"] if row["mode"] == "full" else f"{row['variant']} [{row['sinks']}+{row['recent']}]"


def show(task: str, rows: Rows) -> str:
    """The table of a task."""
    return {"perplexity": _texts, "recall": _answers, "spectra": _spectra, "bounds": _bounds}[task](rows)


def _texts(rows: Rows) -> str:
    groups = [(name, list(group)) for name, group in itertools.groupby(rows, key=name_of)]
    spans = [(row["from"], row["to"]) for row in groups[0][1]]
    lines = []
    for name, group in groups:
        changes = ["" if row["mode"] == "full" else f"{row['change_percent']:+.2f}%" for row in group]
        lines.append([name, f"{group[0]['bytes_ratio']:.3f}", f"{group[0]['perplexity']:.3f}", *changes])
    return table(["perplexity", "bytes", "all", "change", *(f"to {end:,}" for _, end in spans[1:])], lines)


def _answers(rows: Rows) -> str:
    lines = [[name_of(row), f"{row['bytes_ratio']:.3f}", str(row["questions"]), f"{100 * row['share']:.1f}%"] for row in rows]
    return table(["recall", "bytes", "questions", "right"], lines)


def _spectra(rows: Rows) -> str:
    ranks = [rank for rank in _SHOWN if any(row["rank"] == rank for row in rows)]
    lines = []
    for (what, layer), group in itertools.groupby(rows, key=lambda row: (row["what"], row["layer"])):
        kept = {row["rank"]: row["energy"] for row in group}
        most = next(rank for rank, share in kept.items() if share >= min(0.99, max(kept.values())))
        lines.append([f"{what}, layer {layer}", *(f"{kept[rank]:.3f}" if rank in kept else "" for rank in ranks), str(most)])
    return table(["energy kept by rank", *map(str, ranks), "rank for 99%"], lines)


def _bounds(rows: Rows) -> str:
    lines = [
        [
            f"layer {row['layer']}, {row['what']}, {row['bound']}",
            row["rank"],
            row["over"],
            f"{row['spearman']:.2f}",
            f"{row['share_of_bound']:.3f}" if "share_of_bound" in row else "",
            str(row.get("above_bound", "")),
        ]
        for row in rows
    ]
    return table(["bounds", "rank", "over", "rank correlation", "error / bound", "above"], lines)


def write_csv(folder: Path, task: str, rows: Rows, fixed: dict[str, Any]) -> None:
    """`subspace-TASK.csv`."""
    write_table(folder / f"subspace-{task}.csv", FIELDS[task], rows, fixed)


def write_plots(folder: Path, found: dict[str, Rows]) -> None:
    """One picture a task, `subspace-TASK.png`."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    draw = {"perplexity": _draw_texts, "recall": _draw_answers, "spectra": _draw_spectra, "bounds": _draw_bounds}
    folder.mkdir(parents=True, exist_ok=True)
    for task, rows in found.items():
        if rows:
            figure = draw[task](plots, rows)
            figure.savefig(folder / f"subspace-{task}.png", dpi=110)
            plots.close(figure)


def _kind(row: dict[str, Any]) -> str:
    names = (
        row["rotation"],
        "" if row["metric"] == "attention" else row["metric"],
        "" if row["gamma"] == "calibrated" else f"gamma {row['gamma']}",
    )
    shared = "" if row["share"] == "head" else "shared by layer"
    fixed = "fixed ranks" if row["rule"].startswith("rank") else ""
    return " ".join(filter(None, (*names, shared, fixed, row["coefficients"], f"{row['sinks']}+{row['recent']}")))


def _by_bytes(axis: Any, rows: Rows, value: str) -> None:
    own = sorted((row for row in rows if row["mode"] != "full"), key=lambda row: (_kind(row), row["bytes_ratio"]))
    for name, group in itertools.groupby(own, key=_kind):
        axis.plot(*zip(*((row["bytes_ratio"], row[value]) for row in group), strict=True), marker="o", label=name)
    axis.set(xlabel="share of the full cache's bytes")


def _draw_texts(plots: Any, rows: Rows) -> Any:
    figure, (left, right) = plots.subplots(1, 2, figsize=(14, 6), layout="constrained")
    first = rows[0]["from"], rows[0]["to"]
    _by_bytes(left, [row for row in rows if (row["from"], row["to"]) == first], "change_percent")
    left.set(title="perplexity by memory", ylabel="change, %", yscale="symlog")
    for name, group in itertools.groupby((row for row in rows if row["mode"] != "full"), key=name_of):
        points = [(row["to"], row["change_percent"]) for row in group if (row["from"], row["to"]) != first]
        # Tens of lines tell nothing apart: those without exact tokens show how errors grow.
        if points and name.endswith("[0+0]"):
            right.plot(*zip(*points, strict=True), marker=".", label=name)
    right.set(title="by position in the text", xlabel="tokens", ylabel="change, %", xscale="log", yscale="symlog")
    left.legend(fontsize=7)
    right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_answers(plots: Any, rows: Rows) -> Any:
    figure, axis = plots.subplots(figsize=(7, 6), layout="constrained")
    _by_bytes(axis, rows, "share")
    axis.axhline(rows[0]["share"], color="black", label="full cache")
    axis.set(title="facts recalled", ylabel="share of questions", ylim=(-0.02, 1.02))
    axis.legend(fontsize=7)
    return figure


def _draw_spectra(plots: Any, rows: Rows) -> Any:
    kinds = list(dict.fromkeys(row["what"] for row in rows))
    figure, axes = plots.subplots(1, len(kinds), figsize=(14, 5), layout="constrained", sharey=True)
    for axis, kind in zip(axes, kinds, strict=True):
        for layer, group in itertools.groupby((row for row in rows if row["what"] == kind), key=lambda row: row["layer"]):
            axis.plot(*zip(*((row["rank"], 1 - row["energy"]) for row in group if row["energy"] < 1), strict=True), label=f"layer {layer}")
        axis.set(title=kind, xlabel="rank", ylabel="share of the energy lost", yscale="log", ylim=(1e-4, 1))
        axis.legend(fontsize=7)
    return figure


def _draw_bounds(plots: Any, rows: Rows) -> Any:
    figure, axis = plots.subplots(figsize=(8, 5), layout="constrained")
    for (what, bound, over), group in itertools.groupby(
        sorted(rows, key=lambda row: (row["what"], row["bound"], row["over"])), key=lambda row: (row["what"], row["bound"], row["over"])
    ):
        members = list(group)
        layers = sorted({row["layer"] for row in members})
        means = [sum(own) / len(own) for layer in layers if (own := [row["spearman"] for row in members if row["layer"] == layer])]
        axis.plot(layers, means, marker="o", linestyle="-" if over == "heads" else ":", label=f"{what}, {bound}, over {over}")
    axis.set(title="errors and their bounds", xlabel="layer", ylabel="rank correlation", ylim=(-1.02, 1.02))
    axis.legend(fontsize=7)
    return figure
