"""What a store of segments contains: an index for each scope, and what probes have found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hf_kvcaches.core.splicing import codec
from hf_kvcaches.segments.experience import Experience, ToldBlobs
from hf_kvcaches.segments.index import SegmentIndex
from hf_kvcaches.segments.records import PERMUTATIONS, Record
from hf_kvcaches.stores.blobs import Stored


class SegmentContents:
    """Segments of all scopes, as the `Contents` of a catalog.

    Attributes:
        indices: By scope.
        experience: What probes have found, in any process.
    """

    def __init__(self) -> None:
        self.indices: defaultdict[str, SegmentIndex] = defaultdict(SegmentIndex)
        self.experience = Experience()
        self._told = ToldBlobs()

    def add(self, blobs: Sequence[Stored]) -> dict[str, int]:
        tokens = {}
        for blob in blobs:
            try:
                tokens[blob.key] = self._add(blob)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
                continue
        return tokens

    def _add(self, blob: Stored) -> int:
        if "experience" in blob.head:
            self.experience.hear(blob.head["experience"])
            self._told.add(blob.key, float(blob.head.get("created", 0.0)), blob.bytes)
            return 0
        record = Record.from_dict(dict(blob.head))
        codec.check_stored(record.stored)
        signatures = [signature for signature in (record.signature, record.surroundings) if signature is not None]
        if record.key != blob.key or any(len(signature) != PERMUTATIONS for signature in signatures):
            raise ValueError("another name, or signatures of another kind")
        self.indices[record.scope].add(blob.key, record)
        return len(record)

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._told.remove(key)
            for index in self.indices.values():
                index.remove(key)

    def expired(self) -> Sequence[str]:
        return self._told.excess()

    def record(self, key: str) -> Record | None:
        """A segment's record, or None where there is none."""
        return next((index.records[key] for index in self.indices.values() if key in index.records), None)

    def lengths(self) -> Mapping[str, int]:
        """The tokens of each segment, by its id."""
        return {key: len(record) for index in self.indices.values() for key, record in index.records.items()}
