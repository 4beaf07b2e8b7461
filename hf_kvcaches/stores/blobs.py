"""Named tensors with a head of facts about them, by key, in one place that several threads and processes share.

A place is named by a location: `memory`, `disk:FOLDER` or `redis://host:port/db`.
"""

from __future__ import annotations

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hf_kvcaches.errors import ConfigError, is_number
from hf_kvcaches.stores.blobs_format import checked_key, crc32_of, dense, head_as_json
from hf_kvcaches.stores.reading import as_bytes

# Seconds. A server in the same building answers within milliseconds, and what a cache saves is a second or two.
TIMEOUT = 1.0


class Stored(NamedTuple):
    """A blob of a store, without its tensors."""

    key: str
    head: dict[str, Any]
    bytes: int


class Changes(NamedTuple):
    """What happened to a store. A key in both was removed first: there is another blob under it now."""

    added: list[Stored]
    removed: list[str]


class StoreUnavailable(OSError):
    """A store can't be reached, is full or refuses. Nothing is half-written."""


class BlobStore(ABC):
    """Blobs by key. They never change: a blob is put, read by anyone, and deleted. Any method may be called from any thread.

    All methods but `close` raise `StoreUnavailable` if the place can't be used.

    Args:
        place: The location as it may be shown to a user, without passwords.

    Attributes:
        damaged: How many damaged blobs this object has deleted.
        complaints: A sentence for each of them.
        unreadable: For each key whose blob can't be used or replaced, though the place can, a sentence why. It is left alone.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.damaged = 0
        self.complaints: list[str] = []
        self.unreadable: dict[str, str] = {}
        self._lock = threading.Lock()
        # Held by `changes` from end to end, so that each change is reported once. It reads heads only, never bodies.
        self._reporting = threading.Lock()
        # The version of each blob that `changes` has reported.
        self._reported: dict[str, Hashable] = {}
        # As `_state` was at the last call of `changes`.
        self._reported_state: Hashable = None

    def begin(self) -> None:  # noqa: B027 - most answer at once
        """Begins a request in this thread: from now on its calls may wait for a server for `timeout` seconds in all."""

    @abstractmethod
    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        """Stores a blob and returns the bytes it takes. If there is one of this key, it is kept and nothing is written.

        Returns 0 where a blob can neither be read nor replaced: see `unreadable`.

        Args:
            key: Hexadecimal digits in small letters, such as a digest of what the tensors were made from.
            head: A small dict that comes back from JSON as it was. `changes` gives it without reading the tensors.
        """

    @abstractmethod
    def tensors(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of a blob, bit-equal to what was put; the caller must not write to them.

        None if there is no such blob (any more), or if it was damaged: then it has been deleted and is complained about.
        """

    def delete(self, key: str) -> bool:
        """Deletes a blob, and returns whether there was one. A pin stays until it is taken off."""
        return self._remove(checked_key(key))

    def changes(self) -> Changes:
        """What any process added and removed since this object's last call; at the first call all blobs are added.

        Blobs with damaged heads are deleted and complained about, and not among the result.
        """
        with self._reporting:
            state = self._state()
            if state is not None and state == self._reported_state:
                return Changes([], [])
            versions = self._versions()
            removed = [key for key, version in self._reported.items() if versions.get(key) != version]
            new = {key: version for key, version in versions.items() if self._reported.get(key) != version}
            added = self._read_heads(new)
            for key in removed:
                del self._reported[key]
            self._reported.update((blob.key, new[blob.key]) for blob in added)
            self._reported_state = state
            return Changes(added, removed)

    @abstractmethod
    def pin(self, key: str, pinned: bool = True) -> None:
        """Marks a key for all processes, whether or not there is a blob. The store gives no meaning to that."""

    @abstractmethod
    def pinned(self) -> frozenset[str]:
        """The keys that any process has marked."""

    @abstractmethod
    def clear(self) -> None:
        """Deletes all blobs and pins."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Closes connections. What is stored stays, unless it is in memory."""

    def _state(self) -> Hashable:
        """What changes with every blob that comes or goes, and is read faster than all versions; None where that is not known."""
        return None

    @abstractmethod
    def _versions(self) -> dict[str, Hashable]:
        """All keys, with what tells a blob from any other one under its key."""

    @abstractmethod
    def _read_heads(self, versions: Mapping[str, Hashable]) -> list[Stored]:
        """The blobs under these keys that are whole; damaged ones are discarded."""

    @abstractmethod
    def _remove(self, key: str) -> bool:
        """`delete`, without checking the key."""

    def discard(self, key: str, reason: object) -> None:
        """Deletes a damaged blob, and complains unless another thread or process has deleted it."""
        try:
            deleted = self._remove(key)
        except StoreUnavailable:
            # The next read finds the damage again.
            deleted = True
        if deleted:
            self._complain(key, reason)

    def _complain(self, key: str, reason: object) -> None:
        with self._lock:
            self.damaged += 1
            self.complaints.append(f"{self.place}: the blob {key} was damaged, {reason}. It has been deleted.")


