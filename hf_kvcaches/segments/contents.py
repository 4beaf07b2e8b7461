"""The contents of a segment store: an index for each scope, and the results of probes."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice

from hf_kvcaches.reuse import layout
from hf_kvcaches.segments.experience import Experience
from hf_kvcaches.segments.index import SegmentIndex
from hf_kvcaches.segments.records import Record
from hf_kvcaches.segments.signatures import PERMUTATIONS
from hf_kvcaches.stores.blobs import Stored

# How many blobs a store has for results of probes, and their bytes; above, the oldest are evicted.
_MOST_BLOBS, _MOST_BYTES = 256, 4 << 20


class SegmentContents:
    """Segments of all scopes, as the `Contents` of a catalog.

    Args:
        signed: Whether segments can be looked up by their signatures.

    Attributes:
        indices: The index of each scope.
        experience: The results of probes of all processes.
    """

    def __init__(self, signed: bool = False) -> None:
        self.indices: defaultdict[str, SegmentIndex] = defaultdict(lambda: SegmentIndex(signed))
        self.experience = Experience()
        # When each blob with results of probes was made, and its bytes.
        self._probe_blobs: dict[str, tuple[float, int]] = {}

    def add(self, blobs: Sequence[Stored]) -> dict[str, int]:
        tokens = {}
        for blob in blobs:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError):
                tokens[blob.key] = self._add(blob)
        return tokens

    def _add(self, blob: Stored) -> int:
        if "experience" in blob.head:
            self.experience.hear(blob.head["experience"])
            self._probe_blobs[blob.key] = float(blob.head.get("created", 0.0)), blob.bytes
            return 0
        record = Record.from_dict(dict(blob.head))
        layout.check_stored(record.stored)
        if record.key != blob.key or (record.signature is not None and len(record.signature) != PERMUTATIONS):
            raise ValueError("another name, or a signature of another kind")
        self.indices[record.scope].add(blob.key, record)
        return len(record)

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._probe_blobs.pop(key, None)
            for index in self.indices.values():
                index.remove(key)

    def expired(self) -> Sequence[str]:
        newest = sorted(self._probe_blobs, key=lambda key: (self._probe_blobs[key][0], key), reverse=True)
        totals = accumulate(self._probe_blobs[key][1] for key in newest)
        kept = sum(total <= _MOST_BYTES for total in islice(totals, _MOST_BLOBS))
        return newest[kept:][::-1]

    def record(self, key: str) -> Record | None:
        """Return a segment's record; None if there is none."""
        return next((index.records[key] for index in self.indices.values() if key in index.records), None)

    def lengths(self) -> Mapping[str, int]:
        """Return how many tokens each segment has, by its id."""
        return {key: len(record) for index in self.indices.values() for key, record in index.records.items()}
