"""Pictures of what pruning costs in quality, with few policies in a panel."""

from __future__ import annotations

from collections.abc import Sequence

from shared.plot import STYLES, Panel
from shared.results import Row, rows_where

FULL_CACHE = "full cache"


def quality_panels(rows: Sequence[Row]) -> list[Panel]:
    """Perplexity by the position in the text for each budget, perplexity behind a pruned prefix, and facts recalled."""
    texts, prefix, recalled = (rows_where(rows, task=task) for task in ("perplexity", "prefix", "recall"))
    full = [row | {"label": FULL_CACHE} for row in rows_where(texts, policy=FULL_CACHE)]
    panels = []
    for budget in dict.fromkeys(row["budget"] for row in texts if row.get("budget")):
        for group in _groups(rows_where(texts, budget=budget), len(STYLES) - 1):
            title = f"perplexity up to a position in the text, {budget} tokens kept"
            panels.append(Panel(title, [*full, *group], "{label}", "to", "perplexity", log="xy", along="position, tokens"))
    for group in _groups([row for row in prefix if row.get("budget")]):
        title = "perplexity behind a prefix, by the share of its tokens kept"
        panels.append(Panel(title, group, "{label}", "budget", "excess", unit="more than with all tokens, as a share", along="share kept"))
    for group in _groups([row for row in recalled if row.get("budget")]):
        title = "facts recalled, by the share of tokens kept"
        panels.append(Panel(title, group, "{label}", "budget", "share", unit="share of questions", along="share kept"))
    return panels


def _groups(rows: Sequence[Row], size: int = len(STYLES)) -> list[list[Row]]:
    """The rows of a few settings each, with a label: the policy, and what is not as usual."""
    labelled = [row | {"label": _label(row)} for row in rows]
    labels = list(dict.fromkeys(row["label"] for row in labelled))
    parts = [labels[start : start + size] for start in range(0, len(labels), size)]
    return [[row for row in labelled if row["label"] in part] for part in parts]


def _label(row: Row) -> str:
    others = [row.get(name) for name in ("positions", "storage", "codec", "head_budgets")]
    return " ".join([row["policy"], *(str(value) for value in others if value and value != "compact")])
