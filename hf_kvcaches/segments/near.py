"""Near-identical segments: what a prompt shares with a stored segment in which a date, an id or a word differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_kvcaches.core.splicing.alignment import align
from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.segments.discovery import Discovery
from hf_kvcaches.segments.index import Run, SegmentIndex, StoredSpan
from hf_kvcaches.segments.signatures import signature_of

# Candidates that are compared token by token.
COMPARED = 3


class NearIdentical:
    """Looks for what verbatim search has not found.

    Args:
        index: With signatures.
        given: The caller's segments of the row.
    """

    def __init__(self, index: SegmentIndex, discovery: Discovery, given: Sequence[tuple[int, int]] = ()) -> None:
        self.index, self.discovery, self.given = index, discovery, given

    def runs(self, ids: Ids, gaps: Sequence[tuple[int, int]], shortest: int) -> list[Run]:
        """Spans of the gaps that are in similar segments, in order and without overlaps.

        Args:
            gaps: Where to look, as (start, stop).
            shortest: Gaps and spans with fewer tokens are not worth it.
        """
        wide = ids.astype(np.int64)
        runs: list[Run] = []
        for start, stop in self.discovery.spans(wide, [span for span in self.given if span[1] <= len(ids)]):
            inside = [(max(start, first), min(stop, last)) for first, last in gaps]
            inside = [gap for gap in inside if gap[1] - gap[0] >= shortest]
            if inside:
                # The signature is that of the whole segment, as it was when the like of it was stored.
                near = self.index.near(signature_of(self.discovery.text(wide[start:stop])))[:COMPARED]
                for gap in inside:
                    candidates = [self._aligned(ids, *gap, key, shortest) for key in near]
                    runs += max(candidates, key=lambda found: sum(map(len, found)), default=[])
        return sorted(runs, key=lambda run: run.start)

    def _aligned(self, ids: Ids, start: int, stop: int, key: str, shortest: int) -> list[Run]:
        """What a gap shares with a segment, token by token."""
        record = self.index.records[key]
        blocks = align(record.ids, ids[start:stop], shortest)
        return [Run((StoredSpan(start + block.target, start + block.target + block.length, record, block.source),)) for block in blocks]
