"""Tables, files, pictures and bars of `eval_segments.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from _segments_quality import TIERS, Answer, Side, by_series
from shared.bars import bar
from shared.numbers import mean, spearman
from shared.plot import Panel, draw
from shared.results import Row, rows_where, show, write_csv

from hf_kvcaches.reuse.layout import label_of
from hf_kvcaches.segments.cache import LEAST

# What became of the requests of a workload on each side.
Answers = Mapping[tuple[str, Side], Sequence[Answer]]

ALONE = Side("no reuse")
PREFIX, AUTO, BLIND = Side("prefix caching", "exact"), Side("auto", "auto"), Side("approximate", "approximate")
HALF_REPAIR = Side("approximate, repaired in half of the layers", "approximate", repair_depth=0.5)
NEAR = Side("auto, near-identical", "auto", near_identical=True)
CUTS = Side("auto, cuts", "auto", cuts=1)
GUARDS = Side("guards alone, cuts", "auto", cuts=1, guards_alone=True)
HALF = 0.5
# Bars.
SAME_LOGITS, SAVED, KL, RECALL = 1e-4, 0.6, 0.05, 0.02
DRIFT = ("series", "number", "drift", "page", "score", "right", "right_alone", "asked", "kl")


def touched_kl(answers: Sequence[Answer]) -> float:
    """The mean divergence over those requests in which something stood behind another text."""
    kls = [fmean(answer.kls) for answer in answers if answer.approximate]
    return fmean(kls) if kls else 0.0


def hit_rates(answers: Sequence[Answer]) -> tuple[float, float]:
    """The share of prompt tokens that were not run, in the first half of the requests of each series and in the second."""
    halves: tuple[list[Answer], list[Answer]] = ([], [])
    for series in by_series(answers):
        for number, answer in enumerate(series):
            halves[number >= (len(series) + 1) // 2].append(answer)
    first, second = (sum(answer.reused for answer in half) / max(1, sum(answer.tokens for answer in half)) for half in halves)
    return first, second


def summary(workload: str, side: Side, answers: Sequence[Answer]) -> Row:
    """One row of the table and of the file."""
    total = lambda name: sum(getattr(answer, name) for answer in answers)  # noqa: E731
    tokens, asked, kls = total("tokens"), total("asked"), [kl for answer in answers for kl in answer.kls]
    tiers: Counter[str] = Counter()
    for answer in answers:
        tiers.update(answer.tiers)
    first, second = hit_rates(answers)
    return {
        "workload": workload,
        "side": side.name,
        "quantization": "" if side.mode is None else label_of(side.quantization),
        "cap": "" if side.cap is None else side.cap,
        "requests": len(answers),
        "tokens": tokens,
        "prefix_share": total("prefix") / tokens,
        "saved": total("saved") / len(answers),
        "reused": total("reused") / tokens,
        "reused_first_half": first,
        "reused_second_half": second,
        "kl_mean": fmean(kls),
        "kl_max": max(kls),
        "logits_max": max(answer.difference for answer in answers),
        "recall": total("right") / asked,
        "recall_alone": total("right_alone") / asked,
        **{f"share_{tier}": tiers[tier] / tokens for tier in TIERS},
        "share_partial": total("partial") / tokens,
        "cpu_ms": 1e3 * total("seconds") / len(answers),
        "mib": sum(series[-1].bytes for series in by_series(answers)) / 2**20,
    }


def report(rows: Sequence[Row]) -> str:
    """A table for each workload; halves: tokens not run in the first and the second half of the requests; tiers: shares of tokens."""
    percents = {"FLOPs saved": "saved", "1st half": "reused_first_half", "2nd half": "reused_second_half"}
    percents |= {"recall": "recall", **{tier: f"share_{tier}" for tier in (*TIERS, "partial")}}
    columns = {"quantized": "{quantization}", "of the bytes": "{cap:g}", **{name: f"{{{column}:.1%}}" for name, column in percents.items()}}
    columns |= {"KL mean": "{kl_mean:.2g}", "max": "{kl_max:.2g}", "MiB": "{mib:.1f}", "CPU ms": "{cpu_ms:.0f}"}
    tables = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        group = rows_where(rows, workload=workload)
        head = f"{workload}: {group[0]['requests']} requests, {group[0]['prefix_share']:.1%} in shared prefixes"
        tables.append(show(group, {head: "{side}", **columns}))
    return "\n\n".join(tables)


def bars(answers: Answers, bound: float) -> Iterator[str]:
    """One line for each thing that the cache is asked to reach; `bound` is what the policy was calibrated for."""
    yield "Bars"
    worst = max(answer.difference for (_, side), group in answers.items() if side == PREFIX for answer in group)
    yield bar(f"exact: logits within {SAME_LOGITS:g} of a full prefill", worst <= SAME_LOGITS, f"{worst:.2g}")
    prefixes = [answer for (_, side), group in answers.items() if side.mode == "exact" and side.cap is None for answer in group]
    short = sum(answer.reused < answer.prefix and answer.prefix >= answer.tokens // LEAST for answer in prefixes)
    yield bar(
        f"exact: never fewer tokens reused than in the longest shared prefix of 1/{LEAST} of the prompt",
        not short,
        f"{short} of {len(prefixes)} fewer",
    )
    saved = mean([answer.saved for answer in answers["agents", AUTO]])
    yield bar(f"auto saves {SAVED:.0%} of the prefill's operations on agents", saved >= SAVED, f"{saved:.1%}")
    for workload in ("agents", "hanging", "adversarial"):
        group = answers[workload, AUTO]
        kl = fmean(kl for answer in group for kl in answer.kls)
        yield bar(f"auto, {workload}: mean KL of at most {KL}", kl <= KL, f"{kl:.2g}")
        lost = sum(answer.right_alone - answer.right for answer in group) / sum(answer.asked for answer in group)
        yield bar(f"auto, {workload}: recall within {100 * RECALL:.0f} points of no reuse", lost <= RECALL, f"{-100 * lost:+.2f}")
    for (workload, side), group in answers.items():
        if workload == "agents" and side.cap is not None:
            first, second = hit_rates(group)
            claim = f"{side}: second half of the requests reuses no less than the first"
            yield bar(claim, second >= first, f"{first:.1%}, then {second:.1%}")
    drifting = answers["adversarial", AUTO]
    kl = touched_kl(drifting)
    yield bar(f"auto, adversarial: mean KL of accepted spans under the policy's {bound:g}", kl <= bound, f"{kl:.2g}")
    yield _falling(drifting)


def _falling(answers: Sequence[Answer]) -> str:
    """Whether less of the page that comes in each prompt is accepted where more has drifted. The first prompt of a series stored it."""
    later = [answer for answer in answers if answer.number and answer.page is not None]
    correlation = spearman(torch.tensor([answer.drift for answer in later]), torch.tensor([answer.page for answer in later]))
    first, last = (mean([a.page or 0.0 for a in later if low <= a.drift <= high]) for low, high in ((0, 1 / 3), (2 / 3, 1)))
    scored = [(answer.drift, answer.score) for answer in later if answer.score is not None]
    scores = spearman(*torch.tensor(scored).T) if len(scored) > 1 else float("nan")
    numbers = f"{first:.1%} in the first third, {last:.1%} in the last; rank correlation {correlation:.2f}, of scores {scores:.2f}"
    return bar("auto, adversarial: less of the page is accepted as drift grows", correlation < 0 and last < first, numbers)


def drift_rows(answers: Answers) -> list[Row]:
    """A row for each adversarial request of auto."""
    return [
        {name: fmean(answer.kls) if name == "kl" else getattr(answer, name) for name in DRIFT} for answer in answers["adversarial", AUTO]
    ]


def write_files(folder: Path, rows: Sequence[Row], answers: Answers, fixed: dict[str, Any]) -> None:
    """`segments-quality.csv`, and `segments-drift.csv` with each adversarial request of auto."""
    write_csv(folder / "segments-quality.csv", rows, fixed)
    write_csv(folder / "segments-drift.csv", drift_rows(answers))


def write_plot(folder: Path, rows: Sequence[Row], answers: Answers) -> None:
    """`segments-quality.png`."""
    draw(folder / "segments-quality.png", "SegmentReuseCache", panels(rows, drift_rows(answers)))


def panels(rows: Sequence[Row], drifts: Sequence[Row]) -> list[Panel]:
    """Savings and recall by workload, savings by what a store keeps, and what drift does to a page and its score."""
    plain = [row for row in rows if row.get("quantization") in (None, "", "none") and not row.get("cap")]
    stores = [
        row | {"kept": f"{row['quantization']}{', cap 0.5' if row.get('cap') else ''}"}
        for row in rows
        if row["workload"] == "agents" and row["side"] in [side.name for side in (PREFIX, AUTO, BLIND)]
    ]
    return [
        Panel("operations of the prefill saved", plain, "{side}", "{workload}", "saved"),
        Panel("recall", plain, "{side}", "{workload}", "recall"),
        Panel("agents: operations saved, by how a store rounds", stores, "{side}", "{kept}", "saved"),
        Panel("a page behind a text that drifts away, means of tenths", _by_tenths(drifts), "{what}", "drift", "value", unit="mean"),
    ]


def _by_tenths(drifts: Sequence[Row]) -> list[Row]:
    """Means of what becomes of a page, by tenths of the drift; the first prompt of a series stored it."""
    names = {"page": "share of the page that is accepted", "score": "score of its probe"}
    values: dict[tuple[str, float], list[float]] = {}
    for row in drifts:
        for name, text in names.items():
            if row["number"] and row.get(name) is not None:
                values.setdefault((text, min(9, int(row["drift"] * 10)) / 10 + 0.05), []).append(row[name])
    return [{"what": text, "drift": drift, "value": mean(found)} for (text, drift), found in values.items()]
