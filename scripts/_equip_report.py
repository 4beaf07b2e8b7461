"""What `bench_equip.py` says of its rows: tables, the bars with met or NOT MET, and a picture."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _common import table
from _equip_checks import TABLE_6
from _equip_sides import FLOORS, FULL, FUSED, GATHER, OURS, PUBLISHED, ROTATED, SHIFT

from hf_kvcaches.errors import require

Row = dict[str, str]
LARGE_BATCH = 8


class Decoded:
    """The sides of one cell."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.sides = {row["side"]: row for row in rows}
        first = next(iter(self.sides.values()))
        self.policy, self.positions, self.dtype, self.kv = (first[name] for name in ("policy", "positions", "dtype", "kv"))
        self.batch, self.budget = int(first["batch"]), int(first["budget"])

    def __str__(self) -> str:
        return f"{self.dtype} {self.kv} {self.batch} x {self.budget}"

    @property
    def floor(self) -> str:
        """The fastest way to attend to keys and values that never change."""
        return min((name for name in FLOORS if name in self.sides), key=lambda name: float(self.sides[name]["step_ms"]))

    @property
    def overhead(self) -> float:
        """How many times the floor's step ours takes."""
        return float(self.sides[OURS]["step_ms"]) / float(self.sides[self.floor]["step_ms"])

    def ratio(self, side: str) -> float:
        """How many times as fast as that side ours decodes."""
        return float(self.sides[side]["ratio"])

    def spread(self, side: str) -> str:
        row = self.sides[side]
        return f"{float(row['ratio']):.2f}x ({float(row['ratio_q1']):.2f}-{float(row['ratio_q3']):.2f})"


def decoded(rows: Iterable[Row]) -> list[Decoded]:
    key = lambda row: tuple(row[name] for name in ("policy", "positions", "dtype", "kv", "batch", "budget"))  # noqa: E731
    own = [row for row in rows if row["measure"] == "decode"]
    groups: dict[Any, list[Row]] = {}
    for row in own:
        groups.setdefault(key(row), []).append(row)
    return [Decoded(group) for group in groups.values()]


def show(rows: Sequence[Row]) -> str:
    """One table a policy: a row for each cell, and how many times as fast as each side ours is (with quartiles over rounds)."""
    parts = []
    cells = decoded(rows)
    for (policy, positions), group in itertools.groupby(sorted(cells, key=_by_policy), key=_by_policy):
        members = list(group)
        others = [side for side in (FULL, SHIFT, PUBLISHED, FUSED, ROTATED, GATHER) if side in members[0].sides]
        header = [f"{policy}, {positions}", "ours ms", "IQR", "floor ms", "ours/floor", *(f"over {side}" for side in others), "logit error"]
        lines = []
        for cell in members:
            ours = cell.sides[OURS]
            lines.append(
                [
                    str(cell),
                    f"{float(ours['step_ms']):.2f}",
                    f"{float(ours['step_q3_ms']) - float(ours['step_q1_ms']):.2f}",
                    f"{float(cell.sides[cell.floor]['step_ms']):.2f}",
                    f"{cell.overhead:.3f}",
                    *(cell.spread(side) for side in others),
                    f"{float(ours['error']):.1e}",
                ]
            )
        parts.append(table(header, lines))
    written = [row for row in rows if row["measure"] == "write" and row["side"] != "in place"]
    if written:
        parts.append(_show_writes(written))
    return "\n\n".join(parts)


def _by_policy(cell: Decoded) -> tuple[str, str]:
    return cell.policy, cell.positions


def _show_writes(rows: Sequence[Row]) -> str:
    header = ["KV update alone, 64 of 1,024 tokens", "policy", "rebuilt ms", "in place", "paper (SPR)"]
    lines = []
    for row in rows:
        paper = TABLE_6.get((int(row["batch"]), *map(int, row["kv"].split("x"))))  # type: ignore[arg-type]
        says = "-" if paper is None else f"{paper[row['policy'] == 'streaming']:.1f}x"
        lines.append([f"{row['batch']} x {row['kv']}", row["policy"], f"{float(row['round_ms']):.2f}", f"{float(row['ratio']):.1f}x", says])
    return table(header, lines)


def bars(rows: Sequence[Row]) -> list[str]:
    """What is promised, what was measured, and whether that meets it."""
    cells = decoded(rows)
    lines = []
    for kv, least, paper in (("mha", 2.5, "paper: 1.62x on 60 cores, 1.47x on a GPU"), ("gqa", 1.4, "paper: none")):
        group = [cell for cell in cells if cell.policy == "streaming" and cell.kv == kv and cell.batch >= LARGE_BATCH]
        lines += _speedups(f"streaming over {PUBLISHED}, {kv}, batch >= {LARGE_BATCH}", group, PUBLISHED, least, paper)
        lines += _speedups(f"streaming over {FUSED}, {kv}, batch >= {LARGE_BATCH}", group, FUSED, None, "")
    for positions, kv in itertools.product(("compact", "original"), ("mha", "gqa")):
        group = [cell for cell in cells if (cell.policy, cell.positions, cell.kv) == ("h2o", positions, kv) and cell.batch >= LARGE_BATCH]
        text = f"h2o {positions} over {GATHER}, {kv}, batch >= {LARGE_BATCH}"
        lines += _speedups(text, group, GATHER, 4.0, "paper: 3.45x to 4.48x on CPUs, 1.86x on a GPU")
    for policy, positions in (("streaming", "compact"), ("h2o", "compact"), ("h2o", "original")):
        lines += _overheads(policy, positions, [cell for cell in cells if (cell.policy, cell.positions) == (policy, positions)])
    return lines + _writes(rows) + _memory(rows) + _long_texts(rows)


