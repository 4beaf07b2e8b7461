"""Plan a row: which of its tokens are reused from a store.

The longest beginning that earlier prompts share is the row's prefix, which is reused in the tier that it was stored with. Other spans,
which an earlier prompt had behind another text, are candidates, which tiers admit or reject.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_kvcaches.reuse.plan import Indices, PlannedRow, PlannedSpan, PromptRow, joined
from hf_kvcaches.segments.index import SegmentIndex
from hf_kvcaches.segments.near import NearIdentical
from hf_kvcaches.segments.records import Chain
from hf_kvcaches.segments.tiers import Candidate, SegmentTier, TierContext, admitted, stored_depth, stored_tokens

# A probe runs SLICE + PROBES consecutive tokens: it compares the scores of the last PROBES queries over the SLICE keys before.
SLICE, PROBES = 4, 1


def plan_row(
    row: PromptRow, index: SegmentIndex, tiers: Sequence[SegmentTier], context: TierContext, near: NearIdentical | None = None
) -> PlannedRow:
    """Plan a row; checks may still have to decide some of its spans.

    Args:
        tiers: Empty to reuse the exact prefix alone.
        near: Looks up near-identical segments between the verbatim ones.
    """
    ids, policy = row.ids[:-1], context.policy
    pieces, _ = index.prefix(ids, Chain().extend(ids[: row.begin]), row.begin, exact_only=not tiers)
    spans = [
        PlannedSpan(piece.start, piece.stop, piece.record.origin, stored_tokens([piece]), depth=stored_depth([piece], context.layers))
        for piece in pieces
    ]
    prefix = pieces[-1].stop if pieces else row.begin
    runs = index.runs(ids, prefix, policy.shortest) if tiers else []
    if near is not None and tiers:
        gaps = _gaps([(run.start, run.stop) for run in runs], prefix, len(ids))
        runs = sorted([*runs, *near.runs(ids, gaps, policy.aligned)], key=lambda run: run.start)
    end = prefix
    for run in runs:
        spans += [PlannedSpan(end, run.start), *admitted(Candidate(run, ids), tiers, context)]
        end = run.stop
    spans.append(PlannedSpan(end, len(ids)))
    return row.planned(_affordable(joined(spans), len(ids) - row.begin, context), prefix)


def _gaps(runs: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the spans before, between and behind runs."""
    edges = [start, *(edge for run in runs for edge in run), stop]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _affordable(spans: Sequence[PlannedSpan], tokens: int, context: TierContext) -> list[PlannedSpan]:
    """Return the spans with no more probes than the policy allows: the longest spans are probed, the others take their fallback."""
    policy = context.policy
    checked = [span for span in spans if span.check is not None and span.check.probe]
    if not checked:
        return list(spans)
    # Where nearly all tokens are recomputed, too few are left to compare.
    probed = sorted((span for span in checked if len(probed_indices(span)) >= SLICE + PROBES), key=len, reverse=True)
    # A probe computes only keys and queries of the layer where it compares them: less than half of that layer.
    allowed = int(policy.probing * tokens * context.layers / ((SLICE + PROBES) * (policy.check_layer + 0.5)))
    # A pass for probes takes longer than computing a few tokens.
    allowed = 0 if sum(map(len, probed[:allowed])) < 4 * policy.shortest else allowed
    unprobed = {id(span) for span in checked} - {id(span) for span in probed[:allowed]}
    kept: list[PlannedSpan] = []
    for span in spans:
        kept += span.check.otherwise if span.check is not None and id(span) in unprobed else [span]
    return joined(kept)


def probed_indices(span: PlannedSpan) -> Indices:
    """Return the tokens that a span's check runs: all if it chooses some of them, else those behind the recomputed ones."""
    if span.check is not None and span.check.choose:
        return np.arange(span.start, span.stop)
    start = int(span.recompute[-1]) + 1 if len(span.recompute) else span.start
    return np.arange(start, min(start + SLICE + PROBES, span.stop))
