"""The report of a `WarmStartCache`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.warmstart.planning import Served, ServedRow


@dataclass(frozen=True)
class WarmStartReport(CacheReport):
    """What a `WarmStartCache` holds, and how its prompt was served.

    Args:
        strategy: What served the prompt: "exact" (the same prompt), "align" (spans of a similar one), "slots" (its summary), "prefix"
            (a common prefix) or "cold"; "mixed" if rows of a batch were served differently, "" before a prompt.
        neighbour: The id of the entry that served it; None if there is none, or if rows have several.
        similarity: The cosine of that entry; None if it was looked up by its tokens.
        reused_tokens: Tokens of the prompt that were not computed, in all rows.
        computed_tokens: Tokens of the prompt that were computed.
        refused: Why no better strategy served the prompt, or "".
        reason: Why the prompt was not looked up at all, as a sentence; "" if it was.
        swapped: Whether the exact prefill has replaced what was reused.
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
    swapped: bool = False
    strategies: tuple[Served, ...] = ()
    neighbours: tuple[str | None, ...] = ()
    similarities: tuple[float | None, ...] = ()
    refusals: tuple[str, ...] = ()


def report_of(plans: Sequence[ServedRow], **fields: Any) -> WarmStartReport:
    """Report the executed plan of each row; `fields` are the other fields of the report."""
    choices = [row.outcome() for row in plans]
    reused = sum(choice.reused for choice in choices)
    strategies = tuple(choice.served for choice in choices)
    neighbours = tuple(choice.neighbour.key if choice.neighbour else None for choice in choices)
    similarities = tuple(choice.neighbour.similarity if choice.neighbour else None for choice in choices)
    refusals = tuple(choice.refused for choice in choices)
    return WarmStartReport(
        **fields,
        strategy=_common(strategies, "mixed") if choices else "",
        neighbour=_common(neighbours, None),
        similarity=_common(similarities, None),
        reused_tokens=reused,
        computed_tokens=sum(len(row.ids) for row in plans) - reused,
        refused=_common(refusals, ""),
        strategies=strategies,
        neighbours=neighbours,
        similarities=similarities,
        refusals=refusals,
    )


def _common(values: Sequence[Any], default: Any) -> Any:
    """Return the value that all rows share, else a default."""
    return values[0] if len(set(values)) == 1 else default
