"""Tables, files, pictures and bars of `eval_translation.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from _common import table, write_table
from _translation_quality import WORKLOADS, Answer
from _translation_sides import DEFAULT, FULL_RANK, ORACLE, RAW, REUSE, SWEEP, ZERO, Side

from hf_kvcaches.errors import require

# Bars.
SHARE, OF_RAW, OF_REUSE, RECALL, SECONDS = 0.055, 1 / 10, 1 / 3, 3.0, 180.0
ALL = "all"
# By growing bytes.
PAYLOADS = (ZERO, *SWEEP[:2], DEFAULT, *SWEEP[2:])


@dataclass(frozen=True)
class Details:
    """What is known of a side but for its answers."""

    run_layers: int = 0  # that the consumer runs on the prefix
    chosen: tuple[int, ...] = ()  # layers: the patched ones, or those that are recomputed
    seconds: Mapping[str, float] | None = None  # of each stage of the calibration


class Found:
    """All answers."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, Side, str], list[Answer]] = {}
        self.details: dict[tuple[str, Side], Details] = {}

    @property
    def pairs(self) -> list[str]:
        """In their order."""
        return list(dict.fromkeys(pair for pair, _, _ in self.answers))

    def sides(self, pair: str) -> list[Side]:
        """Those of a pair, in their order."""
        return list(dict.fromkeys(side for own, side, _ in self.answers if own == pair))

    def of(self, pair: str, side: Side, workload: str = ALL) -> list[Answer]:
        """Answers, of all workloads if none is named."""
        names = WORKLOADS if workload == ALL else (workload,)
        return [answer for name in names for answer in self.answers.get((pair, side, name), ())]

    def kl(self, pair: str, side: Side, workload: str = ALL) -> float:
        """The mean divergence."""
        return fmean(kl for each in self.of(pair, side, workload) for kl in each.kls)

    def share(self, pair: str, side: Side) -> float:
        """Bytes that are sent, of those of bfloat16 keys and values."""
        own = self.of(pair, side)
        return sum(each.bytes for each in own) / sum(each.plain for each in own)


def recall(answers: Sequence[Answer]) -> tuple[float, float]:
    """Percent of right answers, and behind the consumer's own prefill."""
    asked = sum(each.asked for each in answers)
    if not asked:
        return math.nan, math.nan
    return 100 * sum(each.right for each in answers) / asked, 100 * sum(each.right_alone for each in answers) / asked


def summary(found: Found, pair: str, side: Side, workload: str) -> dict[str, Any]:
    """One row of the file."""
    own, details = found.of(pair, side, workload), found.details.get((pair, side), Details())
    places = sum(len(each.kls) for each in own)
    right, alone = recall(own)
    explained = side.kind == "alone"
    return {
        "pair": pair,
        "side": side.name,
        "family": side.family,
        "workload": workload,
        "texts": len(own),
        "tokens": sum(each.tokens for each in own),
        "bytes": "" if explained else sum(each.bytes for each in own),
        "share": "" if explained else round(sum(each.bytes for each in own) / sum(each.plain for each in own), 5),
        "kl": round(fmean(kl for each in own for kl in each.kls), 6),
        "tv": round(fmean(tv for each in own for tv in each.variations), 6),
        "top1": round(sum(each.agreed for each in own) / places, 4),
        "perplexity": round(math.exp(fmean(loss for each in own for loss in each.losses)), 4),
        "perplexity_alone": round(math.exp(fmean(loss for each in own for loss in each.losses_alone)), 4),
        "recall": "" if math.isnan(right) else round(right, 2),
        "recall_alone": "" if math.isnan(alone) else round(alone, 2),
        "questions": sum(each.asked for each in own),
        "run_layers": details.run_layers,
        "chosen_layers": " ".join(map(str, details.chosen)),
        "fit_seconds": "" if details.seconds is None else round(sum(details.seconds.values()), 2),
    }


def rows_of(found: Found) -> list[dict[str, Any]]:
    """All rows of the file, by pair, side and workload."""
    return [summary(found, *key) for key in found.answers]


def show(found: Found) -> str:
    """A table for each pair, over all workloads where none is named; run: layers that the consumer runs on the prefix."""
    tables = []
    for pair in found.pairs:
        lines = []
        for side in found.sides(pair):
            if side.family == "explanation":
                continue
            row = summary(found, pair, side, ALL)
            kls = [f"{found.kl(pair, side, each):.4f}" for each in (ALL, *WORKLOADS)]
            rest = [f"{row['tv']:.4f}", f"{row['top1']:.3f}", f"{row['perplexity']:.2f}", f"{recall(found.of(pair, side))[0]:.1f}%"]
            lines.append([side.name, f"{row['bytes']:,}", f"{row['share']:.4f}", *kls, *rest, str(row["run_layers"]), row["chosen_layers"]])
        header = [pair, "bytes", "share", "KL", *WORKLOADS, "TV", "top-1", "ppl", "recall", "run", "layers"]
        tables.append(table(header, lines))
    return "\n\n".join(tables)


def explain(found: Found) -> str:
    """What the divergences are made of: with all layers translated, and with one at a time among the consumer's own."""
    tables = []
    for pair in found.pairs:
        sides = [side for side in found.sides(pair) if side.family == "explanation" or side in (RAW, ZERO, DEFAULT)]
        lines = [[side.name, *(f"{found.kl(pair, side, each):.4f}" for each in (ALL, *WORKLOADS))] for side in sides]
        tables.append(table([f"{pair}: where the KL comes from", "KL", *WORKLOADS], lines))
    return "\n\n".join(tables)


