"""`SegmentStore`: segments of prompts with their keys and values, shared by threads, caches and processes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, whole_number
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.background import Background
from hf_kvcaches.reuse.layout import LayerStates, Quantization
from hf_kvcaches.reuse.report import CatalogReport
from hf_kvcaches.segments.contents import SegmentContents
from hf_kvcaches.segments.index import SegmentIndex
from hf_kvcaches.segments.records import Record
from hf_kvcaches.segments.signatures import require_signatures
from hf_kvcaches.stores.blobs import BlobStore
from hf_kvcaches.stores.catalog import Catalog
from hf_kvcaches.stores.location import TIMEOUT


@dataclass(frozen=True)
class StoreReport(CatalogReport):
    """What a segment store holds, and what this process did with it.

    Args:
        segments: The segments of all models.
        tokens: The tokens of these segments.
    """

    segments: int
    tokens: int


class NewSegment(NamedTuple):
    """A segment to be stored: its record, without `stored`, and its states.

    Args:
        layers: Keys and values of the lowest layers, or all.
        geometries: How each layer's keys are rotated.
    """

    record: Record
    layers: Sequence[LayerStates]
    hidden: Mapping[int, torch.Tensor]
    geometries: Sequence[RotaryGeometry | None] = ()


class SegmentStore:
    """Keeps segments between requests.

    Segments are written in the background, after the first token of a request; the next request of this process waits for that. A failure
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
        cuts: Store the hidden states of a segment at every `cuts`-th layer too, so that the layers below can be reused alone where the
            text before differs far away. None: nowhere.
        depth: How many layers' keys and values are stored, with the input of the next one; the layers above run each time. None: all.
        near_identical: Whether segments that differ in a date or an id are looked up too. This adds next to nothing to verbatim
            search, and needs the extra `retrieval`.
        timeout: Seconds that all look-ups of a request may wait for Redis together, and the longest that one answer may take. After a
            failure Redis is not asked for 5 s.
    """

    def __init__(
        self,
        location: str | BlobStore = "memory",
        *,
        max_bytes: int | str | None = None,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        quantization: Quantization = None,
        cuts: int | None = None,
        depth: int | None = None,
        near_identical: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        self.quantization = layout.check_quantization(quantization)
        expected = "a number of layers of at least 1, or None"
        self.cuts = None if cuts is None else whole_number("cuts", cuts, 1, expected)
        self.depth = None if depth is None else whole_number("depth", depth, 1, expected)
        self.location = location
        if near_identical:
            require_signatures()
        self.near_identical = near_identical
        self.contents = SegmentContents(near_identical)
        self.experience = self.contents.experience
        limits: dict[str, Any] = {"max_bytes": max_bytes, "hot_bytes": hot_bytes, "time_to_live": time_to_live}
        self.catalog = Catalog(location, self.contents, "segment", timeout=timeout, **limits)
        self.background = Background(partial(self.catalog.warn_once, "failed job"))

    @property
    def max_bytes(self) -> int | None:
        """The cap, or None."""
        return self.catalog.max_bytes

    @property
    def codec(self) -> KVCodec | None:
        """The codec of the segments, if they are codes."""
        return self.quantization if isinstance(self.quantization, KVCodec) else None

    def index(self, scope: str) -> SegmentIndex:
        """Return the segments of a scope, to be used while `reading`."""
        return self.contents.indices[scope]

    def reading(self) -> threading.RLock:
        """Return a lock that keeps indices from changing."""
        return self.catalog.lock

    def refresh(self, scope: str | None = None, others: Callable[[], Mapping[str, str]] = dict) -> None:
        """Begin a request: write pending segments, and apply changes of other processes.

        Args:
            scope: Warn once if the store has segments, but none of this scope.
            others: What differs where segments have another scope, as a sentence by scope.
        """
        self.flush()
        self.catalog.refresh()
        if scope is not None and scope not in self.contents.indices and self.catalog.entries:
            known = [sentence for other, sentence in others().items() if other in self.contents.indices]
            self.catalog.warn_once(
                "foreign",
                f"{self.catalog.blobs.place} holds {len(self._lengths())} segments, but none for this model with its adapters, tokenizer "
                f"and format, so nothing is reused until it has stored its own.{''.join(f' {sentence}' for sentence in known)}",
            )

    def tensors(self, key: str, device: torch.device | None = None) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a segment, which are read-only; None if it is missing, expired or damaged.

        Args:
            device: Where the hot tier keeps them, if no earlier call named a device.
        """

        def check(tensors: dict[str, torch.Tensor]) -> None:
            with self.catalog.lock:
                record = self.contents.record(key)
            if record is not None:
                layout.check(tensors, record.stored, len(record))

        return self.catalog.read(key, check, device=device)

    def used(self, key: str, tokens: int) -> None:
        """Count tokens of a segment that were not computed."""
        self.catalog.used(key, tokens)

    def put(self, segments: Sequence[NewSegment]) -> None:
        """Store segments that are not stored yet, and evict others above the cap."""
        # The last first: of two equally useful segments the older one is evicted, and a prompt without its start is a miss.
        for record, layers, hidden, geometries in reversed(segments):
            with self.catalog.lock:
                if record.key in self.catalog.entries:
                    continue
            try:
                tensors, stored = layout.encode(layers, hidden, self.quantization, record.start, geometries)
            except ConfigError as error:  # not finite
                self.catalog.warn_once("unfinite", f"A segment was not stored: {error}")
                continue
            if self.max_bytes is not None and sum(tensor.nbytes for tensor in tensors.values()) > self.max_bytes:
                continue
            if not self.catalog.put(record.key, replace(record, stored=stored).to_dict(), tensors):
                break
        findings = self.experience.unstored()
        if findings:
            key = hashlib.blake2b(repr(findings).encode(), digest_size=16).hexdigest()
            self.catalog.put(key, {"experience": findings, "created": time.time()}, {"none": torch.zeros(1)}, reported=False)
        # Processes that write at the same time keep the cap together: the last one to refresh sees what all have written.
        self.catalog.refresh()

    def flush(self) -> None:
        """Wait until all computed segments are written."""
        self.background.flush()

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keep a segment from eviction, by any process.

        Args:
            key: Its id, as in the spans of `report()`.
            pinned: False to unpin it.
        """
        self.catalog.pin(key, pinned)

    def delete(self, key: str) -> bool:
        """Delete the segment with this id, and return whether it was there."""
        return self.catalog.delete(key)

    def clear(self) -> None:
        """Delete all segments of all models."""
        self.flush()
        self.catalog.clear()

    def report(self) -> StoreReport:
        """Report what the store holds, after writing pending segments."""
        self.refresh()
        lengths = self._lengths()
        return StoreReport(segments=len(lengths), tokens=sum(lengths.values()), **self.catalog.summary(lengths))

    def close(self) -> None:
        """Write pending segments, and close files and connections."""
        self.flush()
        self.catalog.blobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> SegmentStore:
        # A copied cache shares the store.
        return self

    def __repr__(self) -> str:
        cap = "" if self.max_bytes is None else f" of {self.max_bytes / 2**20:.1f}"
        if not self.catalog.read_once:
            return f"SegmentStore({self.catalog.blobs.place!r}, not yet read)"
        return f"SegmentStore({self.catalog.blobs.place!r}, {len(self._lengths())} segments, {self.catalog.bytes / 2**20:.1f}{cap} MiB)"

    def _lengths(self) -> Mapping[str, int]:
        with self.catalog.lock:
            return self.contents.lengths()
