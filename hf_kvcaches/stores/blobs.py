"""Blobs: named tensors and a head of JSON under a key, in memory or in a folder, shared by threads and processes."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs_format import KEY, checked_key, checked_tensors, dense, encode, head_as_json, read_header
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX, opened, write_atomically

BLOB, PIN = ".kvblob", ".kvblob-pin"
_STALE = 600.0  # seconds since the mtime of a temporary file, which is fresh while the file is written
_READERS = 4  # threads that read the blobs of one request: a disk answers several reads sooner than one after the other
_TICK = 2 * 10**9  # nanoseconds between time stamps on the coarsest file systems


class BlobHead(NamedTuple):
    """A stored blob without its tensors."""

    key: str
    head: dict[str, Any]
    bytes: int


class NewBlob(NamedTuple):
    """A blob to be stored."""

    key: str
    head: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Loaded(NamedTuple):
    """What was read of some blobs."""

    blobs: dict[str, dict[str, Tensor]]  # by key, without missing and damaged ones
    error: OSError | None = None  # the first failure of the back-end


class Changes(NamedTuple):
    """Changes of a store. A key in both lists was removed first: there is another blob under it now."""

    added: list[BlobHead]
    removed: list[str]


class StoreUnavailable(OSError):
    """A server can't be reached, is full or refuses a command. No blob is half-written."""


