"""What `eval_warmstart.py` finds out: answers, tables, files, pictures and bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from _common import table, write_table
from _warmstart_sides import ALIGN, AUTO, COLD, GATED, MISMATCH, MOST, PROJECTED, SIZES, SLOTS, TAIL_ONLY, Side

from hf_kvcaches.core.calibrating import divergence
from hf_kvcaches.errors import require
from hf_kvcaches.warmstart.calibration import FALSE
from tests.testbed.pairs import Pair

# What is answered from something that is no beginning of the prompt, or from the same prompt.
HITS = ("exact", "align", "slots")
# Of these, what a prompt that has nothing to do with the other must never be served by.
APPROXIMATE = ("align", "slots")
# Bars.
CONTROL, KL, WITHIN, FORWARDED, SUMMARY_KL, SAME_LOGITS = 0.5, 0.01, 0.95, 0.35, 0.05, 1e-3
PAPER_COSINE, PAPER_LOSS = 0.9, 0.01
SLIGHT = ("identical", "no_content")


@dataclass(frozen=True)
class Answer:
    """What became of one prompt."""

    kind: str  # of the pair
    asks: str
    served: str  # "exact", "align", "slots", "prefix" or "cold"; the controls are "control"
    refused: str  # why nothing better was done, or ""
    cosine: float  # of source and target
    tokens: int  # of the prompt
    forwarded: int  # of these, those that were run
    kls: tuple[float, ...] = ()  # at each place of the continuation, in nats; nothing where only the admission was looked at
    right: tuple[bool, ...] = ()  # which answers are right
    right_cold: tuple[bool, ...] = ()  # which are without a warm start
    # for each question, whether the answer is the source's and wrong; None where the source tells nothing else
    stale: tuple[bool | None, ...] = ()
    stale_cold: tuple[bool | None, ...] = ()  # the same of the answers without a warm start: there it is the model's own mistake

    @property
    def hit(self) -> bool:
        return self.served in HITS


Found = Mapping[Side, Sequence[Answer]]


@dataclass(frozen=True)
class Extra:
    """What is measured on other pairs than the tables."""

    risky: Sequence[Answer]  # of `AUTO`, where the true answer is another than the source's
    unrelated: Mapping[Side, Sequence[Answer]]  # of `AUTO`, `ALIGN` and `GATED`, only what served them
    swapped: Sequence[float]  # largest differences of logits behind the swap from the cold ones


def judged(pair: Pair, cold: torch.Tensor, found: torch.Tensor) -> dict[str, Any]:
    """The fields of an answer that come of logits."""
    guesses, alone = (logits.argmax(-1).tolist() for logits in (found, cold))
    return {
        "kls": tuple(divergence(cold, found).tolist()),
        "right": tuple(pair.target.right(guesses)),
        "right_cold": tuple(pair.target.right(alone)),
        "stale": tuple(_stale(pair, number, guesses) for number in range(len(pair.stale))),
        "stale_cold": tuple(_stale(pair, number, alone) for number in range(len(pair.stale))),
    }


def _stale(pair: Pair, number: int, guesses: Sequence[int]) -> bool | None:
    """By the first token in which the two answers differ: what was fed in before it is part of both."""
    start, stop = pair.target.answers[number]
    answer, stale = pair.target.continuation[start:stop], pair.stale[number]
    if stale is None or stale == answer:
        return None
    place = next((place for place, (a, b) in enumerate(zip(answer, stale, strict=False)) if a != b), None)
    return None if place is None else guesses[start + place] == stale[place]


def mean(values: Sequence[float]) -> float:
    """Not a number for nothing."""
    return fmean(values) if values else float("nan")


def summary(kind: str, side: Side, answers: Sequence[Answer]) -> dict[str, Any]:
    """One row of the table and of the file; divergences are those of what was admitted."""
    hits = [each for each in answers if each.hit or side.control]
    first = [each.kls[0] for each in hits]
    stale = [flag for each in answers for flag in each.stale if flag is not None]
    asked = [flag for each in answers for flag in each.right]
    served = Counter(each.served for each in answers)
    return {
        "kind": kind,
        "side": side.name,
        "pairs": len(answers),
        "admitted": mean([each.hit for each in answers]),
        "served": " ".join(f"{name} {count}" for name, count in served.most_common()),
        "forwarded": mean([each.forwarded / each.tokens for each in answers]),
        "forwarded_admitted": mean([each.forwarded / each.tokens for each in hits]),
        "kl_first": mean(first),
        "kl_first_same": mean([each.kls[0] for each in hits if each.asks == "same"]),
        "kl_first_other": mean([each.kls[0] for each in hits if each.asks == "other"]),
        "kl_first_max": max(first, default=float("nan")),
        "kl_following": mean([kl for each in hits for kl in each.kls[1:]]),
        "within": mean([kl <= FALSE for kl in first]),
        "kl_first_all": mean([each.kls[0] for each in answers]),
        "right_first": mean([each.right[0] for each in answers]),
        "right_first_cold": mean([each.right_cold[0] for each in answers]),
        "right": mean(asked),
        "right_cold": mean([flag for each in answers for flag in each.right_cold]),
        "stale": sum(stale),
        "could_be_stale": len(stale),
    }


_HEADER = ("admitted", "served", "forwarded", "KL, same", "KL, other", "following", "within", "right", "all right", "stale")


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each kind; KL: of the first token, where the source ends with the same question and where with another."""
    tables = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        lines = []
        for row in own:
            shares = [f"{100 * row[name]:.0f}%" for name in ("within", "right_first", "right")]
            kls = [f"{row[name]:.2g}" for name in ("kl_first_same", "kl_first_other", "kl_following")]
            stale = f"{row['stale']} of {row['could_be_stale']}" if row["could_be_stale"] else "-"
            lines.append([row["side"], f"{100 * row['admitted']:.0f}%", row["served"], f"{row['forwarded']:.2f} T", *kls, *shares, stale])
        tables.append(table([f"{kind}: {own[0]['pairs']} pairs", *_HEADER], lines))
    return "\n\n".join(tables)


