"""Blobs: named tensors and a head of JSON under a key, in a store that threads and processes share."""

from __future__ import annotations

import contextlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.stores.blobs_format import checked_key, dense, head_as_json


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
    """What was read of some blobs: tensors by key, without missing and damaged ones; and the first failure of the back-end, if any."""

    blobs: dict[str, dict[str, Tensor]]
    error: OSError | None = None


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
        self.place = place
        self.complaints: list[str] = []
        self.unreadable = ""
        self.in_use = False
        self._lock = threading.RLock()
        self._pins: set[str] = set()
        # Versions of the blobs that `changes` reported, and of those whose checksums were verified; the reported state.
        self._reported: dict[str, Hashable] = {}
        self._verified: dict[str, Hashable] = {}
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
            versions, added = self.versions(), []
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
        """Read several blobs, as `tensors` does, up to the first failure. A back-end with slow reads overlaps them."""
        blobs: dict[str, dict[str, Tensor]] = {}
        try:
            for key in keys:
                if (tensors := self.tensors(key)) is not None:
                    blobs[key] = tensors
        except OSError as error:
            return Loaded(blobs, error)
        return Loaded(blobs)

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
        # Each blob, its tensors, and an object of its own as version.
        self._blobs: dict[str, tuple[BlobHead, dict[str, Tensor], object]] = {}
        self._state = object()  # replaced behind each change

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
