"""`SegmentStore`: segments of prompts with their keys and values, shared by threads, caches and processes."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, Self

import torch

from hf_kvcaches.core.splicing import codec
from hf_kvcaches.core.splicing.codec import LayerStates, Quantization
from hf_kvcaches.errors import ArtifactError, ConfigError, whole_number
from hf_kvcaches.segments.experience import Experience, ToldBlobs
from hf_kvcaches.segments.index import SegmentIndex
from hf_kvcaches.segments.records import PERMUTATIONS, Record, Signature
from hf_kvcaches.segments.writer import Writer
from hf_kvcaches.stores.blobs import TIMEOUT, BlobStore, StoreUnavailable, open_blobs
from hf_kvcaches.stores.worth import Worth, evict

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class StoreReport:
    """What a store holds and what it was good for, counted by this process.

    Args:
        location: Where it is, without passwords.
        segments: How many, of all models.
        tokens: In them.
        bytes: They take in the back-end.
        max_bytes: The cap, or None.
        pinned: How many segments are never evicted.
        written: Segments that this process stored.
        evicted: That it evicted.
        damaged: That it found damaged, and deleted.
        loads: How often it read tensors.
        failures: How often the back-end failed it.
    """

    location: str
    segments: int
    tokens: int
    bytes: int
    max_bytes: int | None
    pinned: int
    written: int
    evicted: int
    damaged: int
    loads: int
    failures: int


class NewSegment(NamedTuple):
    """A segment on its way into the store: its record, still without `stored`, and its states.

    Args:
        record: What is known of it.
        layers: Keys and values of the lowest layers, or all.
        hidden: What entered a layer, by its index.
        encoded: What `codec.encode` would give, where it is at hand.
    """

    record: Record
    layers: Sequence[LayerStates]
    hidden: Mapping[int, torch.Tensor]
    encoded: tuple[Mapping[str, torch.Tensor], dict[str, Any]] | None = None


class SegmentStore:
    """Where segments live between requests.

    Writing happens in a thread of its own, after the first token of a request; the next request of this process waits for it. Whatever
    fails (a damaged segment, a full disk, a server that is gone) is a miss, said once as a warning, and never wrong keys.

    **Sharing.** Processes that open one folder or one Redis see each other's segments. Segments of other models, adapters, tokenizers and
    formats lie beside each other and are never mixed. In Redis, tensors are bytes on a server: whoever can write there can make a
    model say anything, so keep it as private as the weights.

    Args:
        location: `"memory"`, `"disk:FOLDER"` or `"redis://host:port/db"`.
        max_bytes: The most that all segments may take, a number or such as `"4GiB"`. Above it, those go first that saved least work a byte.
        quantization: How keys and values are stored: `"int8"`, `"int4"`, or None for bit-equal ones.
        cuts: Every how many layers the hidden states of a segment are stored too, so that only the layers above have to be run where
            what stands to the left differs far away. None: nowhere.
        depth: How many layers' keys and values are stored, with the hidden state that enters the next one; the layers above are run
            again each time. None: of all layers.
        timeout: Seconds that all look-ups of a request may wait for Redis together, and the longest that one answer may take. After a
            failure it is not asked for 5 s. A folder and memory answer at once.
    """

    def __init__(
        self,
        location: str = "memory",
        *,
        max_bytes: int | str | None = None,
        quantization: Quantization = "int8",
        cuts: int | None = None,
        depth: int | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.quantization = codec.check_quantization(quantization)
        self.max_bytes = _bytes_of(max_bytes)
        counted = "a number of layers of at least 1, or None"
        self.cuts = None if cuts is None else whole_number("cuts", cuts, 1, counted)
        self.depth = None if depth is None else whole_number("depth", depth, 1, counted)
        self.location = location
        self._blobs: BlobStore = open_blobs(location, timeout)
        # Under the first one nobody waits for a server; under the second, changes are asked for and taken over in their order.
        self._lock, self._following = threading.RLock(), threading.RLock()
        self._indices: dict[str, SegmentIndex] = {}
        self._worth = Worth()
        self.experience, self._told = Experience(), ToldBlobs()
        self._pinned: frozenset[str] = frozenset()
        self._said: set[str] = set()
        self._counts = dict.fromkeys(("written", "evicted", "loads", "failures"), 0)
        self._writer = Writer()
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        weakref.finalize(self, _finish, self._waiting, self._writer)

    def watch(self, waiting: Any) -> None:
        """Asks something to `release` what it has to store, before anything is looked up.

        Args:
            waiting: It is not kept alive.
        """
        with self._lock:
            self._waiting.add(waiting)

    def index(self, scope: str) -> SegmentIndex:
        """What is known of one scope's segments. To be used while `reading`.

        Args:
            scope: See `Record`.
        """
        if scope not in self._indices:
            self._indices[scope] = SegmentIndex()
        return self._indices[scope]

    def near(self, scope: str, signature: Signature) -> list[Record]:
        """Segments that resemble one, by the signatures of their canonical texts.

        Args:
            scope: See `Record`.
            signature: As `Record.signature`.
        """
        with self._lock:
            return self.index(scope).near(signature)

    def reading(self) -> threading.RLock:
        """A lock under which no index changes."""
        return self._lock

    def refresh(self, scope: str | None = None) -> None:
        """Begins a request: writes what waits to be written, and learns what other processes did.

        Args:
            scope: Whose segments are wanted; said once where the store has segments, but none for it.
        """
        self.flush()
        self._blobs.begin()
        self._follow()
        evict(self._leaving, self._evict, self._follow)
        if scope is not None and scope not in self._indices and self._worth.sizes:
            self._say(
                "foreign",
                f"{self._blobs.place} holds {self._segments()} segments, but none for this model with its adapters, tokenizer and "
                "format, so nothing is reused until it has stored its own.",
            )

    def _follow(self) -> None:
        """Learns what came, went and was pinned, by this process too: what the back-end tells is all that is known."""
        try:
            with self._following:
                changes = self._blobs.changes()
                with self._lock:
                    for key in changes.removed:
                        self._forget(key)
                    for key, head, size in changes.added:
                        self._learn(key, head, size)
                self._pinned = self._blobs.pinned()
        except StoreUnavailable as error:
            self._failed(error)
        if self._blobs.damaged:
            self._say("damaged", f"A damaged segment is computed anew. {self._blobs.complaints[0]}")
        for sentence in list(self._blobs.unreadable.values())[:1]:
            self._say("unusable", sentence)

    def tensors(self, key: str) -> dict[str, torch.Tensor] | None:
        """What was stored of a segment, or None where it is gone or damaged. Not to be written to.

        Args:
            key: The segment's id.
        """
        try:
            found = self._blobs.tensors(key)
        except StoreUnavailable as error:
            self._failed(error)
            return None
        with self._lock:
            self._counts["loads"] += 1
            record = next((index.records[key] for index in self._indices.values() if key in index.records), None)
        if found is not None and record is not None:
            try:
                codec.check(found, record.stored, len(record))
            except ArtifactError as error:
                self._blobs.discard(key, error)
                found = None
        if found is None:
            self._follow()
        return found

    def used(self, key: str, tokens: int) -> None:
        """Counts the work that a segment saved.

        Args:
            key: Its id.
            tokens: That were not computed.
        """
        with self._lock:
            self._worth.used(key, tokens)

    def put(self, segments: Sequence[NewSegment]) -> None:
        """Stores segments now, and evicts others where that makes too many bytes.

        Args:
            segments: What is there already is left alone.
        """
        # The last first: of two that are worth the same the older one is evicted, and a prompt without its start is not found.
        for record, layers, hidden, encoded in reversed(segments):
            key = record.key
            with self._lock:
                if key in self._worth.sizes:
                    continue
            try:
                tensors, stored = codec.encode(layers, hidden, self.quantization) if encoded is None else encoded
            except ConfigError as error:  # not finite
                self._say("unfinite", f"A segment was not stored: {error}")
                continue
            record.stored.update(stored)
            if self.max_bytes is not None and sum(tensor.nbytes for tensor in tensors.values()) > self.max_bytes:
                continue
            self._blobs.begin()
            try:
                size = self._blobs.put(key, record.to_dict(), tensors)
            except StoreUnavailable as error:
                self._failed(error)
                break
            with self._lock:
                self._counts["written"] += size > 0
        self._tell_experience()
        # Processes that write at the same time stay within the cap together: who looks last sees what all have written.
        self._follow()
        evict(self._leaving, self._evict, self._follow)

    def _tell_experience(self) -> None:
        """Lets other processes know what probes have found. It is worth nothing to the cap, and is the first to go."""
        found = self.experience.untold()
        if not found:
            return
        key = hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()
        try:
            self._blobs.put(key, {"experience": found, "created": time.time()}, {"none": torch.zeros(1)})
        except StoreUnavailable as error:
            self._failed(error)

    def later(self, job: Callable[[], None]) -> None:
        """Runs a job in the store's thread, behind those that wait; `refresh` and `flush` wait for it.

        Args:
            job: What fails in it is said once.
        """
        self._writer.add(self._guarded(job))

    def flush(self) -> None:
        """Waits until everything is written that is computed."""
        with self._lock:
            waiting = list(self._waiting)
        _finish(waiting, self._writer)

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keeps a segment from eviction, by any process.

        Args:
            key: Its id, as in the spans of `report()`.
            pinned: False lets it go again.
        """
        self._blobs.begin()
        self._blobs.pin(key, pinned)
        self._pinned = self._blobs.pinned()

    def delete(self, key: str) -> bool:
        """Deletes a segment, and returns whether it was there.

        Args:
            key: Its id.
        """
        self._blobs.begin()
        gone = self._blobs.delete(key)
        self._follow()
        return gone

    def clear(self) -> None:
        """Deletes all segments of all models."""
        self.flush()
        self._blobs.begin()
        self._blobs.clear()
        self.refresh()

    def report(self) -> StoreReport:
        """What the store holds, after writing what waits."""
        self.refresh()
        with self._lock:
            tokens = sum(len(record) for index in self._indices.values() for record in index.records.values())
            return StoreReport(
                location=self._blobs.place,
                segments=self._segments(),
                tokens=tokens,
                bytes=self._worth.total,
                max_bytes=self.max_bytes,
                pinned=len(self._pinned & self._worth.sizes.keys()),
                damaged=self._blobs.damaged,
                **self._counts,
            )

    def close(self) -> None:
        """Writes what waits and lets go of files and connections."""
        self.flush()
        self._blobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> SegmentStore:
        # A copied cache goes on with the same store.
        return self

    def __repr__(self) -> str:
        cap = "" if self.max_bytes is None else f" of {self.max_bytes / 2**20:.1f}"
        return f"SegmentStore({self._blobs.place!r}, {self._segments()} segments, {self._worth.total / 2**20:.1f}{cap} MiB)"

    def _segments(self) -> int:
        with self._lock:
            return sum(len(index.records) for index in self._indices.values())

    def _learn(self, key: str, head: Mapping[str, Any], size: int) -> None:
        try:
            if "experience" in head:
                self.experience.hear(head["experience"])
                self._told.add(key, float(head.get("created", 0.0)), size)
                self._worth.add(key, size, 0)
                return
            record = Record.from_dict(dict(head))
            codec.check_stored(record.stored)
            signatures = [each for each in (record.signature, record.surroundings) if each is not None]
            if record.key != key or any(len(signature) != PERMUTATIONS for signature in signatures):
                raise ValueError("it is named otherwise, or compared otherwise")
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            self._say("unreadable", f"{self._blobs.place} holds something that is no segment, or one of another version; it is left alone.")
            return
        self._worth.add(key, size, len(record))
        self.index(record.scope).add(key, record)

    def _forget(self, key: str) -> None:
        self._worth.remove(key)
        self._told.remove(key)
        for index in self._indices.values():
            index.remove(key)

    def _evict(self, key: str) -> bool:
        try:
            gone = self._blobs.delete(key)
        except StoreUnavailable as error:
            self._failed(error)
            return False
        with self._lock:
            self._counts["evicted"] += gone
        return gone

    def _leaving(self, stuck: Collection[str]) -> list[str]:
        """What has to go, but for what can't be deleted."""
        with self._lock:
            keep = self._pinned.union(stuck)
            leaving = [key for key in self._told.excess() if key not in keep]
            if self.max_bytes is None or self._worth.total <= self.max_bytes:
                return leaving
            # What is too large by itself would drive out all others first.
            leaving += [key for key, size in self._worth.sizes.items() if size > self.max_bytes and key not in keep]
            excess = self._worth.total - self.max_bytes - sum(self._worth.sizes[key] for key in leaving)
            return [*leaving, *self._worth.least(excess, keep=keep.union(leaving))]

    def _guarded(self, job: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                job()
            except Exception as error:  # in a thread, where nobody else would hear of it
                self._say("failed job", f"Segments were not stored: {type(error).__name__}: {error}")

        return run

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._counts["failures"] += 1
        self._say("unavailable", f"{self._blobs.place}: {error} Prompts are computed instead, until it can be used.")

    def _say(self, kind: str, sentence: str) -> None:
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def _finish(waiting: Iterable[Any], writer: Writer) -> None:
    """What is computed is stored, also where the interpreter ends."""
    for each in list(waiting):
        each.release(drop=False)
    writer.wait()


def _bytes_of(value: int | str | None) -> int | None:
    """A number of bytes from such as "4GiB"."""
    if value is None:
        return None
    number: float | None = None
    if isinstance(value, str):
        text = value.strip().lower().replace(" ", "")
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        with contextlib.suppress(ValueError, KeyError):
            number = float(digits) * _UNITS[text[len(digits) :]]
    elif isinstance(value, Integral | float) and not isinstance(value, bool):
        number = float(value)
    if number is None or not 1 <= number < float("inf"):
        raise ConfigError.of("max_bytes", "a number of bytes, at least 1", value, "Write such as '4GiB', or '500 MB'.")
    return int(number)