def _met(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"


def _speedups(text: str, cells: Sequence[Decoded], side: str, least: float | None, paper: str) -> list[str]:
    if not cells:
        return [f"{text}: not measured"]
    lines = []
    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    for dtype in [*dtypes, *(["all dtypes"] if len(dtypes) > 1 else [])]:
        ratios = [cell.ratio(side) for cell in cells if dtype in (cell.dtype, "all dtypes")]
        mean = statistics.geometric_mean(ratios)
        judged = "no bar" if least is None else f"bar {least}x: {_met(mean >= least)}"
        measured = f"{mean:.2f}x in geometric mean, {min(ratios):.2f}x to {max(ratios):.2f}x in {len(ratios)} cells"
        lines.append(f"{text}, {dtype}: {measured}; {judged}{'; ' + paper if paper else ''}")
    return lines


def _overheads(policy: str, positions: str, cells: Sequence[Decoded]) -> list[str]:
    text, most = f"{policy} {positions}, step over the floor", 1.15 if policy == "streaming" else None
    if not cells:
        return [f"{text}: not measured"]
    lines = []
    for dtype, kv in dict.fromkeys((cell.dtype, cell.kv) for cell in cells):
        group = [cell for cell in cells if (cell.dtype, cell.kv) == (dtype, kv)]
        mean, worst = statistics.geometric_mean([cell.overhead for cell in group]), max(group, key=lambda cell: cell.overhead)
        line = f"{text}, {dtype} {kv}: {mean:.3f} in geometric mean, {worst.overhead:.3f} at worst ({worst.batch} x {worst.budget})"
        judged = "no bar" if most is None else f"bar {most}: {_met(mean <= most)} in the mean, {_met(worst.overhead <= most)} in every cell"
        lines.append(f"{line}; {judged}")
    return lines


def _writes(rows: Sequence[Row]) -> list[str]:
    lines = []
    for policy, paper in (("streaming", "26.5x to 50.6x"), ("h2o", "11.6x to 39.9x")):
        ratios = [float(row["ratio"]) for row in rows if (row["measure"], row["policy"]) == ("write", policy) and row["side"] != "in place"]
        text = f"KV update alone, {policy}"
        if not ratios:
            lines.append(f"{text}: not measured")
            continue
        mean = statistics.geometric_mean(ratios)
        measured = f"{mean:.1f}x in geometric mean, {min(ratios):.1f}x to {max(ratios):.1f}x"
        lines.append(f"{text}: {measured}; bar 25x: {_met(mean >= 25)}; paper: {paper} (SPR)")
    return lines


def _memory(rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row["measure"] == "memory"]
    if not own:
        return ["bytes over budget x bytes per token: not measured"]
    return [
        f"bytes over budget x bytes per token, {row['policy']} {row['positions']} {row['kv']}: "
        f"{float(row['value']):.4f} for keys and values, bar 1.02: {_met(float(row['value']) <= 1.02)}; "
        f"{float(row['all_value']):.4f} with all that the cache owns"
        for row in own
    ]


def _long_texts(rows: Sequence[Row]) -> list[str]:
    lines = []
    flat = [row for row in rows if row["measure"] == "flat"]
    for policy, kv in dict.fromkeys((row["policy"], row["kv"]) for row in flat):
        group = [row for row in flat if (row["policy"], row["kv"]) == (policy, kv)]
        first, worst = group[0], max(group[1:], key=lambda row: float(row["ratio"]))
        measured = ", ".join(f"{float(row['step_ms']):.2f} ms at {int(row['tokens']):,}" for row in group)
        judged = (
            f"{float(worst['ratio']):.3f} times that at {int(first['tokens']):,} at worst; bar 1.10: {_met(float(worst['ratio']) <= 1.10)}"
        )
        lines.append(f"step time by tokens seen, {policy} {kv}: {measured}: {judged}")
    for row in rows:
        if row["measure"] == "far":
            lines.append(
                f"logits after {int(row['tokens']):,} tokens: {float(row['error']):.1e} from those at the start; bar 1e-3: "
                f"{_met(float(row['error']) <= 1e-3)} (without a cache the model's own angles are off by {float(row['value']):.1e})"
            )
    return lines or ["very long texts: not measured"]


def write_plot(path: Path, rows: Sequence[Row], where: dict[str, Any]) -> None:
    """Milliseconds a step of every side, one panel for each policy."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    cells = sorted(decoded(rows), key=_by_policy)
    panels = [(key, list(group)) for key, group in itertools.groupby(cells, key=_by_policy)]
    figure, axes = plots.subplots(
        1, max(1, len(panels)), figsize=(6 * max(1, len(panels)), 2 + 0.3 * max(1, len(cells) // 3)), squeeze=False, layout="constrained"
    )
    for axis, ((policy, positions), group) in zip(axes[0], panels, strict=False):
        places = range(len(group))
        for side in group[0].sides:
            times = [float(cell.sides[side]["step_ms"]) / float(cell.sides[cell.floor]["step_ms"]) for cell in group]
            axis.plot(times, places, marker="o", linestyle="", label=side, markersize=7 if side == OURS else 4)
        axis.set_yticks(list(places), [str(cell) for cell in group])
        axis.axvline(1.0, color="tab:gray", linewidth=1)
        axis.set(title=f"{policy}, positions {positions}", xlabel="time of a step over the floor's", xscale="log")
        axis.invert_yaxis()
        axis.legend(fontsize=7)
    figure.suptitle(
        f"{where['hardware']}, {where['threads']} threads, torch {where['torch']}, transformers {where['transformers']}", fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plots.close(figure)
