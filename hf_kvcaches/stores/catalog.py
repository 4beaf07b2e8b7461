"""The catalog of a blob store: reads, changes of other processes, and eviction above a cap."""

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
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_kvcaches.errors import ConfigError, is_number
from hf_kvcaches.stores.blobs import BlobStore, Stored
from hf_kvcaches.stores.hot import HotTier
from hf_kvcaches.stores.location import TIMEOUT, open_blobs


class Contents(Protocol):
    """An index of the blobs of a store. The catalog calls it under its lock, and it does not call the catalog."""

    def add(self, blobs: Sequence[Stored]) -> Mapping[str, int]:
        """Index new blobs, and return the tokens of those of this kind, by key; others don't count towards the cap."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove blobs from the index; ignore unknown keys."""

    def expired(self) -> Sequence[str]:
        """Return blobs to evict with or without a cap."""


@dataclass
class CatalogEntry:
    """A blob in the catalog of this process."""

    size: int  # bytes
    expires: float  # seconds since 1970
    saved: int = 0  # tokens of work
    worth: float = 0.0
    checks: set[str] = field(default_factory=set)  # kinds of checks that its tensors passed


class Catalog:
    """The blobs of one store: reads them, applies changes of other processes, and evicts those of least worth above a cap.

    A failed or damaged read counts as a miss, and each kind of failure warns once. `delete`, `pin` and `clear` raise `OSError`.

    The worth of a blob is the work that it saved, in tokens per byte, plus the clock at its last use. The clock is the worth of the blob
    evicted last, so unused blobs are evicted in the end (greedy-dual size frequency, Cherkasova, 1998). A new blob counts as used once.

    Args:
        noun: The user's word for a blob, such as "segment".
        clock: Returns the seconds since 1970.

    Attributes:
        lock: Guards the contents and the entries. No call that may wait for a server is made under it.
        entries: The blobs in the order of their last use: of two of the same worth the older one is evicted first.
        bytes: The bytes of all entries.
        read_once: Whether the entries are those of the store, as it was at the last look-up.
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
        self.max_bytes = bytes_of_size("max_bytes", max_bytes)
        self.hot = HotTier(bytes_of_size("hot_bytes", hot_bytes) or 0)
        if time_to_live is not None and not (is_number(time_to_live) and time_to_live > 0):
            raise ConfigError.of("time_to_live", "a number of seconds above 0, or None", time_to_live)
        self.contents, self.noun, self.clock = contents, noun, clock
        self.time_to_live = math.inf if time_to_live is None else time_to_live
        self.blobs = open_blobs(location, timeout)
        self.entries: OrderedDict[str, CatalogEntry] = OrderedDict()
        self.bytes, self._eviction_clock = 0, 0.0
        self.lock = threading.RLock()
        self.counts = dict.fromkeys(("loads", "hot_hits", "written", "evicted", "failures"), 0)
        self._changes_lock = threading.Lock()  # changes are applied in the order in which they are fetched
        self._warned: set[str] = set()
        self.read_once = location == "memory"  # nobody else writes there

    def refresh(self) -> None:
        """Begin a request: apply the changes of other processes, and evict expired blobs and those above the cap."""
        self.blobs.begin()
        self.follow()
        self.evict()

    def follow(self) -> None:
        """Apply all changes, also those of this process: the entries are the blobs that the store reports, and no others."""
        with self._count_failures(), self._changes_lock:
            added, removed = self.blobs.changes()
            self.read_once = True
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
                contents = f"something that is no {self.noun}, or one of another version; it is left alone."
                self.warn_once("unknown", f"{self.blobs.place} holds {contents}")
        if self.blobs.complaints:
            self.warn_once("damaged", f"A damaged {self.noun} is made anew. {self.blobs.complaints[0]}")
        if self.blobs.unreadable:
            self.warn_once("unreadable", self.blobs.unreadable)

    def read(
        self, key: str, check: Callable[[dict[str, Tensor]], object], *, kind: str = "", device: torch.device | None = None
    ) -> dict[str, Tensor] | None:
        """Return the tensors of a blob, which are read-only; None if it is missing, expired, damaged or unreadable.

        Args:
            check: Raises an `ArtifactError` for tensors that don't fit the blob's head: the blob is deleted.
            kind: The name of the check, which is called once for each blob and kind.
            device: The device of the hot tier, if no earlier read named one. Tensors outside of the tier are on the CPU.
        """
        with self.lock:
            entry, hot = self.entries.get(key), self.hot.get(key)
            if entry is not None and entry.expires < self.clock():
                return None
            self.counts["hot_hits"] += hot is not None
        tensors, valid = self._load(key) if hot is None else hot, entry is not None and kind in entry.checks
        if tensors is not None and not valid:
            with self.blobs.discarding(key):
                check(tensors)
                valid = True
        if tensors is None or not valid:
            self.follow()
            return None
        if hot is None:
            tensors = self.hot.to_device(tensors, device)
        with self.lock:
            # A blob that another thread deleted or replaced must not be a hit later.
            if entry is not None and self.entries.get(key) is entry:
                entry.checks.add(kind)
                self.hot.keep(key, tensors)
        return tensors

    def _load(self, key: str) -> dict[str, Tensor] | None:
        with self._count_failures():
            tensors = self.blobs.tensors(key)
            with self.lock:
                self.counts["loads"] += 1
            return tensors
        return None

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor], *, reported: bool = True) -> bool:
        """Store a blob, and return whether that succeeded. A head without `created` gets it, in whole seconds since 1970."""
        self.blobs.begin()
        with self._count_failures():
            # Whole seconds, so that blobs of one kind have equally many bytes.
            self.blobs.put(key, {"created": float(int(self.clock())), **head}, tensors)
            with self.lock:
                self.counts["written"] += reported
            return True
        return False

    def evict(self) -> None:
        """Delete expired blobs, and above the cap those of least worth; if a blob can't be deleted, the next one is."""
        now, cap = self.clock(), math.inf if self.max_bytes is None else self.max_bytes
        with self.lock:
            expired = {key for key, entry in self.entries.items() if entry.expires < now}
            expired |= self.entries.keys() & self.contents.expired()
            if not expired and self.bytes <= cap:
                return
            entries, total = dict(self.entries), self.bytes
        candidates: list[str] = []
        if total > cap:
            # If the pins of other processes are unknown, no candidate may be evicted.
            with self._count_failures():
                pinned = self.blobs.pinned()
                candidates = [key for key in entries if key not in pinned and key not in expired]
        # A blob larger than the cap would evict all others first.
        candidates.sort(key=lambda key: (entries[key].size <= cap, entries[key].worth))
        for key in (*expired, *candidates):
            if total <= cap and key not in expired:
                break
            with self._count_failures():
                deleted = self.blobs.delete(key)
                total -= entries[key].size
                with self.lock:
                    self.counts["evicted"] += deleted
                    if key not in expired:
                        self._eviction_clock = max(self._eviction_clock, entries[key].worth)
        if expired or candidates:
            self.follow()

    def used(self, key: str, tokens: int) -> None:
        """Count tokens that a blob saved; ignore an evicted blob."""
        with self.lock:
            if (entry := self.entries.get(key)) is not None:
                entry.saved += tokens
                entry.worth = self._eviction_clock + entry.saved / max(entry.size, 1)
                self.entries.move_to_end(key)

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keep a blob from eviction above the cap, by any process."""
        self.blobs.begin()
        self.blobs.pin(key, pinned)

    def delete(self, key: str) -> bool:
        """Delete a blob, and return whether there was one."""
        self.blobs.begin()
        deleted = self.blobs.delete(key)
        self.follow()
        return deleted

    def clear(self) -> None:
        """Delete all blobs and pins."""
        self.blobs.begin()
        self.blobs.clear()
        self.refresh()

    def summary(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what the reports of all stores say; `pinned` counts these blobs."""
        pinned: frozenset[str] = frozenset()
        with self._count_failures():
            pinned = self.blobs.pinned().intersection(keys)
        usage = {"location": self.blobs.place, "bytes": self.bytes, "max_bytes": self.max_bytes, "hot_bytes": self.hot.bytes}
        return {**usage, "pinned": len(pinned), "damaged": len(self.blobs.complaints), **self.counts}

    def warn_once(self, kind: str, sentence: str) -> None:
        """Warn of the first event of each kind."""
        with self.lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)

    @contextlib.contextmanager
    def _count_failures(self) -> Iterator[None]:
        """Count an `OSError` of the store instead of raising it, and warn of the first."""
        try:
            yield
        except OSError as error:
            with self.lock:
                self.counts["failures"] += 1
            self.warn_once("unavailable", f"{self.blobs.place}: {str(error).rstrip('.')}. Prompts are computed instead, until it works.")


def bytes_of_size(argument: str, value: int | str | None) -> int | None:
    """Return the number of bytes that a number or a string such as "4GiB" names."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d+)?)\s*([kmgt]?)(i?)b?\s*", str(value).lower())
    number = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ") if match else 0.0
    if not 1 <= number < math.inf:
        raise ConfigError.of(argument, "a number of bytes, at least 1, or None", value, "Write such as '4GiB', or '500 MB'.")
    return int(number)
