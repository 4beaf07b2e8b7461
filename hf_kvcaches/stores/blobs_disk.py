"""Blobs in a folder: a file for each."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs import BlobStore, Stored
from hf_kvcaches.stores.blobs_format import KEY, checked_key, encode, read_header, tensors_of
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX, opened, temporary_beside

BLOB, PIN = ".kvblob", ".kvblob-pin"
# Seconds. By age and not by a lock: it needs nothing of the file system, and the mtime of a file that is being written is fresh.
_STALE = 600.0
# Nanoseconds. Some file systems' time stamps are that far apart.
_TICK = 2 * 10**9


class DiskBlobs(BlobStore):
    """Blobs in a folder that processes share. A writer that is killed leaves a whole blob or none.

    Files are not synced: after a power cut the last ones may be damaged, which costs those blobs. Blobs are known by their names, which no
    other program gives: other files in the folder are never read, changed or deleted.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"disk:{folder}")
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporaries = [folder / name for name in os.listdir(folder) if name.endswith(TEMPORARY_SUFFIX)]
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
            # The kernel's own time stamps are milliseconds apart, in which a blob can be deleted and put again.
            now = time.time_ns()
            os.utime(temporary, ns=(now, now))
            os.replace(temporary, path)
        return sum(map(len, pieces))

    def read(self, key: str) -> dict[str, Tensor]:
        with opened(self._path(key)) as file:
            state = os.fstat(file.fileno())
            version, header = _version(state), read_header(key, state.st_size, file.read)
            # Memory is allocated for a size that the header confirms.
            body = np.empty(header.layout.size, np.uint8).data
            body = body[: file.readinto(body)]  # type: ignore[attr-defined]
        tensors = tensors_of(body, header, verify=self._verified.get(key) != version)
        self._verified[key] = version
        return tensors

    def delete(self, key: str) -> bool:
        try:
            self._path(key).unlink()
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def pin(self, key: str, pinned: bool = True) -> None:
        path = self._path(key, PIN)
        path.touch() if pinned else path.unlink(missing_ok=True)

    def pinned(self) -> frozenset[str]:
        return frozenset(self._entries(PIN))

    def versions(self) -> dict[str, Hashable]:
        versions: dict[str, Hashable] = {}
        for key, entry in self._entries(BLOB).items():
            with contextlib.suppress(OSError):  # another process has deleted it, or it is a link to nothing
                versions[key] = _version(entry.stat())
        return versions

    def heads(self, keys: list[str]) -> Iterator[Stored]:
        for key in keys:
            try:
                with opened(self._path(key)) as file:
                    header = read_header(key, os.fstat(file.fileno()).st_size, file.read)
                yield Stored(key, header.head, header.start + header.layout.size)
            except FileNotFoundError:
                pass
            except ArtifactError as error:
                self.discard(key, error)
            except OSError as error:
                self.unreadable = f"{self.place}: the blob {key} can't be read: {error}. It is left alone."

    def state(self) -> Hashable:
        modified = os.stat(self._folder).st_mtime_ns
        return None if time.time_ns() - modified < _TICK else modified

    def _path(self, key: str, suffix: str = BLOB) -> Path:
        return self._folder / f"{checked_key(key)}{suffix}"

    def _entries(self, suffix: str) -> dict[str, os.DirEntry[str]]:
        """The files of a kind, by their keys."""
        with os.scandir(self._folder) as entries:
            files = {entry.name.removesuffix(suffix): entry for entry in entries if entry.name.endswith(suffix)}
        return {key: entry for key, entry in files.items() if KEY.fullmatch(key)}


def _version(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_ino, state.st_mtime_ns, state.st_size
