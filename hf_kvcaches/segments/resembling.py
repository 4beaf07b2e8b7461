"""Near-identical segments: what a prompt shares with a stored segment in which a date, an id or a word differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hf_kvcaches.core.splicing.alignment import align
from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.segments.index import Run, StoredSpan
from hf_kvcaches.segments.records import Record, Signature
from hf_kvcaches.segments.scope import Reader

# Candidates that are compared token by token.
COMPARED = 3


class Resembling:
    """Looks for what verbatim search has not found.

    Args:
        near: Gives the stored segments whose signatures resemble one.
    """

    def __init__(self, near: Callable[[Signature], list[Record]], reader: Reader, given: Sequence[tuple[int, int]] = ()) -> None:
        self.near, self.reader, self.given = near, reader, given

    def runs(self, ids: Ids, gaps: Sequence[tuple[int, int]], shortest: int) -> list[Run]:
        """Stretches of the gaps that stand in similar segments, in order and without overlaps.

        Args:
            gaps: Where to look, as (start, stop).
            shortest: Gaps and stretches with fewer tokens are not worth it.
        """
        long_gaps = [gap for gap in gaps if gap[1] - gap[0] >= shortest]
        if not long_gaps:
            return []
        wide = ids.astype(np.int64)
        given = [span for span in self.given if span[1] <= len(ids)]
        # What of a gap lies in a span, and the span.
        spans = [
            (max(span[0], start), min(span[1], stop), *span)
            for span in self.reader.discovery.spans(wide, given)
            for start, stop in long_gaps
            if min(span[1], stop) - max(span[0], start) >= shortest
        ]
        # The signature is that of the whole span, as it was when the like of it was stored.
        signatures = self.reader.signer.of(wide, [span[2:] for span in spans])
        surroundings = self.reader.signer.left_of(wide, [span[2] for span in spans])
        runs: list[Run] = []
        for (start, stop, _, _), signature, around in zip(spans, signatures, surroundings, strict=True):
            runs += self._aligned(ids, start, stop, self._closest(signature, around), shortest)
        return sorted(runs, key=lambda run: run.start)

    def _closest(self, signature: Signature, around: Signature) -> list[Record]:
        """Stored segments, the most similar first; where two are alike, the one in similar surroundings."""
        near = [record for record in self.near(signature) if record.fresh and record.signature is not None]

        # The share of numbers in which signatures agree is about the Jaccard similarity of their sets.
        def likeness(record: Record) -> tuple[float, float]:
            beside = 0.0 if record.surroundings is None else float(np.mean(around == record.surroundings))
            assert record.signature is not None
            return float(np.mean(signature == record.signature)), beside

        return sorted(near, key=likeness, reverse=True)[:COMPARED]

    def _aligned(self, ids: Ids, start: int, stop: int, records: Sequence[Record], shortest: int) -> list[Run]:
        """What a stretch shares with the segment that shares most with it, token by token."""
        best: list[Run] = []
        for record in records:
            blocks = align(record.ids, ids[start:stop], shortest)
            runs = [Run((StoredSpan(start + block.target, start + block.target + block.length, record, block.source),)) for block in blocks]
            if sum(map(len, runs)) > sum(map(len, best)):
                best = runs
        return best
