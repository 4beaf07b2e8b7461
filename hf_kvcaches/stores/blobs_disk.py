"""Blobs in a folder: a file for each, and a journal that tells other processes of what came and went."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs import BlobStore, Stored, StoreUnavailable
from hf_kvcaches.stores.blobs_format import KEY, Encoded, checked_key, decode, encode, header_length, read_header
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX, write_atomically

_BLOB, _PIN = ".safetensors", ".pin"
_JOURNAL = "changes.journal"
_LINE = re.compile(rb"[+-]([0-9a-f]{1,128})")
_TITLE_BYTES = 32
# A longer journal is replaced when the store is opened. 1 MB is some 15,000 puts, or 5 ms to read.
_LONGEST_JOURNAL = 1 << 20
# Seconds. By age and not by a lock: it needs nothing of the file system, and the mtime of a file that is being written is fresh.
_STALE = 600.0
# Bytes read at first of a file whose head is wanted. Most headers are shorter.
_GLANCE = 8 << 10


class _Seen(NamedTuple):
    """A file as `changes` last saw it. With the same inode, time and size it is the same file."""

    inode: int
    mtime_ns: int
    size: int


class DiskBlobs(BlobStore):
    """Blobs in a folder that processes share.

    The folder is the truth and the journal a hint: whoever puts or deletes adds a line, and the others look at the files of which they
    read. A journal that is not the one known, got shorter or holds what is no line makes them list the folder again. A process killed
    between writing a blob and its line leaves a blob that can be read, and that is listed where the folder is.

    Args:
        folder: Has to exist.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"disk:{folder}")
        self._folder = folder
        # The title of the journal and the bytes of it that were read. None: list the folder.
        self._read_to: tuple[bytes, int] | None = None
        self._seen: dict[str, _Seen] = {}
        with os.scandir(folder) as entries:
            old = [entry.path for entry in entries if entry.name.endswith(TEMPORARY_SUFFIX) and _age(entry) > _STALE]
        for path in old:
            Path(path).unlink(missing_ok=True)
        if not _TITLE_BYTES <= (_size(folder / _JOURNAL) or 0) <= _LONGEST_JOURNAL:
            self._start_journal()

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        path = self._path(key)
        with self._reaching():
            if (present := _size(path)) is not None:
                # Its writer may have been killed before it could tell.
                self._touch(key)
                return present
            blob = encode(key, head, tensors)
            write_atomically(path, lambda temporary: _write(temporary, blob))
            try:
                self._note(f"+{key}")
            except OSError:
                # Others would never hear of it.
                path.unlink(missing_ok=True)
                raise
            return blob.size

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        path = self._path(key)
        with self._reaching():
            try:
                with open(path, "rb") as file:
                    # Private pages: a caller who writes in spite of the ban writes to his own. Empty files can't be mapped.
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if _size(file.fileno()) else b""
                return decode(key, content)
            except FileNotFoundError:
                if not self._folder.exists():
                    raise  # It may come back, and then all that was in it.
                self._missed(key)
                return None
            except ArtifactError as error:
                self._discard(key, error)
                return None

    def pin(self, key: str, pinned: bool = True) -> None:
        path = self._folder / f"{checked_key(key)}{_PIN}"
        with self._reaching():
            if pinned:
                path.touch()
            else:
                path.unlink(missing_ok=True)

    def pinned(self) -> frozenset[str]:
        with self._reaching():
            return frozenset(self._keys(_PIN))

    def clear(self) -> None:
        with self._reaching():
            for key in self._keys(_PIN):
                self.pin(key, False)
            for key in self._keys(_BLOB):
                self._remove(key)

    def _remove(self, key: str) -> bool:
        path = self._path(key)
        with self._reaching():
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            # It is gone whether or not the others hear of it, and they find out when they read it.
            with contextlib.suppress(OSError):
                self._note(f"-{key}")
            self._touch(key)
            return True

    def _path(self, key: str) -> Path:
        return self._folder / f"{checked_key(key)}{_BLOB}"

    def _keys(self, suffix: str) -> set[str]:
        """Of the files of a kind. Others in the folder are none of our business."""
        with os.scandir(self._folder) as entries:
            names = [entry.name.removesuffix(suffix) for entry in entries if entry.name.endswith(suffix)]
        return {name for name in names if KEY.fullmatch(name)}

    def _look(self, touched: set[str]) -> dict[str, tuple[str, Stored] | None]:
        with self._reaching():
            # What the journal tells from here on is read next time, so nothing is lost while the folder is listed.
            read_to, named = self._read_journal()
            keys = {*self._keys(_BLOB), *self._told} if named is None else named
            seen, found = self._look_at(keys | touched)
        self._read_to = read_to
        for key in found:
            self._seen.pop(key, None)
        self._seen.update(seen)
        return found

    def _look_at(self, keys: set[str]) -> tuple[dict[str, _Seen], dict[str, tuple[str, Stored] | None]]:
        """What there is now at these keys; those whose file is the one seen before are left out."""
        seen: dict[str, _Seen] = {}
        found: dict[str, tuple[str, Stored] | None] = {}
        for key in keys:
            try:
                with open(self._path(key), "rb", buffering=0) as file:
                    state = os.fstat(file.fileno())
                    now = _Seen(state.st_ino, state.st_mtime_ns, state.st_size)
                    if now != self._seen.get(key):
                        found[key] = _head_of(key, file, state.st_size)
                        seen[key] = now
            except FileNotFoundError:
                found[key] = None
            except ArtifactError as error:
                found[key] = None
                self._discard(key, error)
        return seen, found

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable:
            raise
        except OSError as error:
            raise StoreUnavailable(f"{self.place} can't be used: {error}") from error

    def _start_journal(self) -> None:
        """A new journal. Its title sets it apart from the one that it replaces, which makes the others list the folder."""
        write_atomically(self._folder / _JOURNAL, f"{secrets.token_hex(_TITLE_BYTES // 2)[1:]}\n".encode())

    def _note(self, line: str) -> None:
        path, content = self._folder / _JOURNAL, f"{line}\n".encode()
        if not path.exists():
            self._start_journal()
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            # One write, which the system puts behind all others. A part of a line spoils the next one, and readers list the folder.
            if os.write(handle, content) != len(content):
                raise OSError(errno.ENOSPC, "there was no room for a line of the journal")
        finally:
            os.close(handle)

    def _read_journal(self) -> tuple[tuple[bytes, int], set[str] | None]:
        """The journal's title with how far it has been read now, and the keys named since; None instead of them: list the folder."""
        path = self._folder / _JOURNAL
        if not path.exists():
            self._start_journal()
        with open(path, "rb") as file:
            title = file.read(_TITLE_BYTES)
            size = os.fstat(file.fileno()).st_size
            if self._read_to is None or title != self._read_to[0] or size < self._read_to[1]:
                return (title, size), None
            start = file.seek(self._read_to[1])
            lines = file.read(size - start).split(b"\n")
        # The last has no end: nothing, or a line that is still being written.
        size -= len(lines.pop())
        matches = [_LINE.fullmatch(line) for line in lines]
        return (title, size), None if None in matches else {match[1].decode() for match in matches if match}


def _write(path: Path, blob: Encoded) -> None:
    with open(path, "xb") as file:
        file.write(blob.header)
        for piece in blob.body:
            file.write(piece)


def _head_of(key: str, file: Any, size: int) -> tuple[str, Stored]:
    """What distinguishes a blob, and the blob, from its head alone."""
    start = file.read(_GLANCE)
    length = header_length(start, size)
    if length > len(start):
        start += file.read(length - len(start))
    header = read_header(key, start[:length])
    if header.size != size:
        raise ArtifactError(f"it has {size} bytes of {header.size}")
    return header.check, Stored(key, header.head, size)


def _age(entry: os.DirEntry[str]) -> float:
    try:
        return time.time() - entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0


def _size(path: Path | int) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def open_disk(folder: Path) -> DiskBlobs:
    """Opens a folder of blobs, or makes it.

    Args:
        folder: May have to be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return DiskBlobs(folder)
    except OSError as error:
        raise ConfigError.of("location", "a folder that can be written to", str(error), "Name another folder.") from error
