"""The stored prompts of a library: by their tokens and by their embeddings."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_kvcaches.reuse.index import Chain, Record
from hf_kvcaches.reuse.layout import check_form
from hf_kvcaches.reuse.store import CatalogReport
from hf_kvcaches.reuse.tokens import Ids, array_as_text, array_of_text, common_prefix
from hf_kvcaches.stores.blobs import BlobHead
from hf_kvcaches.stores.vectors import VectorIndex

Embedding = npt.NDArray[np.float32]

_KIND = "warm-start entry, version 3"


@dataclass(frozen=True)
class EntryReport(CatalogReport):
    """What a library holds, and what this process did with it.

    Args:
        entries: The entries of this library's scope.
        foreign: The entries of other scopes.
        hits: How often an entry was reused.
        saved_tokens: Tokens that were not computed.
    """

    entries: int
    foreign: int
    hits: int
    saved_tokens: int


@dataclass(frozen=True, eq=False)
class Entry:
    """A stored prompt without its keys and values.

    Args:
        embedding: (dim,), of length 1.
        provenance: Where it is from, as JSON values.
    """

    record: Record
    text: str
    embedding: Embedding
    provenance: Mapping[str, Any]

    @classmethod
    def of(cls, scope: str, ids: Ids, text: str, embedding: Embedding, provenance: Mapping[str, Any]) -> Entry:
        """Return the entry of a prompt."""
        return cls(record_of(scope, ids), text, embedding, provenance)

    def head(self) -> dict[str, Any]:
        """What the head of its blob has beside the record."""
        return {"kind": _KIND, "text": self.text, "embedding": array_as_text(self.embedding, "<f4"), "provenance": dict(self.provenance)}


def record_of(scope: str, ids: Ids) -> Record:
    """Return the record of a whole prompt."""
    return Record(scope, ids, Chain().name, Chain().extend(ids).name, 0, ids[:0])


class EntryContents:
    """Entries of one scope, as the `Contents` of a catalog."""

    def __init__(self, scope: str, dim: int) -> None:
        self.scope, self.vectors = scope, VectorIndex(dim)
        self.entries: dict[str, Entry] = {}
        # Tokens and id of each entry, sorted.
        self._order: list[tuple[bytes, str]] = []

    def add(self, blobs: Sequence[BlobHead]) -> dict[str, int]:
        tokens: dict[str, int] = {}
        added: dict[str, Entry] = {}
        for key, head, _ in blobs:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError):
                record = Record.from_dict(head)
                if head["kind"] != _KIND or record.key != key:
                    continue
                if record.scope == self.scope:
                    check_form(record.form)
                    vector = array_of_text(head["embedding"], "<f4")
                    if vector.shape != (self.vectors.dim,) or not abs(float(np.linalg.norm(vector)) - 1) <= 1e-3:
                        continue
                    added[key] = Entry(record, str(head["text"]), vector, dict(head["provenance"]))
                tokens[key] = len(record)
        self.entries |= added
        for key, entry in added.items():
            insort(self._order, (_sortable(entry.record.ids), key))
        if added:
            self.vectors.add(list(added), np.stack([entry.embedding for entry in added.values()]))
        return tokens

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            if (entry := self.entries.pop(key, None)) is not None:
                del self._order[bisect_left(self._order, (_sortable(entry.record.ids), key))]
        self.vectors.remove(keys)

    def beginning(self, ids: Ids) -> tuple[Record | None, int]:
        """Return the record that shares the longest prefix with a prompt, and how many tokens that is."""
        index = bisect_left(self._order, (_sortable(ids), ""))
        best, longest = None, 0
        # It is one of the two neighbours in the order.
        for _, key in self._order[max(0, index - 1) : index + 1]:
            record = self.entries[key].record
            if (shared := common_prefix(record.ids, ids)) > longest:
                best, longest = record, shared
        return best, longest


def _sortable(ids: Ids) -> bytes:
    # With the highest byte first, bytes have the order of the numbers.
    return ids.astype(">u4").tobytes()
