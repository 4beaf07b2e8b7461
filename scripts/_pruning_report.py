"""The table and the picture of `eval_pruning.py`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from shared.plot import Panel
from shared.results import Row, rows_where

COLUMNS = "task cache peer ratio budget samples needles of_needles facts of_facts loss bytes seconds".split()
SHOWN = {
    "cache": "{cache}",
    "ratio": "{ratio:g}",
    "budget": "{budget}",
    "needles": "{needle_share:.0%} of {of_needles}",
    "facts": "{fact_share:.0%} of {of_facts}",
    "loss": "{loss:+.3f}",
    "MiB": "{mib:.1f}",
    "seconds": "{seconds:.2f}",
}
PICTURE = "pruned contexts, by the share of their tokens that is kept"
# Of the picture: what compares heads or has measured their budgets, and what does not.
BETWEEN_HEADS = ("future", "future, refit", "kvzip", "kvzip, refit", "probe, refit", "compactor, HeadBudgets", "snapkv", "kvpress kvzip")


def mean(values: Sequence[float]) -> float:
    """The mean; not a number for nothing."""
    return fmean(values) if values else float("nan")


def answers_of(pair: tuple[Row, Row]) -> list[bool | None]:
    """Which answers are right; None where the full cache's is not."""
    row, full = pair
    return [right if possible else None for right, possible in zip(row["right"], full["right"], strict=True)]


def counted(what: str, answers: Sequence[bool | None]) -> Row:
    """Right answers of those that the full cache gets right."""
    known = [answer for answer in answers if answer is not None]
    return {f"{what}s": sum(known), f"of_{what}s": len(known), f"{what}_share": mean(known)}


def loss(pairs: Sequence[tuple[Row, Row]]) -> float:
    """What the continuation loses beyond the full cache, in nats a token."""
    return mean([row["continuation"] - full["continuation"] for row, full in pairs])


def costs(pairs: Sequence[tuple[Row, Row]]) -> Row:
    """Mean bytes and seconds, where they were measured."""
    size, seconds = (mean([row[name] for row, _ in pairs if name in row]) for name in ("bytes", "seconds"))
    return {"bytes": size, "mib": size / 2**20, "seconds": seconds}


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Needles, facts and loss of each model by the share that is kept."""
    made = []
    for model in dict.fromkeys(row["model"] for row in rows):
        kept = rows_where(rows, model=model, task="prompt")
        kept = [row | {f"{what}_share": row[f"{what}s"] / (row[f"of_{what}s"] or 1) for what in ("needle", "fact")} for row in kept]
        for chosen, heads in ((True, "budgets between heads"), (False, "other")):
            group = [row for row in kept if (row["cache"] in BETWEEN_HEADS) == chosen]
            for column, what in (("needle_share", "needles"), ("fact_share", "facts"), ("loss", "nats lost by the continuation")):
                made.append(Panel(f"{model}: {what}, {heads}", group, "{cache}", "ratio", column, "x", along="share of the tokens"))
    return made
