"""Look up near-identical segments: stored segments in which a date, an id or a word differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_kvcaches.reuse.alignment import align
from hf_kvcaches.reuse.tokens import Ids
from hf_kvcaches.segments.discovery import Discovery
from hf_kvcaches.segments.index import Run, SegmentIndex, StoredSpan
from hf_kvcaches.segments.signatures import signature_of

# How many similar segments are compared token by token.
COMPARED = 3


class NearIdentical:
    """Looks up near-identical segments between verbatim runs.

    Args:
        index: An index with signatures.
        caller_spans: The caller's segments of the row.
    """

    def __init__(self, index: SegmentIndex, discovery: Discovery, caller_spans: Sequence[tuple[int, int]] = ()) -> None:
        self.index, self.discovery, self.caller_spans = index, discovery, caller_spans

    def runs(self, ids: Ids, gaps: Sequence[tuple[int, int]], shortest: int) -> list[Run]:
        """Return the runs in some gaps that similar segments have, in order and without overlaps.

        Args:
            gaps: The spans to search, as (start, stop).
            shortest: The least number of tokens of a gap and of a run.
        """
        wide = ids.astype(np.int64)
        runs: list[Run] = []
        for start, stop in self.discovery.spans(wide, [span for span in self.caller_spans if span[1] <= len(ids)]):
            inside = [(max(start, first), min(stop, last)) for first, last in gaps]
            inside = [gap for gap in inside if gap[1] - gap[0] >= shortest]
            if inside:
                # The signature is that of the whole segment, as for stored segments.
                near = self.index.near(signature_of(self.discovery.text(wide[start:stop])))[:COMPARED]
                for gap in inside:
                    candidates = [self._aligned(ids, *gap, key, shortest) for key in near]
                    runs += max(candidates, key=lambda candidate: sum(map(len, candidate)), default=[])
        return sorted(runs, key=lambda run: run.start)

    def _aligned(self, ids: Ids, start: int, stop: int, key: str, shortest: int) -> list[Run]:
        """Return the runs that a gap shares with a segment, token by token."""
        record = self.index.records[key]
        blocks = align(record.ids, ids[start:stop], shortest)
        return [Run((StoredSpan(start + block.target, start + block.target + block.length, record, block.source),)) for block in blocks]
