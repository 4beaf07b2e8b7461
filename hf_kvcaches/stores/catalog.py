"""What a place of blobs holds, in step with other processes and within a cap."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError, is_number
from hf_kvcaches.stores.blobs import TIMEOUT, BlobStore, Stored, open_blobs
from hf_kvcaches.stores.hot import HotTier, bytes_of

# Bytes that a read must have to tell how fast the place is, and how much earlier reads count beside the latest one.
_TELLING, _FADING = 1 << 16, 0.8
# Seconds after which reads tell nothing any more: what is not fetched because that takes too long is tried again then.
_LATELY = 60.0


class Contents(Protocol):
    """An index of the blobs of a store. It is called under the catalog's lock, and does not call the catalog."""

    def add(self, blobs: Sequence[Stored]) -> Mapping[str, int]:
        """Indexes new blobs, and returns the tokens of each that counts towards the cap. Others are no blobs of this kind."""

    def remove(self, keys: Sequence[str]) -> None:
        """Forgets blobs that are gone; unknown keys are ignored."""

    def expired(self) -> Sequence[str]:
        """Blobs to evict whatever the cap."""


@dataclass
class CatalogEntry:
    """A blob, as this process knows it."""

    size: int  # bytes
    expires: float  # seconds since 1970
    saved: int = 0  # tokens of work
    worth: float = 0.0
    checks: set[str] = field(default_factory=set)  # kinds of those that its tensors passed


