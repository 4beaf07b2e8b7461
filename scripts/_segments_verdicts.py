"""Tables, files, pictures and bars of `eval_segments.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from _common import table, write_table
from _segments_quality import TIERS, Answer, Side, by_series
from _subspace_theory import spearman

from hf_kvcaches.errors import require

# What became of the requests of a workload on each side.
Found = Mapping[tuple[str, Side], Sequence[Answer]]

ALONE = Side("no reuse")
PREFIX, AUTO, BLIND = Side("prefix caching", "exact"), Side("auto", "auto"), Side("approximate", "approximate")
PLAIN = Side("prefix caching", "exact", None)
HALF = 0.5
# Bars.
SAME_LOGITS, SAVED, KL, RECALL = 1e-4, 0.6, 0.05, 0.02
_DRIFT_FIELDS = ("series", "number", "drift", "page", "score", "kl", "right", "right_alone", "asked")


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def touched_kl(answers: Sequence[Answer]) -> float:
    """The mean divergence over those requests in which something stood behind another text."""
    kls = [fmean(answer.kls) for answer in answers if answer.approximate]
    return fmean(kls) if kls else 0.0


def hit_rates(answers: Sequence[Answer]) -> tuple[float, float]:
    """The share of prompt tokens that were not run, in the first half of the requests of each series and in the second."""
    halves: list[list[Answer]] = [[], []]
    for series in by_series(answers):
        middle = (len(series) + 1) // 2
        halves[0] += series[:middle]
        halves[1] += series[middle:]
    first, second = (sum(each.reused for each in half) / max(1, sum(each.tokens for each in half)) for half in halves)
    return first, second


def summary(workload: str, side: Side, answers: Sequence[Answer]) -> dict[str, Any]:
    """One row of the table and of the file."""
    tokens = sum(each.tokens for each in answers)
    asked = sum(each.asked for each in answers)
    kls = [kl for each in answers for kl in each.kls]
    tiers: Counter[str] = Counter()
    for each in answers:
        tiers.update(each.tiers)
    first, second = hit_rates(answers)
    offered = sum(each.approximate + each.refused for each in answers)
    return {
        "workload": workload,
        "side": side.name,
        "quantization": "" if side.mode is None else side.quantization or "none",
        "cap": "" if side.cap is None else side.cap,
        "requests": len(answers),
        "tokens": tokens,
        "prefix_share": sum(each.prefix for each in answers) / tokens,
        "saved": fmean(each.saved for each in answers),
        "reused": sum(each.reused for each in answers) / tokens,
        "reused_first_half": first,
        "reused_second_half": second,
        "kl_mean": fmean(kls),
        "kl_p99": quantile(kls, 0.99),
        "kl_max": max(kls),
        "kl_where_approximate": touched_kl(answers),
        "top1": sum(each.agreed * len(each.kls) for each in answers) / len(kls),
        "logits_max": max(each.difference for each in answers),
        "recall": sum(each.right for each in answers) / asked,
        "recall_alone": sum(each.right_alone for each in answers) / asked,
        **{f"share_{tier}": tiers[tier] / tokens for tier in TIERS},
        "accepted": sum(each.approximate for each in answers) / offered if offered else "",
        "mib": sum(series[-1].bytes for series in by_series(answers)) / 2**20,
    }


_PERCENT = ("saved", "reused_first_half", "reused_second_half", "top1", "recall", *(f"share_{tier}" for tier in TIERS))
_HEADER = (
    "FLOPs saved",
    "1st half",
    "2nd half",
    "top-1",
    "recall",
    *TIERS,
    "KL mean",
    "p99",
    "max",
    "MiB",
)


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each workload; halves: tokens not run in the first and the second half of the requests; tiers: shares of tokens."""
    tables = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == workload]
        lines = []
        for row in own:
            name = " ".join(filter(None, (row["side"], row["quantization"], f"{row['cap']:g} of the bytes" if row["cap"] else "")))
            kls = [f"{row[name]:.2g}" for name in ("kl_mean", "kl_p99", "kl_max")]
            lines.append([name, *(f"{100 * row[each]:.1f}%" for each in _PERCENT), *kls, f"{row['mib']:.1f}"])
        head = f"{workload}: {own[0]['requests']} requests, {100 * own[0]['prefix_share']:.1f}% in shared prefixes"
        tables.append(table([head, *_HEADER], lines))
    return "\n\n".join(tables)


