"""Named tensors with a head of facts about them, by key, in one place that several threads and processes share.

A place is named by a location: `memory`, `disk:FOLDER` or `redis://host:port/db`.
"""

from __future__ import annotations

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.errors import ConfigError, is_number
from hf_kvcaches.stores.blobs_format import checked_key, crc32_of, dense, head_as_json
from hf_kvcaches.stores.reading import as_bytes

# Seconds. A server in the same building answers within milliseconds, and what a cache saves is a second or two.
TIMEOUT = 1.0


class Stored(NamedTuple):
    """A blob that a store has."""

    key: str
    head: dict[str, Any]
    bytes: int


class Changes(NamedTuple):
    """What happened to a store. A key in both was removed first: there is another blob in its place."""

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
        damaged: How many blobs this object has found damaged.
        complaints: A sentence for each of them.
        unreadable: For each key whose blob can't be used or replaced, though the place can, a sentence why. It is left alone.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.damaged = 0
        self.complaints: list[str] = []
        self.unreadable: dict[str, str] = {}
        self._lock = threading.Lock()
        # Held by `changes` from end to end, so that each change is told to one caller. It reads heads only, never bodies.
        self._telling = threading.Lock()
        # What `changes` has told of: the key and what distinguishes the blob from another one of the same key.
        self._told: dict[str, str] = {}
        # Keys that `changes` shall look at whatever the place itself tells of.
        self._touched: set[str] = set()

    def begin(self) -> None:  # noqa: B027 - most answer at once
        """Says that a request begins in this thread: from now on its calls may wait for a server for `timeout` seconds in all."""

    @abstractmethod
    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        """Stores a blob and returns the bytes it takes. If there is one of this key, it is kept and nothing is written.

        Returns 0 where something stands in the blob's place that can't be used: see `unreadable`.

        Args:
            key: Hexadecimal digits in small letters, such as a digest of what the tensors were made from.
            head: A small dict that comes back from JSON as it was. `changes` hands it out without reading the tensors.
        """

    @abstractmethod
    def tensors(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of a blob, all bits of them as they were put; the caller must not write to them.

        None if there is no such blob (any more), or if it was damaged: then it has been deleted and is complained about.
        """

    def delete(self, key: str) -> bool:
        """Deletes a blob, and returns whether there was one. A pin stays until it is taken off."""
        return self._remove(checked_key(key))

    def changes(self) -> Changes:
        """What came and went, by whatever process, since this object's last call; at the first call all that is there.

        Blobs with damaged heads are deleted and complained about, and not among the result.
        """
        with self._telling:
            with self._lock:
                touched, self._touched = self._touched, set()
            try:
                return self._news(self._look(touched))
            except BaseException:
                with self._lock:
                    self._touched |= touched
                raise

    @abstractmethod
    def pin(self, key: str, pinned: bool = True) -> None:
        """Marks a key for all processes, whether or not there is a blob. The store gives no meaning to that."""

    @abstractmethod
    def pinned(self) -> frozenset[str]:
        """The keys that any process has marked."""

    @abstractmethod
    def clear(self) -> None:
        """Deletes all blobs and pins."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Lets go of connections. What is stored stays, unless it is in memory."""

    @abstractmethod
    def _look(self, touched: set[str]) -> dict[str, tuple[str, Stored] | None]:
        """What there is now at keys that may have changed: what distinguishes the blob from others, and the blob; None: nothing.

        If it raises, the next call starts where this one did.
        """

    @abstractmethod
    def _remove(self, key: str) -> bool:
        """`delete`, of a key that was checked or found."""

    def _news(self, found: Mapping[str, tuple[str, Stored] | None]) -> Changes:
        """What of the found the owner has not been told yet. From now on he has."""
        news = Changes([], [])
        for key, now in found.items():
            before = self._told.pop(key, None)
            if now is not None:
                self._told[key] = now[0]
            if before is not None and (now is None or before != now[0]):
                news.removed.append(key)
            if now is not None and before != now[0]:
                news.added.append(now[1])
        return news

    def _touch(self, key: str) -> None:
        with self._lock:
            self._touched.add(key)

    def _missed(self, key: str) -> None:
        """A blob is gone. Its end may not have been told of, as when another process had no room to do so."""
        if key in self._told:
            self._touch(key)

    def discard(self, key: str, reason: object) -> None:
        """Deletes what was found damaged, and complains unless another was quicker."""
        try:
            there = self._remove(key)
        except StoreUnavailable:
            # It is found again, and again not handed out.
            there = True
        if there:
            self._complain(key, reason)

    def _complain(self, key: str, reason: object) -> None:
        with self._lock:
            self.damaged += 1
            self.complaints.append(f"{self.place}: the blob {key} was damaged, {reason}. It has been deleted.")


class _Kept(NamedTuple):
    """A blob in memory. The number sets it apart from others that had its key."""

    head: str
    tensors: dict[str, Tensor]
    whole: Tensor
    crc32: int
    bytes: int
    number: int


def _side_by_side(tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Copies in one stretch of memory, which is checked much faster than many small ones, and the stretch."""
    # Each begins where any type may begin.
    starts = list(accumulate((-(-tensor.nbytes // 16) * 16 for tensor in tensors.values()), initial=0))
    whole = torch.zeros(starts[-1], dtype=torch.uint8)
    copies = {}
    for (name, tensor), start in zip(tensors.items(), starts, strict=False):
        copies[name] = whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies[name].copy_(tensor)
    return whole, copies


class MemoryBlobs(BlobStore):
    """Blobs in the memory of this process."""

    def __init__(self) -> None:
        super().__init__("memory")
        self._kept: dict[str, _Kept] = {}
        self._pins: set[str] = set()
        self._number = 0

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        present = self._kept.get(checked_key(key))
        if present is not None:
            return present.bytes
        written = head_as_json(head)
        whole, copies = _side_by_side(dense(tensors))
        size = len(written) + sum(tensor.nbytes for tensor in copies.values())
        crc32 = crc32_of([as_bytes(whole)])
        with self._lock:
            self._number += 1
            self._touched.add(key)
            return self._kept.setdefault(key, _Kept(written, copies, whole, crc32, size, self._number)).bytes

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        kept = self._kept.get(checked_key(key))
        if kept is None:
            return None
        # Someone one may have written into what was handed out.
        if crc32_of([as_bytes(kept.whole)]) != kept.crc32:
            with self._lock:
                mine = self._kept.get(key) is kept
                if mine:
                    del self._kept[key]
                    self._touched.add(key)
            if mine:
                self._complain(key, "the checksum of its tensors is wrong")
            return None
        # Aliases, so that a caller who reshapes one in place reshapes his own.
        return {name: tensor.detach() for name, tensor in kept.tensors.items()}

    def pin(self, key: str, pinned: bool = True) -> None:
        with self._lock:
            (self._pins.add if pinned else self._pins.discard)(checked_key(key))

    def pinned(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._pins)

    def clear(self) -> None:
        with self._lock:
            self._touched.update(self._kept)
            self._kept.clear()
            self._pins.clear()

    def _look(self, touched: set[str]) -> dict[str, tuple[str, Stored] | None]:
        found = {key: self._kept.get(key) for key in touched}
        return {
            key: None if kept is None else (str(kept.number), Stored(key, json.loads(kept.head), kept.bytes)) for key, kept in found.items()
        }

    def _remove(self, key: str) -> bool:
        with self._lock:
            self._touched.add(key)
            return self._kept.pop(key, None) is not None


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
