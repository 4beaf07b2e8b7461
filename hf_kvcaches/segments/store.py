"""`SegmentStore`: segments of prompts with their keys and values, shared by threads, caches and processes."""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_kvcaches.core.fingerprint import digest_of_tokenizer
from hf_kvcaches.core.identity import Identity
from hf_kvcaches.reuse.index import Record, TokenIndex
from hf_kvcaches.reuse.layout import Quantization, check_form
from hf_kvcaches.reuse.store import CatalogReport, SpanStore
from hf_kvcaches.stores.blobs import BlobHead, BlobStore
from hf_kvcaches.stores.catalog import TIMEOUT

FORMAT = 4  # the version of the format of stored segments


@dataclass(frozen=True)
class StoreReport(CatalogReport):
    """What a segment store holds, and what this process did with it.

    Args:
        segments: The segments of all models.
        tokens: The tokens of these segments.
    """

    segments: int
    tokens: int


class SegmentContents:
    """Segments of all scopes, as the `Contents` of a catalog."""

    def __init__(self) -> None:
        self.indices: defaultdict[str, TokenIndex] = defaultdict(TokenIndex)  # by scope

    def add(self, blobs: Sequence[BlobHead]) -> dict[str, int]:
        tokens = {}
        for blob in blobs:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError):
                record = Record.from_dict(blob.head)
                check_form(record.form)
                if record.key == blob.key:
                    self.indices[record.scope].add(blob.key, record)
                    tokens[blob.key] = len(record)
        return tokens

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            for index in self.indices.values():
                index.remove(key)


class SegmentStore(SpanStore):
    """Keeps segments between requests.

    Segments are written in the background, after the first token of a request; the next request waits for no more than a moment. A failure
    (a damaged segment, a full disk, an unreachable server) counts as a miss, warns once and never gives wrong keys.

    **Sharing.** Processes that open one folder or one Redis see each other's segments. A cache reuses segments of its own model, adapters,
    tokenizer and format only. Whoever can write to the folder or to Redis can make a model say anything, so keep it as private as the
    weights.

    Args:
        location: `"memory"`, `"disk:FOLDER"`, `"redis://host:port/db"`, or an object of a `hf_kvcaches.stores.blobs.BlobStore` of your own.
        max_bytes: The most that all segments may take, a number or such as `"4GiB"`. Above it, segments are evicted that saved the least
            work for each byte.
        hot_bytes: The most that the segments used last may take in this process, on the device that reads them: for these no file is read
            and no server is asked. A number or such as `"4GiB"`, or None for nothing.
        time_to_live: Seconds after which a segment is a miss and is deleted, pinned or not; None for never.
        quantization: How keys and values are stored: None for bit-equal ones, a `KVCodec` of the model, `"int8"` or `"int4"`.
        timeout: Seconds that all look-ups of a request may wait for Redis together, transfers aside, and the longest that one answer may
            take. After a failure Redis is not asked for 5 s.
    """

    def __init__(
        self,
        location: str | BlobStore = "memory",
        *,
        max_bytes: int | str | None = None,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        quantization: Quantization = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.contents = SegmentContents()
        limits = {"max_bytes": max_bytes, "hot_bytes": hot_bytes, "time_to_live": time_to_live, "timeout": timeout}
        super().__init__(self.contents, "segment", quantization, location, **limits)

    def look_up(self, identity: Identity, model: PreTrainedModel, tokenizer: Any) -> tuple[str, TokenIndex]:
        """Return the scope of a model, and its segments, to be used under the catalog's lock; warn once if all are of other models."""
        indices = self.contents.indices
        scope = _scope_of(identity, model, tokenizer, self.stored_as)
        if scope not in indices and self.catalog.entries:
            self.catalog.warn_once("foreign", " ".join(self._foreign(identity, model, tokenizer)))
        with self.catalog.lock:
            return scope, indices[scope]

    def _foreign(self, identity: Identity, model: PreTrainedModel, tokenizer: Any) -> Iterator[str]:
        """Say what differs where the segments of this model have another scope, as far as that can be told."""
        yield (
            f"{self.catalog.blobs.place} holds {len(self._lengths())} segments, but none for this model with its adapters, tokenizer and "
            "format, so nothing is reused until it has stored its own."
        )
        if tokenizer is None:
            yield "This cache has no tokenizer, and segments stored with one are not its own: pass the tokenizer to all caches, or to none."
        elif _scope_of(identity, model, None, self.stored_as) in self.contents.indices:
            yield "It has segments of this model that were stored without a tokenizer: pass the tokenizer to all caches, or to none."
        for other in (None, "int8", "int4"):
            if _scope_of(identity, model, tokenizer, other) in self.contents.indices:
                yield f"It has segments of this model that were stored with quantization={other!r}."

    def report(self) -> StoreReport:
        """Report what the store holds, after writing pending segments."""
        self.flush()
        self.refresh()
        lengths = self._lengths()
        return StoreReport(segments=len(lengths), tokens=sum(lengths.values()), **self.summary(lengths))

    def __repr__(self) -> str:
        catalog = self.catalog
        cap = "" if self.max_bytes is None else f" of {self.max_bytes / 2**20:.1f}"
        if not catalog.read_once:
            return f"SegmentStore({catalog.blobs.place!r}, not yet read)"
        return f"SegmentStore({catalog.blobs.place!r}, {len(self._lengths())} segments, {catalog.bytes / 2**20:.1f}{cap} MiB)"

    def _lengths(self) -> dict[str, int]:
        """Return how many tokens each segment has, by its id."""
        with self.catalog.lock:
            return {key: len(record) for index in self.contents.indices.values() for key, record in index.records.items()}


def _scope_of(identity: Identity, model: PreTrainedModel, tokenizer: Any, stored_as: str | None) -> str:
    """A digest of everything that must be equal for a stored segment to be reused."""
    words = "" if tokenizer is None else digest_of_tokenizer(tokenizer)
    parts = (str(FORMAT), identity.digest, words, str(stored_as), str(model.dtype))
    return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()
