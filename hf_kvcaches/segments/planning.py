"""From what a store has of a row's tokens to the row's plan.

What an earlier prompt had from its first token on is the row's prefix, and is reused as it came about. Other consecutive tokens that an
earlier prompt had behind another text are candidates, which tiers admit or reject.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_kvcaches.core.splicing.plan import Indices, PlannedRow, PlannedSpan, PromptRow, joined
from hf_kvcaches.segments.index import SegmentIndex
from hf_kvcaches.segments.near import NearIdentical
from hf_kvcaches.segments.records import Chain
from hf_kvcaches.segments.tiers import Candidate, SegmentTier, TierContext, admitted, stored_depth, stored_tokens

# A probe is so many consecutive tokens: the queries of the last ones, against the keys of those before.
SLICE, PROBES = 4, 1


def plan_row(
    row: PromptRow, index: SegmentIndex, tiers: Sequence[SegmentTier], context: TierContext, near: NearIdentical | None = None
) -> PlannedRow:
    """The plan for a row, in which some spans may still have to be settled.

    Args:
        tiers: None for the prefix alone, as far as it is exact.
        near: Looks for near-identical segments where nothing verbatim is found.
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
    """What lies before, between and behind runs."""
    edges = [start, *(edge for run in runs for edge in run), stop]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _affordable(spans: Sequence[PlannedSpan], tokens: int, context: TierContext) -> list[PlannedSpan]:
    """The spans with no more probes than the policy pays for: the longest ones are probed, and the others do without."""
    policy = context.policy
    probed = sorted((span for span in spans if span.check is not None and span.check.probe), key=len, reverse=True)
    if not probed:
        return list(spans)
    # Of the layer at which keys are compared only keys and queries are computed, less than half of it.
    allowed = int(policy.probing * tokens * context.layers / ((SLICE + PROBES) * (policy.check_layer + 0.5)))
    # A pass for probes takes longer than to compute a few tokens.
    allowed = 0 if sum(map(len, probed[:allowed])) < 4 * policy.shortest else allowed
    refused = {id(span) for span in probed[allowed:]}
    kept: list[PlannedSpan] = []
    for span in spans:
        kept += span.check.otherwise if span.check is not None and id(span) in refused else [span]
    return joined(kept)


def probed_indices(span: PlannedSpan) -> Indices:
    """The tokens that settle a span: all where some are to be chosen, else those behind what is recomputed."""
    if span.check is not None and span.check.choose:
        return np.arange(span.start, span.stop)
    start = int(span.recompute[-1]) + 1 if len(span.recompute) else span.start
    return np.arange(start, min(start + SLICE + PROBES, span.stop))
