"""Named tensors with a head of facts about them, by key, in one place that threads and processes share."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError, is_number
from hf_kvcaches.stores.blobs_format import checked_key, dense, head_as_json
from hf_kvcaches.stores.hot import aliases, bytes_of, slab

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
    """A server can't be reached, is full or refuses. Nothing is half-written."""


class BlobStore(ABC):
    """Blobs by key. A blob is put, read by anyone, and deleted; it never changes. Any method may be called from any thread.

    A back-end of one's own has the abstract methods, and where several processes share it `pin` and `pinned`. They raise an `OSError`
    where the place can't be used. An object serves one store, because it reports each change once.

    Args:
        place: The location as it may be shown to a user, without passwords.

    Attributes:
        complaints: A sentence for each damaged blob that this object has deleted.
        unreadable: A sentence about a blob that can't be read, though the place can, and is left alone; empty where there is none.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.complaints: list[str] = []
        self.unreadable = ""
        self.in_use = False
        self._lock = threading.RLock()
        self._pins: set[str] = set()
        # The version of each blob that `changes` has reported, and of each whose checksum was verified; the state that was reported.
        self._reported: dict[str, Hashable] = {}
        self._verified: dict[str, Hashable] = {}
        self._reported_state: Hashable = None

    @abstractmethod
    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        """Stores a copy of a blob and returns its bytes. If there is one of this key, hexadecimal digits in small letters, it is kept."""

    @abstractmethod
    def read(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of a blob, bit-equal to what was put; None where there is none. An `ArtifactError` tells that it is damaged."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Deletes a blob, and returns whether there was one. A pin stays until it is taken off."""

    @abstractmethod
    def versions(self) -> Mapping[str, Hashable]:
        """The keys of all blobs, with a value that tells a blob from any other one under its key."""

    @abstractmethod
    def heads(self, keys: list[str]) -> Iterable[Stored]:
        """The blobs under some keys, but for those that are gone or discarded."""

    def state(self) -> Hashable:
        """A value that changes with every blob that comes or goes, and is read faster than all versions; None where there is none."""
        return None

    def changes(self) -> Changes:
        """What any process added and removed since this object's last call; at the first call all blobs are added."""
        with self._lock:
            state = self.state()
            if state is not None and state == self._reported_state:
                return Changes([], [])
            versions, added = self.versions(), []
            removed = [key for key, version in self._reported.items() if versions.get(key) != version]
            try:
                for blob in self.heads([key for key, version in versions.items() if self._reported.get(key) != version]):
                    added.append(blob)
            except OSError:
                if not added:
                    raise
            for key in removed:
                del self._reported[key]
                self._verified.pop(key, None)
            self._reported.update((blob.key, versions[blob.key]) for blob in added)
            # Where some could not be read, the next call goes on with the list.
            self._reported_state = state if self._reported.keys() == versions.keys() else None
            return Changes(added, removed)

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of a blob, not to be written to; None where there is none, or a damaged one, which is deleted with a complaint."""
        try:
            return self.read(checked_key(key))
        except FileNotFoundError:
            return None
        except ArtifactError as error:
            self.discard(key, error)
            return None

    def begin(self) -> None:  # noqa: B027 - most answer at once
        """Begins a request in this thread: from now on its calls may wait for a server for `timeout` seconds in all."""

    def pin(self, key: str, pinned: bool = True) -> None:
        """Marks a key, whether or not there is a blob. The store gives no meaning to that."""
        with self._lock:
            (self._pins.add if pinned else self._pins.discard)(checked_key(key))

    def pinned(self) -> frozenset[str]:
        """The keys that are marked."""
        with self._lock:
            return frozenset(self._pins)

    def clear(self) -> None:
        """Deletes all blobs and pins."""
        for key in self.pinned():
            self.pin(key, False)
        for key in self.versions():
            self.delete(key)

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Closes connections. What is stored stays, unless it is in memory."""

    def discard(self, key: str, reason: object) -> None:
        """Deletes a damaged blob, and complains unless another thread or process has deleted it."""
        with contextlib.suppress(OSError):  # the next read finds the damage again
            if not self.delete(key):
                return
        self.complaints.append(f"{self.place}: the blob {key} was damaged, {reason}. It has been deleted.")


class MemoryBlobs(BlobStore):
    """Blobs in the memory of this process, pinned where there is CUDA."""

    def __init__(self) -> None:
        super().__init__("memory")
        # Each blob, its tensors, and an object of its own as version.
        self._blobs: dict[str, tuple[Stored, dict[str, Tensor], object]] = {}

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        blob = self._blobs.get(checked_key(key))
        if blob is None:
            text, copies = head_as_json(head), slab(dense(tensors))
            stored = Stored(key, json.loads(text), len(text) + bytes_of(copies))
            blob = self._blobs.setdefault(key, (stored, copies, object()))
        return blob[0].bytes

    def read(self, key: str) -> dict[str, Tensor] | None:
        blob = self._blobs.get(key)
        return None if blob is None else aliases(blob[1])

    def delete(self, key: str) -> bool:
        return self._blobs.pop(checked_key(key), None) is not None

    def versions(self) -> dict[str, Hashable]:
        return {key: version for key, (_, _, version) in self._blobs.copy().items()}

    def heads(self, keys: list[str]) -> list[Stored]:
        blobs = self._blobs.copy()
        return [blobs[key][0] for key in keys if key in blobs]


def open_blobs(location: str | BlobStore, timeout: float = TIMEOUT) -> BlobStore:
    """Opens a store of blobs, or makes a new one where there is none.

    Args:
        location: `memory` (this object's own), `disk:FOLDER`, or `redis://host:port/db` or `rediss://...`, both with `?prefix=NAME` for
            several stores in one database; or a `BlobStore` that serves no other store.
        timeout: Seconds that one answer of Redis may take, and all calls of a request together. Others answer at once.
    """
    if not is_number(timeout) or not 0 < timeout < math.inf:
        raise ConfigError.of("timeout", "a number of seconds above 0", timeout, f"{TIMEOUT:g} is the default.")
    if isinstance(location, BlobStore):
        if location.in_use:
            raise ConfigError.of("location", "a BlobStore that serves no other store", location.place, "Make another object of it.")
        location.in_use = True
        return location
    kind, colon, rest = location.partition(":") if isinstance(location, str) else ("", "", "")
    if location == "memory":
        return MemoryBlobs()
    if kind == "disk" and rest:
        from hf_kvcaches.stores.blobs_disk import DiskBlobs

        return DiskBlobs(Path(rest).expanduser())
    if colon and kind in ("redis", "rediss"):
        from hf_kvcaches.stores.blobs_redis import RedisBlobs

        return RedisBlobs(location, float(timeout))
    expected = "'memory', 'disk:FOLDER', 'redis://host:port/db' or an object of a BlobStore of your own"
    raise ConfigError.of("location", expected, f"{kind}:..." if "@" in rest else location, "For a folder write disk: before it.")