def bars(found: Found, bound: float) -> list[str]:
    """One line for each thing that the cache is asked to reach."""
    agents = {side: answers for (workload, side), answers in found.items() if workload == "agents"}
    lines = ["Bars"]
    exact = [answers for (_, side), answers in found.items() if side == PLAIN]
    worst = max(each.difference for answers in exact for each in answers)
    lines.append(_bar(f"exact, unquantised: logits within {SAME_LOGITS:g} of a full prefill", worst <= SAME_LOGITS, f"{worst:.2g}"))
    prefixes = [each for (_, side), answers in found.items() if side.mode == "exact" and side.cap is None for each in answers]
    short = sum(each.reused < each.prefix for each in prefixes)
    lines.append(_bar("exact: never fewer tokens reused than in the longest shared prefix", not short, f"{short} of {len(prefixes)} fewer"))
    saved = fmean(each.saved for each in agents[AUTO])
    lines.append(_bar(f"auto saves {SAVED:.0%} of the prefill's operations on agents", saved >= SAVED, f"{saved:.1%}"))
    for workload in ("agents", "hanging", "adversarial"):
        answers = found[workload, AUTO]
        mean = fmean(kl for each in answers for kl in each.kls)
        lines.append(_bar(f"auto, {workload}: mean KL of at most {KL}", mean <= KL, f"{mean:.2g}"))
        lost = (sum(each.right_alone for each in answers) - sum(each.right for each in answers)) / sum(each.asked for each in answers)
        lines.append(_bar(f"auto, {workload}: recall within {100 * RECALL:.0f} points of no reuse", lost <= RECALL, f"{-100 * lost:+.2f}"))
    for side, answers in agents.items():
        if side.cap is not None:
            first, second = hit_rates(answers)
            claim = f"{side}: second half of the requests reuses no less than the first"
            lines.append(_bar(claim, second >= first, f"{first:.1%}, then {second:.1%}"))
    drifting = found["adversarial", AUTO]
    mean = touched_kl(drifting)
    lines.append(_bar(f"auto, adversarial: mean KL of accepted spans under the policy's {bound:g}", mean <= bound, f"{mean:.2g}"))
    lines.append(_falling(drifting))
    return lines


def _bar(claim: str, met: bool, numbers: str) -> str:
    return f"  {claim}: {'met' if met else 'NOT met'} ({numbers})"


def _falling(answers: Sequence[Answer]) -> str:
    """Whether less of the page that comes in each prompt is accepted where more has drifted. The first prompt of a series stored it."""
    later = [each for each in answers if each.number and each.page is not None]
    pages = [each.page or 0.0 for each in later]
    drifts = torch.tensor([each.drift for each in later])
    correlation = spearman(drifts, torch.tensor(pages))
    ends = [[page for page, each in zip(pages, later, strict=True) if low <= each.drift <= high] for low, high in ((0, 1 / 3), (2 / 3, 1))]
    first, last = (fmean(end) if end else float("nan") for end in ends)
    seen = [(each.drift, each.score) for each in later if each.score is not None]
    scores = spearman(*torch.tensor(seen).T) if len(seen) > 1 else float("nan")
    numbers = f"{first:.1%} in the first third, {last:.1%} in the last; rank correlation {correlation:.2f}, of scores {scores:.2f}"
    return _bar("auto, adversarial: less of the page is accepted as drift grows", correlation < 0 and last < first, numbers)


def write_csv(folder: Path, rows: Sequence[dict[str, Any]], found: Found, fixed: dict[str, Any]) -> None:
    """`segments-quality.csv`, and `segments-drift.csv` with each adversarial request of auto."""
    drifts = [
        {name: getattr(each, name) for name in _DRIFT_FIELDS if name != "kl"} | {"kl": fmean(each.kls)}
        for each in found["adversarial", AUTO]
    ]
    write_table(folder / "segments-quality.csv", rows[0], rows, fixed)
    write_table(folder / "segments-drift.csv", drifts[0], drifts)


def write_plot(folder: Path, found: Found) -> None:
    """`segments-quality.png`: savings by workload, reuse over time, and what drift does to scores, acceptance and divergence."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    figure, (left, middle, right) = plots.subplots(1, 3, figsize=(18, 5), layout="constrained")
    workloads = list(dict.fromkeys(workload for workload, _ in found))
    sides = (PREFIX, AUTO, BLIND)
    for number, side in enumerate(sides):
        own = [(place, found[workload, side]) for place, workload in enumerate(workloads) if (workload, side) in found]
        heights = [100 * fmean(each.saved for each in answers) for _, answers in own]
        left.bar([place + (number - 1) * 0.27 for place, _ in own], heights, 0.25, label=str(side))
    left.set(title="operations of the prefill saved", ylabel="%", xticks=range(len(workloads)), xticklabels=workloads)
    left.legend()
    for (workload, side), answers in found.items():
        if workload == "agents" and side in (PREFIX, AUTO, *(each for _, each in found if each.cap is not None)):
            middle.plot(*_smooth(answers), label=str(side), linestyle="-" if side.cap is None else "--")
    middle.set(title="tokens of agents' prompts that were not run", xlabel="request", ylabel="%, mean of 20 requests", ylim=(0, 100))
    middle.legend()
    drifting = [each for each in found["adversarial", AUTO] if each.number]
    scored = [each for each in drifting if each.score is not None]
    right.scatter([each.drift for each in scored], [each.score for each in scored], label="score of its probe")
    right.scatter([each.drift for each in drifting], [each.page for each in drifting], marker="x", label="share accepted")
    right.scatter([each.drift for each in drifting], [fmean(each.kls) for each in drifting], marker=".", label="KL, nats")
    right.set(title="a page behind a text that drifts away", xlabel="drift")
    right.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "segments-quality.png", dpi=110)
    plots.close(figure)


def _smooth(answers: Sequence[Answer], width: int = 20) -> tuple[list[int], list[float]]:
    shares = [100 * each.reused / each.tokens for each in answers]
    ends = range(min(width, len(shares)), len(shares) + 1)
    return list(ends), [fmean(shares[max(0, end - width) : end]) for end in ends]
