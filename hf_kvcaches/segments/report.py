"""The report of a `SegmentReuseCache`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.reuse.costs import Costs
from hf_kvcaches.reuse.plan import PromptRow


class ReusedSpan(NamedTuple):
    """Consecutive tokens of a prompt of one tier, which is the name of the rule that admitted them.

    Args:
        start: The first token's index in its row, padding not counted.
        repaired: How many stored tokens were recomputed.
        depth: The layers below it recomputed them; None: all layers.
        segments: The stored segments' ids, for `SegmentStore.pin` and `delete`.
        reason: Why stored tokens were computed, as sentences; "" if none are stored, or all are reused.
    """

    row: int
    start: int
    stop: int
    tier: str
    repaired: int
    depth: int | None
    segments: tuple[str, ...]
    reason: str = ""

    def __repr__(self) -> str:
        """Shorten ids to 8 digits, and leave out what is as in most spans; `segments` has whole ids."""
        ids = ", ".join(f"{key[:8]}…" for key in self.segments[:3]) + (f", {len(self.segments) - 3} more" if len(self.segments) > 3 else "")
        shown = {"row": self.row, "start": self.start, "stop": self.stop, "tier": repr(self.tier), "repaired": self.repaired or None}
        shown |= {"depth": self.depth, "segments": f"[{ids}]" if ids else None, "reason": repr(self.reason) if self.reason else None}
        return f"ReusedSpan({', '.join(f'{name}={value}' for name, value in shown.items() if value is not None)})"


@dataclass(frozen=True)
class SegmentReport(CacheReport):
    """What a `SegmentReuseCache` holds, and how its prompts were filled in.

    Args:
        reused_tokens: Tokens of prompts that were not computed, in all rows.
        repaired_tokens: Stored tokens that were recomputed in their new context.
        computed_tokens: All other tokens.
        tiers: Tokens by tier.
        flops_saved: Operations that were saved, as a share of those of a prefill without reuse, in the decoder layers.
        saved_seconds: The time that these operations would have taken at the fastest pace of this process, less that of finding and
            loading what was reused; below 0 where reuse took longer. None until this process has computed a prompt of 64 tokens or more.
        spans: The spans of all prompts, in order.
        reason: Why the last prompt was neither looked up nor stored, as a sentence; "" where it was.
    """

    reused_tokens: int = 0
    repaired_tokens: int = 0
    computed_tokens: int = 0
    tiers: dict[str, int] | None = None
    flops_saved: float = 0.0
    saved_seconds: float | None = None
    spans: tuple[ReusedSpan, ...] = ()
    reason: str = ""


def report_of(plans: Sequence[PromptRow], costs: Costs, **fields: Any) -> SegmentReport:
    """Report executed plans; `fields` are the other fields of the report."""
    spans = tuple(
        ReusedSpan(
            *(row.number, span.start, span.stop, span.rule, len(span.repaired), span.repair_depth),
            tuple(piece.record.key for piece in span.sources),
            span.reason,
        )
        for row in plans
        for span in row.spans
    )
    tiers: Counter[str] = Counter()
    for span in spans:
        tiers[span.tier] += span.stop - span.start
    full_cost = sum(costs.of_prompt(row.begin, len(row.ids)) for row in plans)
    return SegmentReport(
        **fields,
        reused_tokens=sum(row.reused for row in plans),
        repaired_tokens=sum(span.repaired for span in spans),
        computed_tokens=sum(span.stop - span.start for span in spans if not span.segments),
        tiers=dict(tiers),
        flops_saved=sum(map(costs.saved, plans)) / full_cost if full_cost else 0.0,
        spans=spans,
    )
