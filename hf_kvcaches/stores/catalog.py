"""The contents of a store of blobs, in step with other processes and within a cap."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol

from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs import BlobStore, Stored, StoreUnavailable, open_blobs
from hf_kvcaches.stores.worth import Worth

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
# How often other blobs are evicted in place of those that can't be deleted.
_ROUNDS = 8


class Contents(Protocol):
    """An index of the blobs of a store. It is called under the catalog's lock, and does not call the catalog."""

    def add(self, blobs: Sequence[Stored]) -> Mapping[str, int]:
        """Indexes new blobs, and returns the tokens of each that counts towards the cap. Others are no blobs of this kind."""

    def remove(self, keys: Sequence[str]) -> None:
        """Forgets blobs that are gone; unknown keys are ignored."""

    def expired(self) -> Sequence[str]:
        """Blobs to evict whatever the cap."""


class Catalog:
    """The blobs of one place with their worth: reads them, applies changes of other processes, and evicts above a cap.

    A failed or damaged read counts as a miss, and each kind of failure warns once. `delete`, `pin` and `clear` raise `StoreUnavailable`.

    Args:
        max_bytes: The cap, a number or such as `"4GiB"`; None for none.
        noun: What a blob is to a user, such as "segment".

    Attributes:
        lock: The contents change under it alone. Nothing that may wait for a server is called under it.
        counts: Reads of tensors, blobs written and evicted by this process, and failures of the place.
    """

    def __init__(self, location: str, timeout: float, max_bytes: int | str | None, contents: Contents, noun: str) -> None:
        self.max_bytes = _bytes_of(max_bytes)
        self.contents, self.noun = contents, noun
        self.blobs: BlobStore = open_blobs(location, timeout)
        self.place = self.blobs.place
        self.worth = Worth()
        self.lock = threading.RLock()
        self.counts = dict.fromkeys(("loads", "written", "evicted", "failures"), 0)
        # Changes are fetched and applied in their order.
        self._following = threading.Lock()
        self._warned: set[str] = set()

    def refresh(self) -> None:
        """Begins a request: applies what other processes changed, and evicts what exceeds the cap."""
        self.blobs.begin()
        self.follow()
        self.evict()

    def follow(self) -> None:
        """Applies all changes, also those of this process: the contents are what the place reports, and nothing else."""
        try:
            with self._following:
                changes = self.blobs.changes()
                with self.lock:
                    for key in changes.removed:
                        self.worth.remove(key)
                    self.contents.remove(changes.removed)
                    tokens = self.contents.add(changes.added)
                    for key, _, size in changes.added:
                        if key in tokens:
                            self.worth.add(key, size, tokens[key])
        except StoreUnavailable as error:
            self._failed(error)
        else:
            if len(tokens) < len(changes.added):
                sentence = f"{self.place} holds something that is no {self.noun}, or one of another version; it is left alone."
                self.warn_once("unreadable", sentence)
        if self.blobs.damaged:
            self.warn_once("damaged", f"A damaged {self.noun} is made anew. {self.blobs.complaints[0]}")
        for sentence in list(self.blobs.unreadable.values())[:1]:
            self.warn_once("unusable", sentence)

    def read(self, key: str, check: Callable[[dict[str, Tensor]], None]) -> dict[str, Tensor] | None:
        """The tensors of a blob, not to be written to; None where it is gone, damaged or can't be read.

        Args:
            check: Raises an `ArtifactError` for tensors that are not those of the blob's head: it is deleted then.
        """
        try:
            tensors = self.blobs.tensors(key)
        except StoreUnavailable as error:
            self._failed(error)
            return None
        self._count("loads")
        if tensors is not None:
            try:
                check(tensors)
            except ArtifactError as error:
                self.blobs.discard(key, error)
                tensors = None
        if tensors is None:
            self.follow()
        return tensors

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor], *, reported: bool = True) -> bool:
        """Stores a blob, and returns whether the place could be used."""
        self.blobs.begin()
        try:
            size = self.blobs.put(key, head, tensors)
        except StoreUnavailable as error:
            self._failed(error)
            return False
        self._count("written", reported and size > 0)
        return True

    def evict(self) -> None:
        """Deletes expired blobs, and those of least worth above the cap; others in place of those that can't be deleted."""
        stuck: set[str] = set()
        for _ in range(_ROUNDS):
            victims = self._victims(stuck)
            if not victims:
                return
            for key in victims:
                try:
                    deleted = self.blobs.delete(key)
                except StoreUnavailable as error:
                    self._failed(error)
                    deleted = False
                if deleted:
                    self._count("evicted")
                else:
                    stuck.add(key)
            self.follow()

    def _victims(self, stuck: Collection[str]) -> list[str]:
        with self.lock:
            expired, cap = self.contents.expired(), self.max_bytes
            if not expired and (cap is None or self.worth.total <= cap):
                return []
        try:
            # Without the pins of other processes nothing may be evicted.
            keep = self.blobs.pinned().union(stuck)
        except StoreUnavailable as error:
            self._failed(error)
            return []
        with self.lock:
            victims = [key for key in expired if key in self.worth.sizes and key not in keep]
            if cap is None or self.worth.total <= cap:
                return victims
            keep = keep.union(victims)
            # A blob that is too large by itself would drive out all others first.
            victims += [key for key, size in self.worth.sizes.items() if size > cap and key not in keep]
            excess = self.worth.total - cap - sum(self.worth.sizes[key] for key in victims)
            return [*victims, *self.worth.least(excess, keep=keep.union(victims))]

    def used(self, key: str, tokens: int) -> None:
        """Counts the work that a blob saved."""
        with self.lock:
            self.worth.used(key, tokens)

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keeps a blob from eviction, by any process."""
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

    def close(self) -> None:
        """Closes connections. What is stored stays, unless it is in memory."""
        self.blobs.close()

    def summary(self, among: Collection[str]) -> dict[str, Any]:
        """What a report of any store says."""
        try:
            pinned = self.blobs.pinned()
        except StoreUnavailable as error:
            self._failed(error)
            pinned = frozenset()
        with self.lock:
            usage = {"location": self.place, "bytes": self.worth.total, "max_bytes": self.max_bytes}
            return {**usage, "pinned": len(pinned.intersection(among)), "damaged": self.blobs.damaged, **self.counts}

    def warn_once(self, kind: str, sentence: str) -> None:
        """Warns of each kind of event the first time."""
        with self.lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)

    def _count(self, event: str, number: int = 1) -> None:
        with self.lock:
            self.counts[event] += number

    def _failed(self, error: Exception) -> None:
        self._count("failures")
        self.warn_once("unavailable", f"{self.place}: {error} Prompts are computed instead, until it can be used.")


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
        raise ConfigError.of("max_bytes", "a number of bytes, at least 1, or None", value, "Write such as '4GiB', or '500 MB'.")
    return int(number)