class BlobStore(ABC):
    """Blobs by key. A blob is put, read by anyone, and deleted; it never changes. Any method may be called from any thread.

    A back-end of your own has the abstract methods, and `pin` and `pinned` if processes share it. They raise an `OSError` if the back-end
    fails. An object serves one store, because it reports each change once.

    Args:
        place: The location for messages, without passwords.

    Attributes:
        complaints: A sentence for each damaged blob that this object deleted.
        unreadable: A sentence about the latest blob that could not be read, though others could; it is left alone.
    """

    def __init__(self, place: str) -> None:
        self.place, self.complaints, self.unreadable = place, list[str](), ""
        self.in_use = False
        self._lock, self._pins = threading.RLock(), set[str]()
        # Versions of the blobs that `changes` reported, and of those whose checksums were verified; the reported state.
        self._reported, self._verified = dict[str, Hashable](), dict[str, Hashable]()
        self._reported_state: Hashable = None

    @abstractmethod
    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        """Store a blob, unless its key (lower-case hexadecimal digits) has one, and return the bytes of the stored one.

        Nobody writes to the tensors afterwards, so they may be kept.
        """

    @abstractmethod
    def read(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of a blob, bit-equal to those that were put, or None if there is none; raise an `ArtifactError` for damage."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete a blob but not its pin, and return whether there was a blob."""

    @abstractmethod
    def versions(self) -> Mapping[str, Hashable]:
        """Return the keys of all blobs, each with a value that differs from those of all other blobs under the key."""

    @abstractmethod
    def heads(self, keys: list[str]) -> Iterable[BlobHead]:
        """Return the blobs under these keys, without those that are missing or damaged."""

    def state(self) -> Hashable:
        """Return a value that changes with each `put` and `delete` and is read faster than `versions`, or None if there is none."""
        return None

    def changes(self) -> Changes:
        """Return what any process added and removed since the last call of this object; in the first call all blobs are added."""
        with self._lock:
            state = self.state()
            if state is not None and state == self._reported_state:
                return Changes([], [])
            versions, added = self.versions(), list[BlobHead]()
            unchanged = {key: version for key, version in self._reported.items() if versions.get(key) == version}
            try:
                for blob in self.heads([key for key in versions if key not in unchanged]):
                    added.append(blob)
            except OSError:
                if not added:
                    raise
            removed = [key for key in self._reported if key not in unchanged]
            for key in removed:
                self._verified.pop(key, None)
            self._reported = unchanged | {blob.key: versions[blob.key] for blob in added}
            # If some heads could not be read, the next call reads them.
            self._reported_state = state if self._reported.keys() == versions.keys() else None
            return Changes(added, removed)

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of a blob, which are read-only; None if it is missing or damaged. Discard a damaged blob."""
        try:
            return self.read(checked_key(key))
        except ArtifactError as error:
            self.discard(key, error)
            return None

    def get_many(self, keys: Sequence[str]) -> Loaded:
        """Read several blobs, as `tensors` does. A failed read is a miss; behind one for want of a connection no other key is tried."""
        blobs: dict[str, dict[str, Tensor]] = {}
        first: OSError | None = None
        for key in keys:
            try:
                if (tensors := self.tensors(key)) is not None:
                    blobs[key] = tensors
            except OSError as error:
                first = first or error
                if isinstance(error, StoreUnavailable | ConnectionError | TimeoutError):  # each key would wait as long again
                    break
        return Loaded(blobs, first)

    def put_many(self, blobs: Sequence[NewBlob]) -> None:
        """Store several blobs in their order; an `OSError` leaves those behind it unstored."""
        for blob in blobs:
            self.put(*blob)

    def begin(self) -> None:  # noqa: B027 - most answer at once
        """Begin a request in this thread: its calls may wait for a server for `timeout` seconds in all."""

    def pin(self, key: str, pinned: bool = True) -> None:
        """Pin or unpin a key, with or without a blob. The store itself evicts nothing."""
        (self._pins.add if pinned else self._pins.discard)(checked_key(key))

    def pinned(self) -> frozenset[str]:
        """Return the pinned keys."""
        return frozenset(self._pins.copy())

    def clear(self) -> None:
        """Delete all blobs and pins."""
        for key in self.pinned():
            self.pin(key, False)
        for key in self.versions():
            self.delete(key)

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close connections. Blobs stay, unless they are in memory."""

    def discard(self, key: str, error: ArtifactError) -> None:
        """Delete a damaged blob, with a complaint unless another thread or process deleted it."""
        with contextlib.suppress(OSError):  # the next read detects the damage again
            if not self.delete(key):
                return
        self.complaints.append(f"{self.place}: the blob {key} was damaged, {error}. It has been deleted.")


class MemoryBlobs(BlobStore):
    """Blobs in the memory of this process, pinned if there is CUDA."""

    def __init__(self) -> None:
        super().__init__("memory")
        self._blobs: dict[str, tuple[BlobHead, dict[str, Tensor], object]] = {}  # the object is the version
        self._state = object()  # replaced after each change

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        blob = self._blobs.get(checked_key(key))
        if blob is None:
            text, kept = head_as_json(head), resident(dense(tensors))
            entry = BlobHead(key, json.loads(text), len(text) + bytes_of(kept))
            blob = self._blobs.setdefault(key, (entry, kept, object()))
            self._state = object()
        return blob[0].bytes

    def read(self, key: str) -> dict[str, Tensor] | None:
        blob = self._blobs.get(key)
        return None if blob is None else aliases(blob[1])

    def delete(self, key: str) -> bool:
        blob = self._blobs.pop(checked_key(key), None)
        self._state = object()
        return blob is not None

    def state(self) -> Hashable:
        return self._state

    def versions(self) -> dict[str, Hashable]:
        return {key: version for key, (_, _, version) in self._blobs.copy().items()}

    def heads(self, keys: list[str]) -> list[BlobHead]:
        return [blob[0] for key in keys if (blob := self._blobs.get(key)) is not None]


class DiskBlobs(BlobStore):
    """Blobs in a folder that processes share. A killed writer leaves a complete blob or none.

    Files are not synced: a power cut may damage the latest blobs, which are then misses. Files with other names are never touched.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"disk:{folder}")
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in (path for path in folder.iterdir() if path.name.endswith(TEMPORARY_SUFFIX)):
                with contextlib.suppress(OSError):
                    if time.time() - path.lstat().st_mtime > _STALE:
                        path.unlink()
        except OSError as error:
            raise ConfigError.of("location", "a folder that can be written to", str(error), "Name another folder.") from error

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        path = self._path(key)
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_size
        pieces = encode(key, head, tensors)
        write_atomically(path, pieces, sync=False)
        return sum(map(len, pieces))

    def read(self, key: str) -> dict[str, Tensor] | None:
        try:
            with opened(self._path(key)) as file:
                status = os.fstat(file.fileno())
                _, layout, crc32 = read_header(key, status.st_size, file.read)
                body = np.empty(layout.size, np.uint8).data  # the header confirms its size
                if file.readinto(body) < len(body):
                    raise ArtifactError("it ends too early")
        except FileNotFoundError:
            return None
        tensors = checked_tensors(body, layout, None if self._verified.get(key) == _version(status) else crc32)
        self._verified[key] = _version(status)
        return tensors

    def get_many(self, keys: Sequence[str]) -> Loaded:
        with ThreadPoolExecutor(_READERS, "hf_kvcaches-read") as pool:
            parts = list(pool.map(super().get_many, ([key] for key in keys)))
        blobs = {key: blob for part in parts for key, blob in part.blobs.items()}
        return Loaded(blobs, next((part.error for part in parts if part.error is not None), None))

    def delete(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            self._path(key).unlink()
            return True
        return False

    def pin(self, key: str, pinned: bool = True) -> None:
        path = self._path(key, PIN)
        path.touch() if pinned else path.unlink(missing_ok=True)

    def pinned(self) -> frozenset[str]:
        return frozenset(self._entries(PIN))

    def versions(self) -> dict[str, Hashable]:
        versions: dict[str, Hashable] = {}
        for key, entry in self._entries(BLOB).items():
            with contextlib.suppress(OSError):  # another process has deleted it, or it is a broken link
                versions[key] = _version(entry.stat())
        return versions

    def heads(self, keys: list[str]) -> Iterator[BlobHead]:
        for key in keys:
            try:
                with opened(self._path(key)) as file:
                    size = os.fstat(file.fileno()).st_size
                    yield BlobHead(key, read_header(key, size, file.read)[0], size)
            except ArtifactError as error:
                self.discard(key, error)
            except FileNotFoundError:
                pass
            except OSError as error:
                self.unreadable = f"{self.place}: the blob {key} can't be read: {error}. It is left alone."

    def state(self) -> Hashable:
        modified = os.stat(self._folder).st_mtime_ns
        return None if time.time_ns() - modified < _TICK else modified

    def _path(self, key: str, suffix: str = BLOB) -> Path:
        return self._folder / f"{checked_key(key)}{suffix}"

    def _entries(self, suffix: str) -> dict[str, os.DirEntry[str]]:
        """Return the files with this suffix by their keys."""
        with os.scandir(self._folder) as entries:
            files = {entry.name.removesuffix(suffix): entry for entry in entries if entry.name.endswith(suffix)}
        return {key: entry for key, entry in files.items() if KEY.fullmatch(key)}


def _version(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size


def resident(tensors: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return tensors on a device; on the CPU, the default, in pinned memory if there is CUDA, for asynchronous transfers."""
    if torch.cuda.is_available() and (device is None or device.type == "cpu"):
        with contextlib.suppress(RuntimeError):  # no more memory can be pinned: transfers are synchronous
            return {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return {name: tensor.to(device or "cpu") for name, tensor in tensors.items()}


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return other tensors on the same memory, which a reader may reshape in place."""
    return {name: tensor.detach() for name, tensor in tensors.items()}


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())