def _bar(claim: str, met: bool, numbers: str) -> str:
    return f"  {claim}: {'met' if met else 'NOT met'} ({numbers})"


def controls(found: Found) -> list[str]:
    """Whether the pairs prove anything: without the right source the next token should be another."""
    means = {side: mean([each.kls[0] for each in found[side]]) for side in (TAIL_ONLY, MISMATCH)}
    lines = ["Controls"]
    lines += [_bar(f"{side}: mean KL above {CONTROL}", value > CONTROL, f"{value:.3g}") for side, value in means.items()]
    if not all(value > CONTROL for value in means.values()):
        lines.append("  The pairs prove nothing: what is asked for can be told without the source.")
    return lines


def bars(found: Found, extra: Extra) -> list[str]:
    """One line for each thing that the cache is asked to reach."""
    hits = [each for each in found[AUTO] if each.hit]
    first, following = [each.kls[0] for each in hits], [kl for each in hits for kl in each.kls[1:]]
    within = mean([kl <= FALSE for kl in first])
    lines = ["Bars"]
    numbers = f"{mean(first):.2g} in {len(hits)} of {len(found[AUTO])}, {mean(following):.2g} in what follows"
    lines.append(_bar(f"auto, admitted: mean KL of at most {KL}", mean(first) <= KL, numbers))
    lines.append(_bar(f"auto, admitted: {WITHIN:.0%} within {FALSE}", within >= WITHIN, f"{within:.1%}"))
    share = mean([each.forwarded / each.tokens for each in hits])
    lines.append(_bar(f"auto, admitted: at most {FORWARDED} of the tokens are run", share <= FORWARDED, f"{share:.3f}"))
    risky = [each for each in extra.risky if each.stale[0] is not None]
    stale, served = [each for each in risky if each.stale[0]], sum(each.hit for each in risky)
    own = sum(bool(each.stale_cold[0]) for each in stale)
    right, cold = sum(each.right[0] for each in risky), sum(each.right_cold[0] for each in risky)
    numbers = f"{len(stale)} of {len(risky)}, {own} of which the model gives cold, too; {served} admitted; right {right}, cold {cold}"
    lines.append(_bar("auto: no stale answers where a fact, a digit or a negation changed", not stale and len(risky) > 0, numbers))
    for side, answers in extra.unrelated.items():
        false = sum(each.served in APPROXIMATE for each in answers)
        lines.append(_bar(f"{side}: no false hits on unrelated pairs", false == 0 and len(answers) > 0, f"{false} of {len(answers)}"))
    if extra.swapped:
        worst = max(extra.swapped)
        numbers = f"{worst:.2g} in {len(extra.swapped)} prompts"
        lines.append(_bar(f"after the swap: logits within {SAME_LOGITS:g} of cold ones", worst <= SAME_LOGITS, numbers))
    else:
        lines.append("  after the swap: nothing was swapped")
    return [*lines, *_summary_bars(found)]


def _slight(answers: Sequence[Answer]) -> list[Answer]:
    """Of pairs that end alike and differ in no word of content."""
    return [each for each in answers if each.kind in SLIGHT and each.asks == "same"]


