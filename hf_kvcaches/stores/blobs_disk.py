"""Blobs as files in a folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs import BlobHead, BlobStore, Loaded
from hf_kvcaches.stores.blobs_format import KEY, checked_key, checked_tensors, encode, read_header
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX, opened, temporary_beside

BLOB, PIN = ".kvblob", ".kvblob-pin"
_STALE = 600.0  # seconds since the mtime of a temporary file, which is fresh while the file is written
_READERS = 4  # threads that read the blobs of one request: a disk answers several reads sooner than one after the other
_TICK = 2 * 10**9  # nanoseconds between time stamps on the coarsest file systems


class DiskBlobs(BlobStore):
    """Blobs in a folder that processes share. A killed writer leaves a complete blob or none.

    Files are not synced: a power cut may damage the latest blobs, which are then misses. Files with other names are never touched.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"disk:{folder}")
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporaries = [path for path in folder.iterdir() if path.name.endswith(TEMPORARY_SUFFIX)]
        except OSError as error:
            raise ConfigError.of("location", "a folder that can be written to", str(error), "Name another folder.") from error
        for path in temporaries:
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _STALE:
                    path.unlink()

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        path = self._path(key)
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_size
        pieces = encode(key, head, tensors)
        with temporary_beside(path) as temporary:
            with open(temporary, "xb") as file:
                file.writelines(pieces)
            # The kernel's time stamps are milliseconds apart, and a blob can be deleted and put again within one.
            now = time.time_ns()
            os.utime(temporary, ns=(now, now))
            os.replace(temporary, path)
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
        errors = [part.error for part in parts if part.error is not None]
        return Loaded({key: blob for part in parts for key, blob in part.blobs.items()}, errors[0] if errors else None)

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