class Catalog:
    """The blobs of one place: reads them, applies changes of other processes, and evicts those of least worth above a cap.

    A failed or damaged read counts as a miss, and each kind of failure warns once. `delete`, `pin` and `clear` raise `OSError`.

    The worth of a blob is the work that it has saved, in tokens a byte, plus the clock at its last use. The clock stands at the worth of
    the blob evicted last, so a blob that was useful long ago, but not since, is evicted in the end (greedy-dual size frequency, Cherkasova,
    1998). A new blob counts as used once.

    Args:
        noun: What a blob is to a user, such as "segment".
        clock: Returns the seconds since 1970.

    Attributes:
        lock: The contents change under it alone. Nothing that may wait for a server is called under it.
        entries: The blobs, in the order of their last use, so that of two that are worth the same the older one is evicted first.
        bytes: What they take.
    """

    def __init__(
        self,
        location: str | BlobStore,
        contents: Contents,
        noun: str,
        *,
        timeout: float = TIMEOUT,
        max_bytes: int | str | None = None,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_bytes = _bytes_of("max_bytes", max_bytes)
        self.hot = HotTier(_bytes_of("hot_bytes", hot_bytes) or 0)
        if time_to_live is not None and not (is_number(time_to_live) and time_to_live > 0):
            raise ConfigError.of("time_to_live", "a number of seconds above 0, or None", time_to_live)
        self.contents, self.noun, self.clock = contents, noun, clock
        self.time_to_live = math.inf if time_to_live is None else time_to_live
        self.blobs = open_blobs(location, timeout)
        self.place = self.blobs.place
        self.entries: OrderedDict[str, CatalogEntry] = OrderedDict()
        self.bytes, self._eviction_clock = 0, 0.0
        self.lock = threading.RLock()
        self.counts = dict.fromkeys(("loads", "hot_hits", "written", "evicted", "failures"), 0)
        # Bytes that were read, the seconds that took, and when.
        self._read = self._reading = 0.0
        self._measured = -math.inf
        # Changes are fetched and applied in their order.
        self._following = threading.Lock()
        self._warned: set[str] = set()

    def refresh(self) -> None:
        """Begins a request: applies the changes of other processes, and evicts what has expired or exceeds the cap."""
        self.blobs.begin()
        self.follow()
        self.evict()

    def follow(self) -> None:
        """Applies all changes, also those of this process: the contents are what the place reports, and nothing else."""
        with self._forgiving(), self._following:
            added, removed = self.blobs.changes()
            with self.lock:
                for key in self.entries.keys() & removed:
                    self.bytes -= self.entries.pop(key).size
                self.hot.remove(removed)
                self.contents.remove(removed)
                tokens = self.contents.add(added)
                for key, head, size in added:
                    if key in tokens:
                        created = head["created"] if is_number(head.get("created")) else 0.0
                        self.entries[key] = CatalogEntry(size, created + self.time_to_live)
                        self.bytes += size
                        self.used(key, tokens[key])
            if len(tokens) < len(added):
                sentence = f"{self.place} holds something that is no {self.noun}, or one of another version; it is left alone."
                self.warn_once("unknown", sentence)
        if self.blobs.complaints:
            self.warn_once("damaged", f"A damaged {self.noun} is made anew. {self.blobs.complaints[0]}")
        if self.blobs.unreadable:
            self.warn_once("unreadable", self.blobs.unreadable)

    def read(
        self, key: str, check: Callable[[dict[str, Tensor]], object], *, kind: str = "", device: torch.device | None = None
    ) -> dict[str, Tensor] | None:
        """The tensors of a blob, not to be written to; None where it is gone, expired, damaged or can't be read.

        Args:
            check: Raises an `ArtifactError` for tensors that are not those of the blob's head: it is deleted then.
            kind: Of the check, which is called once for each blob.
            device: Where the hot tier keeps tensors, if no earlier reader has named it. Others are on the CPU.
        """
        with self.lock:
            entry, hot = self.entries.get(key), self.hot.get(key)
            if entry is not None and entry.expires < self.clock():
                return None
            self.counts["hot_hits"] += hot is not None
        tensors = self._load(key) if hot is None else hot
        if tensors is not None and (entry is None or kind not in entry.checks):
            try:
                check(tensors)
            except ArtifactError as error:
                self.blobs.discard(key, error)
                tensors = None
        if tensors is None:
            self.follow()
            return None
        if hot is None:
            tensors = self.hot.placed(tensors, device)
        with self.lock:
            # A blob that was deleted or replaced meanwhile must not be served later.
            if entry is not None and self.entries.get(key) is entry:
                entry.checks.add(kind)
                self.hot.keep(key, tensors)
        return tensors

    def _load(self, key: str) -> dict[str, Tensor] | None:
        tensors, start = None, perf_counter()
        with self._forgiving():
            tensors = self.blobs.tensors(key)
            seconds, size = perf_counter() - start, bytes_of(tensors or {})
            with self.lock:
                self.counts["loads"] += 1
                if size >= _TELLING:
                    self._read, self._reading = self._read * _FADING + size, self._reading * _FADING + seconds
                    self._measured = self.clock()
        return tensors

    def seconds_to_read(self, keys: Collection[str]) -> float | None:
        """How long a read of blobs takes that are not in the hot tier, by the latest reads; None where there were none lately."""
        with self.lock:
            size = sum(self.entries[key].size for key in keys if key in self.entries and key not in self.hot)
            return self._reading / self._read * size if self.clock() - self._measured < _LATELY else None

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor], *, reported: bool = True) -> bool:
        """Stores a blob, and returns whether the place could be used. A head without `created` gets it, in whole seconds since 1970."""
        self.blobs.begin()
        with self._forgiving():
            # Whole seconds, so that blobs of one kind take equally many bytes.
            self.blobs.put(key, {"created": float(int(self.clock())), **head}, tensors)
            with self.lock:
                self.counts["written"] += reported
            return True
        return False

    def evict(self) -> None:
        """Deletes expired blobs, and those of least worth above the cap; others in place of those that can't be deleted."""
        now, cap = self.clock(), math.inf if self.max_bytes is None else self.max_bytes
        with self.lock:
            expired = {key for key, entry in self.entries.items() if entry.expires < now}
            expired |= self.entries.keys() & self.contents.expired()
            if not expired and self.bytes <= cap:
                return
            entries, total = dict(self.entries), self.bytes
        # Without the pins of other processes nothing else may be evicted.
        pinned = self._pinned() if total > cap else None
        candidates = [] if pinned is None else [key for key in entries if key not in pinned and key not in expired]
        # A blob that is too large by itself would drive out all others first.
        candidates.sort(key=lambda key: (entries[key].size <= cap, entries[key].worth))
        for key in (*expired, *candidates):
            if total <= cap and key not in expired:
                break
            with self._forgiving():
                deleted = self.blobs.delete(key)
                total -= entries[key].size
                with self.lock:
                    self.counts["evicted"] += deleted
                    if key not in expired:
                        self._eviction_clock = max(self._eviction_clock, entries[key].worth)
        if expired or candidates:
            self.follow()

    def _pinned(self) -> frozenset[str] | None:
        with self._forgiving():
            return self.blobs.pinned()
        return None

    def used(self, key: str, tokens: int) -> None:
        """Counts the work that a blob saved; an evicted blob is ignored."""
        with self.lock:
            if (entry := self.entries.get(key)) is not None:
                entry.saved += tokens
                entry.worth = self._eviction_clock + entry.saved / max(entry.size, 1)
                self.entries.move_to_end(key)

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keeps a blob from eviction above the cap, by any process."""
        self.blobs.begin()
        self.blobs.pin(key, pinned)

    def delete(self, key: str) -> bool:
        """Deletes a blob, and returns whether there was one."""
        self.blobs.begin()
        deleted = self.blobs.delete(key)
        self.follow()
        return deleted

    def clear(self) -> None:
        """Deletes all blobs and pins."""
        self.blobs.begin()
        self.blobs.clear()
        self.refresh()

    def summary(self, among: Collection[str]) -> dict[str, Any]:
        """What a report of any store says."""
        pinned = (self._pinned() or frozenset()).intersection(among)
        usage = {"location": self.place, "bytes": self.bytes, "max_bytes": self.max_bytes, "hot_bytes": self.hot.bytes}
        return {**usage, "pinned": len(pinned), "damaged": len(self.blobs.complaints), **self.counts}

    def warn_once(self, kind: str, sentence: str) -> None:
        """Warns of each kind of event the first time."""
        with self.lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Counts a failure of the place in place of raising it, and warns of the first."""
        try:
            yield
        except OSError as error:
            with self.lock:
                self.counts["failures"] += 1
            self.warn_once("unavailable", f"{self.place}: {str(error).rstrip('.')}. Prompts are computed instead, until it can be used.")


def _bytes_of(argument: str, value: int | str | None) -> int | None:
    """A number of bytes from such as "4GiB"."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d+)?)\s*([kmgt]?)(i?)b?\s*", str(value).lower())
    number = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ") if match else 0.0
    if not 1 <= number < math.inf:
        raise ConfigError.of(argument, "a number of bytes, at least 1, or None", value, "Write such as '4GiB', or '500 MB'.")
    return int(number)
