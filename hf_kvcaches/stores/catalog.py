"""The catalog of a blob store: reads, changes of other processes, and eviction above a cap."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError, is_number
from hf_kvcaches.stores.blobs import BlobHead, BlobStore, DiskBlobs, Loaded, MemoryBlobs, NewBlob, aliases, bytes_of, resident
from hf_kvcaches.stores.blobs_redis import RedisBlobs

TIMEOUT = 1.0  # seconds: a server in the same building answers within milliseconds, and a hit saves a second or two


class Contents(Protocol):
    """An index of the blobs of a store. The catalog calls it under its lock, and it does not call the catalog."""

    def add(self, blobs: Sequence[BlobHead]) -> Mapping[str, int]:
        """Index new blobs, and return the tokens of those of this kind, by key; others don't count towards the cap."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove blobs from the index; ignore unknown keys."""


@dataclass
class CatalogEntry:
    """A blob in the catalog of this process."""

    size: int  # bytes
    expires: float  # seconds since 1970
    saved: int = 0  # tokens of work
    worth: float = 0.0
    checked: bool = False  # whether its tensors passed the check of a reader


class Catalog:
    """The blobs of one store: reads them, applies changes of other processes, and evicts those of least worth above a cap.

    A failed or damaged read counts as a miss, and each kind of failure warns once. `delete`, `pin` and `clear` raise `OSError`.

    The worth of a blob is the work that it saved, in tokens per byte, plus the clock at its last use. The clock is the worth of the blob
    evicted last, so unused blobs are evicted in the end (greedy-dual size frequency, Cherkasova, 1998). A new blob counts as used once.
    """

    def __init__(
        self,
        location: str | BlobStore,
        contents: Contents,
        noun: str,  # the user's word for a blob, such as "segment"
        *,
        timeout: float = TIMEOUT,
        max_bytes: int | str | None = None,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_bytes, self._max_hot = bytes_of_size("max_bytes", max_bytes), bytes_of_size("hot_bytes", hot_bytes) or 0
        if time_to_live is not None and not (is_number(time_to_live) and time_to_live > 0):
            raise ConfigError.of("time_to_live", "a number of seconds above 0, or None", time_to_live)
        self.contents, self.noun, self.clock = contents, noun, clock
        self.time_to_live = math.inf if time_to_live is None else time_to_live
        self.blobs = open_blobs(location, timeout)
        # In the order of their last use: of two of the same worth the older one is evicted first.
        self.entries: OrderedDict[str, CatalogEntry] = OrderedDict()
        self.bytes, self._eviction_clock = 0, 0.0
        # The tensors of the entries that were read last, all on one device.
        self._hot: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._hot_bytes = 0
        self._hot_device: torch.device | None = None
        # Guards contents and entries. No call that may wait for a server is made under it.
        self.lock = threading.RLock()
        self.counts = dict.fromkeys(("loads", "hot_hits", "written", "evicted", "failures"), 0)
        self._changes_lock = threading.Lock()  # changes are applied in the order in which they are fetched
        self._warned: set[str] = set()
        self.read_once = location == "memory"  # whether the entries are those of the store at the last look-up; nobody else writes there

    def refresh(self) -> None:
        """Begin a request: apply the changes of other processes, and evict expired blobs and those above the cap."""
        self.blobs.begin()
        self.follow()
        self.evict()

    def follow(self) -> None:
        """Apply all changes, also those of this process: the entries are the blobs that the store reports, and no others."""
        try:
            with self._changes_lock:
                added, removed = self.blobs.changes()
                self.read_once = True
                if added or removed:
                    self._apply(added, removed)
        except OSError as error:
            self._failed(error)
        if self.blobs.complaints:
            self.warn_once("damaged", f"A damaged {self.noun} is made anew. {self.blobs.complaints[0]}")
        if self.blobs.unreadable:
            self.warn_once("unreadable", self.blobs.unreadable)

    def _apply(self, added: Sequence[BlobHead], removed: Sequence[str]) -> None:
        with self.lock:
            for key in removed:
                if (entry := self.entries.pop(key, None)) is not None:
                    self.bytes -= entry.size
                self._cool(key)
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

    def read(
        self, keys: Sequence[str], check: Callable[[str, dict[str, Tensor]], object], device: torch.device | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of blobs, which are read-only, without those that are missing, expired, damaged or unreadable.

        `check` is called once for each blob and raises an `ArtifactError` for tensors that don't fit its head: it is deleted then. The hot
        tier is on the device that the first read names. Tensors outside of it are on the CPU.
        """
        with self.lock:
            now, entries = self.clock(), {key: self.entries.get(key) for key in keys}
            living = [key for key, entry in entries.items() if entry is None or entry.expires >= now]
            blobs = {key: aliases(self._hot[key]) for key in living if key in self._hot}
            for key in blobs:
                self._hot.move_to_end(key)
            self.counts["hot_hits"] += len(blobs)
        missing = [key for key in living if key not in blobs]
        loaded, error = self.blobs.get_many(missing) if missing else Loaded({})
        if error is not None:
            self._failed(error)
        for key, tensors in loaded.items():
            try:
                if (entry := entries[key]) is None or not entry.checked:
                    check(key, tensors)
                blobs[key] = tensors if entry is None else self._warmed(key, entry, tensors, device)
            except ArtifactError as damage:
                self.blobs.discard(key, damage)
        with self.lock:
            self.counts["loads"] += len(loaded)
        if len(blobs) < len(living):
            self.follow()
        return blobs

    def _warmed(self, key: str, entry: CatalogEntry, tensors: dict[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
        """Return the checked tensors of an entry; where they fit, on the device of the hot tier, which keeps them."""
        size = bytes_of(tensors)
        if size <= self._max_hot:
            self._hot_device = self._hot_device or device or torch.device("cpu")
            tensors = resident(tensors, self._hot_device)
        with self.lock:
            # A blob that another thread deleted or replaced must not be a hit later.
            if self.entries.get(key) is entry:
                entry.checked = True
                if size <= self._max_hot and key not in self._hot:
                    self._hot[key] = aliases(tensors)
                    self._hot_bytes += size
                    while self._hot_bytes > self._max_hot:
                        self._cool(next(iter(self._hot)))
        return tensors

    def _cool(self, key: str) -> None:
        self._hot_bytes -= bytes_of(self._hot.pop(key, {}))

    def put(self, blobs: Iterable[NewBlob]) -> None:
        """Store blobs in their order. A head without `created` gets it, in seconds since 1970."""
        # Whole seconds, so that blobs of one kind have equally many bytes.
        created = float(int(self.clock()))
        with self._count_failures():
            for key, head, tensors in blobs:
                self.blobs.begin()  # each is a request of its own: no token waits for it
                self.blobs.put(key, {"created": created, **head}, tensors)
                with self.lock:
                    self.counts["written"] += 1

    def evict(self) -> None:
        """Delete expired blobs, and above the cap those of least worth; if a blob can't be deleted, the next one is."""
        now, cap = self.clock(), math.inf if self.max_bytes is None else self.max_bytes
        if self.bytes <= cap and self.time_to_live == math.inf:
            return
        with self.lock:
            entries, total = dict(self.entries), self.bytes
        expired, candidates = {key for key, entry in entries.items() if entry.expires < now}, list[str]()
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
        """Count tokens that a blob saved, unless it was evicted."""
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
        pinned = 0
        with self._count_failures():
            pinned = len(self.blobs.pinned().intersection(keys))
        usage = {"location": self.blobs.place, "bytes": self.bytes, "max_bytes": self.max_bytes, "hot_bytes": self._hot_bytes}
        return {**usage, "pinned": pinned, "damaged": len(self.blobs.complaints), **self.counts}

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
            self._failed(error)

    def _failed(self, error: OSError) -> None:
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


def open_blobs(location: str | BlobStore, timeout: float = TIMEOUT) -> BlobStore:
    """Open a store of blobs, or create it.

    Args:
        location: `memory` (of this object alone), `disk:FOLDER`, or `redis://host:port/db` or `rediss://...`, both with `?prefix=NAME` if
            several stores share a database; or a `BlobStore` that serves no other store.
        timeout: Seconds that one answer of Redis may take, and all calls of a request together.
    """
    if not is_number(timeout) or not 0 < timeout < math.inf:
        raise ConfigError.of("timeout", "a number of seconds above 0", timeout, f"{TIMEOUT:g} is the default.")
    if isinstance(location, BlobStore):
        if location.in_use:
            raise ConfigError.of("location", "a BlobStore that serves no other store", location.place, "Make another object of it.")
        location.in_use = True
        return location
    kind, _, rest = location.partition(":") if isinstance(location, str) else ("", "", "")
    if location == "memory":
        return MemoryBlobs()
    if kind == "disk" and rest:
        return DiskBlobs(Path(rest).expanduser())
    if kind in ("redis", "rediss"):
        return RedisBlobs(location, float(timeout))
    expected = "'memory', 'disk:FOLDER', 'redis://host:port/db' or an object of a BlobStore of your own"
    raise ConfigError.of("location", expected, f"{kind}:..." if "@" in rest else location, "For a folder write disk: before it.")