def bars(found: Found) -> list[str]:
    """One line for each thing that the default is asked to reach, and for what it is measured beside.

    Divergences are judged over all workloads together; ratios of each stand beside, because a few answers that a side gets wrong outweigh
    all other places.
    """
    lines = ["Bars"]
    for pair in found.pairs:
        kl = {side: found.kl(pair, side) for side in (RAW, REUSE, ZERO, DEFAULT, FULL_RANK)}
        share, mine = found.share(pair, DEFAULT), kl[DEFAULT]
        lines.append(_bar(f"{pair}, default: at most {SHARE}x of the bytes", share <= SHARE, f"{share:.4f}x"))
        for side, part, name in ((RAW, OF_RAW, "1/10"), (REUSE, OF_REUSE, "1/3")):
            parts = [f"{each} {_ratio(found.kl(pair, DEFAULT, each), found.kl(pair, side, each))}" for each in WORKLOADS]
            numbers = f"{mine:.4f} against {kl[side]:.4f}, {_ratio(mine, kl[side])}; {', '.join(parts)}"
            lines.append(_bar(f"{pair}, default: KL at most {name} of {side.name}", mine <= part * kl[side], numbers))
        limit = kl[FULL_RANK]
        reach = f"{limit:.4f}, {_ratio(limit, kl[RAW])} of {RAW.name}"
        lines.append(f"  {pair}: zero bytes {kl[ZERO]:.4f}, {_ratio(kl[ZERO], mine)} of the default's; at full rank in float32 {reach}")
        lines += [_recall_bar(found, pair), _seconds_bar(found, pair)]
    return lines


def _bar(claim: str, met: bool, numbers: str) -> str:
    return f"  {claim}: {'met' if met else 'NOT met'} ({numbers})"


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.3g}x" if other else "nothing to compare with"


def _recall_bar(found: Found, pair: str) -> str:
    """At the smallest payload for which recall holds, and for all that are larger, too: one that holds by chance is none."""
    own = recall(found.of(pair, ORACLE, "documents"))[0]
    shown = {side: recall(found.of(pair, side, "documents"))[0] for side in PAYLOADS if found.of(pair, side)}
    least = None
    for side in reversed(shown):
        if round(own - shown[side], 6) > RECALL:
            break
        least = side
    claim = f"{pair}: recall within {RECALL:g} points of its own prefill"
    numbers = f"own prefill {own:.1f}%; " + ", ".join(f"{side.name} {value:.1f}%" for side, value in shown.items())
    at = "at no payload" if least is None else f"from {least.name} on, {found.share(pair, least):.4f}x"
    return _bar(claim, least is not None, f"{at}; {numbers}")


def _seconds_bar(found: Found, pair: str) -> str:
    stages = found.details[pair, DEFAULT].seconds or {}
    total = sum(stages.values())
    numbers = f"{total:.1f} s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items())
    return _bar(f"{pair}, default: calibrated in under {SECONDS:g} s", total < SECONDS, numbers)


def write_csv(folder: Path, found: Found, fixed: Mapping[str, Any]) -> None:
    """`translation-quality.csv`."""
    rows = rows_of(found)
    write_table(folder / "translation-quality.csv", rows[0], rows, fixed)


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other one beats in both numbers, by the first of them."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def write_plot(folder: Path, found: Found) -> None:
    """`translation-quality.png`: divergence and recall by bytes."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    pairs = found.pairs
    figure, axes = plots.subplots(2, len(pairs), figsize=(6 * len(pairs), 9), layout="constrained", squeeze=False)
    styles = {"baseline": ("s", "tab:gray"), "paper": ("^", "tab:orange"), "ours": ("o", "tab:blue"), "variant": (".", "tab:cyan")}
    for column, pair in enumerate(pairs):
        upper, lower = axes[:, column]
        sent = [side for side in found.sides(pair) if side.family in styles and side not in (ORACLE, ZERO)]
        for family, (marker, color) in styles.items():
            own = [side for side in sent if side.family == family]
            line = "-" if family == "ours" else ""
            shares, kls = [found.share(pair, side) for side in own], [found.kl(pair, side) for side in own]
            upper.plot(shares, kls, marker=marker, color=color, linestyle=line, label=family)
            lower.plot(shares, [recall(found.of(pair, side))[0] for side in own], marker=marker, color=color, linestyle=line, label=family)
        for side in sent:
            if side.family == "baseline" or side in (REUSE, DEFAULT):
                upper.annotate(side.name, (found.share(pair, side), found.kl(pair, side)), fontsize=7)
        best = front([(found.share(pair, side), found.kl(pair, side)) for side in sent])
        upper.plot(*zip(*best, strict=True), color="black", linestyle=":", drawstyle="steps-post", label="Pareto front")
        upper.axhline(found.kl(pair, ZERO), color="tab:green", linestyle="--", label=ZERO.name)
        upper.axhline(found.kl(pair, FULL_RANK), color="tab:red", linestyle="--", label=FULL_RANK.name)
        lower.axhline(recall(found.of(pair, ZERO))[0], color="tab:green", linestyle="--", label=ZERO.name)
        lower.axhline(recall(found.of(pair, ORACLE))[0], color="black", linestyle="--", label=ORACLE.name)
        upper.set(title=pair, xscale="log", yscale="log", ylabel="KL to its own prefill, nats")
        lower.set(xscale="log", xlabel="bytes sent, of bfloat16 keys and values", ylabel="facts recalled, %")
        for axis in (upper, lower):
            axis.legend(fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "translation-quality.png", dpi=110)
    plots.close(figure)