def _summary_bars(found: Found) -> list[str]:
    value = mean([each.kls[0] for each in _slight(found[SLOTS["salient", MOST]])])
    claim = f"slots salient, m={MOST}, same tail, no content changed: mean KL of at most {SUMMARY_KL}"
    lines = [_bar(claim, value <= SUMMARY_KL, f"{value:.2g}")]
    rows = []
    for m in SIZES:
        cells = []
        for rule in ("salient", "paper"):
            own = found[SLOTS[rule, m]]
            cells += [f"{mean([each.kls[0] for each in answers]):.2g}" for answers in (_slight(own), own)]
        rows.append([str(m), *cells])
    header = ["KL of the first token, m", "salient, slight changes", "salient, all", "paper, slight changes", "paper, all"]
    return [*lines, "", table(header, rows)]


def paper_criteria(found: Found) -> str:
    """The paper's pre-registered criteria, for each kind and way to ask."""
    sides = [AUTO, ALIGN, GATED, SLOTS["salient", MOST], SLOTS["paper", MOST], *PROJECTED.values()]
    rows = []
    for kind, asks in dict.fromkeys((each.kind, each.asks) for each in found[COLD]):
        cells = []
        for side in sides:
            own = [each for each in found[side] if (each.kind, each.asks) == (kind, asks) and each.cosine > PAPER_COSINE and each.hit]
            kl, lost = mean([each.kls[0] for each in own]), mean([each.right_cold[0] - each.right[0] for each in own])
            met = "met" if kl <= FALSE and lost <= PAPER_LOSS else "failed"
            cells.append(f"{kl:.2g}, {100 * lost:+.0f}%: {met}" if own else "no pairs")
        rows.append([f"{kind}, {asks} question", *cells])
    head = (
        f"The paper's criteria, of admitted pairs with a cosine above {PAPER_COSINE}: KL of at most {FALSE}, and right answers lost to the "
        f"question that was asked of at most {PAPER_LOSS:.0%}"
    )
    return f"{head}\n{table(['', *map(str, sides)], rows)}"


def write_csv(folder: Path, rows: Sequence[dict[str, Any]], found: Found, fixed: dict[str, Any]) -> None:
    """`warmstart-quality.csv`, and `warmstart-pairs.csv` with a line for each pair and side."""
    lines = [
        {
            "side": side.name,
            **{name: getattr(each, name) for name in ("kind", "asks", "served", "refused", "cosine", "tokens", "forwarded")},
            "kl_first": each.kls[0],
            "kl_following": mean(each.kls[1:]),
            "right_first": each.right[0],
            "stale_first": each.stale[0],
        }
        for side, answers in found.items()
        for each in answers
    ]
    write_table(folder / "warmstart-quality.csv", rows[0], rows, fixed)
    write_table(folder / "warmstart-pairs.csv", lines[0], lines)


def write_plot(folder: Path, rows: Sequence[dict[str, Any]], found: Found) -> None:
    """`warmstart-quality.png`: divergence by kind, tokens run by kind, and divergence by the number of slots."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    figure, (left, middle, right) = plots.subplots(1, 3, figsize=(20, 6), layout="constrained")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    known = {(row["kind"], row["side"]): row for row in rows}
    sides = [side for side in found if side not in (COLD, *SLOTS.values())] + [SLOTS["salient", MOST], SLOTS["paper", MOST]]
    for number, side in enumerate(sides):
        values = [max(known[kind, side.name]["kl_first_all"], 1e-7) for kind in kinds]
        left.plot(kinds, values, marker="osv^D"[number % 5], linestyle="none", label=str(side))
    left.axhline(FALSE, linestyle=":", color="grey")
    left.set(title="KL of the first token, all pairs", ylabel="nats", yscale="log")
    left.legend(fontsize=7)
    for number, side in enumerate((AUTO, ALIGN, GATED)):
        heights = [100 * known[kind, side.name]["forwarded"] for kind in kinds]
        middle.bar([place + (number - 1) * 0.27 for place in range(len(kinds))], heights, 0.25, label=str(side))
    middle.set(title="tokens run", ylabel="% of the prompt", xticks=range(len(kinds)), xticklabels=kinds)
    middle.legend()
    for axes in (left, middle):
        axes.tick_params(axis="x", rotation=45)
    for rule in ("salient", "paper"):
        values = [max(mean([each.kls[0] for each in _slight(found[SLOTS[rule, m]])]), 1e-7) for m in SIZES]
        right.plot(SIZES, values, marker="o", label=rule)
    right.axhline(SUMMARY_KL, linestyle=":", color="grey")
    right.set(title="KL of the first token, no content changed", xlabel="slots", yscale="log")
    right.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "warmstart-quality.png", dpi=110)
    plots.close(figure)