class _MemoryBlob(NamedTuple):
    head: str
    tensors: dict[str, Tensor]
    crc32: int
    version: int

    @property
    def stored_bytes(self) -> int:
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors.values())


class MemoryBlobs(BlobStore):
    """Blobs in the memory of this process."""

    def __init__(self) -> None:
        super().__init__("memory")
        self._blobs: dict[str, _MemoryBlob] = {}
        self._pins: set[str] = set()
        self._numbers = count()

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        blob = self._blobs.get(checked_key(key))
        if blob is None:
            written = head_as_json(head)
            copies = {name: tensor.clone() for name, tensor in dense(tensors).items()}
            blob = _MemoryBlob(written, copies, _crc32(copies), next(self._numbers))
            with self._lock:
                blob = self._blobs.setdefault(key, blob)
        return blob.stored_bytes

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        blob = self._blobs.get(checked_key(key))
        if blob is None:
            return None
        # A reader may have written to the tensors that it got.
        if _crc32(blob.tensors) != blob.crc32:
            with self._lock:
                deleted = self._blobs.get(key) is blob
                if deleted:
                    del self._blobs[key]
            if deleted:
                self._complain(key, "the checksum of its tensors is wrong")
            return None
        # Aliases, so that a reader may reshape them in place.
        return {name: tensor.detach() for name, tensor in blob.tensors.items()}

    def pin(self, key: str, pinned: bool = True) -> None:
        with self._lock:
            (self._pins.add if pinned else self._pins.discard)(checked_key(key))

    def pinned(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._pins)

    def clear(self) -> None:
        with self._lock:
            self._blobs.clear()
            self._pins.clear()

    def _versions(self) -> dict[str, Hashable]:
        return {key: blob.version for key, blob in self._blobs.copy().items()}

    def _read_heads(self, versions: Mapping[str, Hashable]) -> list[Stored]:
        blobs = ((key, self._blobs.get(key)) for key in versions)
        return [Stored(key, json.loads(blob.head), blob.stored_bytes) for key, blob in blobs if blob is not None]

    def _remove(self, key: str) -> bool:
        with self._lock:
            return self._blobs.pop(key, None) is not None


def _crc32(tensors: Mapping[str, Tensor]) -> int:
    return crc32_of(map(as_bytes, tensors.values()))


def open_blobs(location: str, timeout: float = TIMEOUT) -> BlobStore:
    """Opens a store of blobs, or makes a new one where there is none.

    Args:
        location: `memory` (this object's own), `disk:FOLDER`, or `redis://host:port/db` or `rediss://...`, both with `?prefix=NAME` for
            several stores in one database.
        timeout: Seconds that one answer of Redis may take, and all calls of a request together. Others answer at once.
    """
    if not is_number(timeout) or not 0 < timeout < math.inf:
        raise ConfigError.of("timeout", "a number of seconds above 0", timeout, f"{TIMEOUT:g} is the default.")
    kind, colon, rest = location.partition(":") if isinstance(location, str) else ("", "", "")
    if location == "memory":
        return MemoryBlobs()
    if kind == "disk" and rest:
        from hf_kvcaches.stores.blobs_disk import open_disk

        return open_disk(Path(rest).expanduser())
    if colon and kind in ("redis", "rediss"):
        from hf_kvcaches.stores.blobs_redis import open_redis

        return open_redis(location, float(timeout))
    got = f"{kind}:..." if "@" in rest else location
    raise ConfigError.of("location", "'memory', 'disk:FOLDER' or 'redis://host:port/db'", got, "For a folder write disk: before it.")
