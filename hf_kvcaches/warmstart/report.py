"""The report of a `WarmStartCache`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_kvcaches.core.report import CacheReport

Served = Literal["exact", "align", "prefix", "cold"]


@dataclass(frozen=True)
class Choice:
    """How a row was served.

    Args:
        served: See `WarmStartReport.strategy`.
        neighbour: The id of the entry that most tokens are from, or None.
        similarity: The cosine of that entry; None where it was looked up by its tokens.
        reused: Tokens that were not computed.
        refused: Why nothing more was reused, as a sentence, or "".
    """

    served: Served
    neighbour: str | None
    similarity: float | None
    reused: int
    refused: str


@dataclass(frozen=True)
class WarmStartReport(CacheReport):
    """What a `WarmStartCache` holds, and how its prompt was served.

    Args:
        strategy: What served the prompt: "exact" (the same prompt), "align" (spans of similar ones), "prefix" (a common prefix) or "cold";
            "mixed" if rows of a batch were served differently, "" before a prompt.
        neighbour: The id of the entry that served it; None if there is none, or if rows have several.
        similarity: The cosine of that entry; None if it was looked up by its tokens.
        reused_tokens: Tokens of the prompt that were not computed, in all rows.
        computed_tokens: Tokens of the prompt that were computed.
        refused: Why no better strategy served the prompt, or "".
        reason: Why the prompt was not looked up at all, as a sentence; "" if it was.
        strategies: `strategy` of each row.
        neighbours: `neighbour` of each row.
        similarities: `similarity` of each row.
        refusals: `refused` of each row.
    """

    strategy: str = ""
    neighbour: str | None = None
    similarity: float | None = None
    reused_tokens: int = 0
    computed_tokens: int = 0
    refused: str = ""
    reason: str = ""
    strategies: tuple[Served, ...] = ()
    neighbours: tuple[str | None, ...] = ()
    similarities: tuple[float | None, ...] = ()
    refusals: tuple[str, ...] = ()


def report_of(choices: Sequence[Choice], tokens: int, **fields: Any) -> WarmStartReport:
    """Report how the rows of a prompt of so many tokens were served; `fields` are the other fields of the report."""
    reused = sum(choice.reused for choice in choices)
    names = {"strategies": "served", "neighbours": "neighbour", "similarities": "similarity", "refusals": "refused"}
    rows: dict[str, Any] = {name: tuple(getattr(choice, each) for choice in choices) for name, each in names.items()}
    return WarmStartReport(
        **fields,
        **rows,
        strategy=_common(rows["strategies"], "mixed") if choices else "",
        neighbour=_common(rows["neighbours"], None),
        similarity=_common(rows["similarities"], None),
        reused_tokens=reused,
        computed_tokens=tokens - reused,
        refused=_common(rows["refusals"], ""),
    )


def _common(values: Sequence[Any], default: Any) -> Any:
    """Return the value that all rows share, else a default."""
    return values[0] if len(set(values)) == 1 else default
