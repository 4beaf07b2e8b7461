"""Blobs in a folder: a file for each, and a journal that tells other processes of what came and went.

Blobs are known by their names, which no other program gives: other files in the folder are never read, changed or deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs import BlobStore, Stored, StoreUnavailable
from hf_kvcaches.stores.blobs_format import KEY, Encoded, checked_key, decode, encode, header_length, read_header
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX, write_atomically
from hf_kvcaches.stores.reading import open_regular, opened

BLOB, PIN, JOURNAL = ".kvblob", ".kvblob-pin", "kvblobs.journal"
_LINE = re.compile(rb"[+-]([0-9a-f]{1,128})")
_TITLE_BYTES = 32
# A longer journal is replaced when the store is opened, and no more of one is read. 1 MB is some 15,000 puts, or 5 ms to read.
_LONGEST_JOURNAL = 1 << 20
# Seconds. By age and not by a lock: it needs nothing of the file system, and the mtime of a file that is being written is fresh.
_STALE = 600.0
# Bytes read at first of a file whose head is wanted. Most headers are shorter.
_GLANCE = 8 << 10
# Errors of the folder, the disk or the process. With any other one something is wrong with one file, and the rest can be used.
_NOT_ONE_FILES = {
    *(errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EROFS),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}


class _Seen(NamedTuple):
    """A file as `changes` last saw it. With the same inode, time and size it is the same file."""

    inode: int
    mtime_ns: int
    size: int


class DiskBlobs(BlobStore):
    """Blobs in a folder that processes share.

    The folder is the truth and the journal a hint: whoever puts or deletes adds a line, and the others look at the files of which they
    read. A journal that is not the one known, got shorter or holds what is no line makes them list the folder again. A process killed
    between writing a blob and its line leaves a blob that can be read, and that is listed where the folder is. Where there is a folder
    in the journal's place, or one that may not be read or replaced, the folder of blobs is listed each time.
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
            with contextlib.suppress(OSError):
                os.unlink(path)
        if (journal := self._open_journal(os.O_RDONLY)) is not None:
            with os.fdopen(journal) as file:
                size = os.fstat(file.fileno()).st_size
            if not _TITLE_BYTES <= size <= _LONGEST_JOURNAL:
                self._start_journal()

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        path = self._path(key)
        with self._reaching():
            try:
                with opened(path) as file:
                    # Its writer may have been killed before it could tell.
                    self._touch(key)
                    return os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                blob = encode(key, head, tensors)
            except OSError as error:
                self._leave_out(key, error)
                return 0
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
                with opened(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    # Its length is believed if its header says the same.
                    _head_of(key, file, size)
                    file.seek(0)
                    content = bytearray(size)
                    del content[file.readinto(content) :]  # type: ignore[attr-defined]
                return decode(key, content)
            except FileNotFoundError:
                self._missed(key)
            except ArtifactError as error:
                self.discard(key, error)
            except OSError as error:
                self._leave_out(key, error)
        return None

    def pin(self, key: str, pinned: bool = True) -> None:
        path = self._folder / f"{checked_key(key)}{PIN}"
        with self._reaching():
            if pinned:
                path.touch()
            else:
                path.unlink(missing_ok=True)

    def pinned(self) -> frozenset[str]:
        with self._reaching():
            return frozenset(self._keys(PIN))

    def clear(self) -> None:
        with self._reaching():
            for key in self._keys(PIN):
                self.pin(key, False)
            for key in self._keys(BLOB):
                self._remove(key)

    def _remove(self, key: str) -> bool:
        path = self._path(key)
        with self._reaching():
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            except OSError as error:
                if not path.is_dir():
                    raise
                self._leave_out(key, error)
                return False
            # It is gone whether or not the others hear of it, and they find out when they read it.
            with contextlib.suppress(OSError):
                self._note(f"-{key}")
            self._touch(key)
            return True

    def _path(self, key: str) -> Path:
        return self._folder / f"{checked_key(key)}{BLOB}"

    def _keys(self, suffix: str) -> set[str]:
        """Of the files of a kind. Others in the folder are none of our business."""
        with os.scandir(self._folder) as entries:
            names = [entry.name.removesuffix(suffix) for entry in entries if entry.name.endswith(suffix)]
        return {name for name in names if KEY.fullmatch(name)}

    def _look(self, touched: set[str]) -> dict[str, tuple[str, Stored] | None]:
        with self._reaching():
            # What the journal tells from here on is read next time, so nothing is lost while the folder is listed.
            read_to, named = self._read_journal()
            keys = {*self._keys(BLOB), *self._told} if named is None else named
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
                with opened(self._path(key)) as file:
                    state = os.fstat(file.fileno())
                    now = _Seen(state.st_ino, state.st_mtime_ns, state.st_size)
                    if now != self._seen.get(key):
                        found[key] = _head_of(key, file, state.st_size)
                        seen[key] = now
                self.unreadable.pop(key, None)
            except FileNotFoundError:
                found[key] = None
            except ArtifactError as error:
                found[key] = None
                self.discard(key, error)
            except OSError as error:
                found[key] = None
                self._leave_out(key, error)
        return seen, found

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable:
            raise
        except OSError as error:
            raise StoreUnavailable(f"{self.place} can't be used: {error}") from error

    def _leave_out(self, key: str, error: OSError) -> None:
        """Goes on without a file that can't be used. It is tried again at each look. What is not the file's fault is raised again."""
        if error.errno in _NOT_ONE_FILES:
            raise error
        self._touch(key)
        with self._lock:
            self.unreadable.setdefault(key, f"{self.place}: the blob {key} can't be used: {error}. It is left alone.")

    def _start_journal(self) -> None:
        """A new journal. Its title sets it apart from the one that it replaces, which makes the others list the folder."""
        write_atomically(self._folder / JOURNAL, f"{secrets.token_hex(_TITLE_BYTES // 2)[1:]}\n".encode())

    def _open_journal(self, flags: int) -> int | None:
        """The journal; a new one where there is none, or one that can't be used; None where there can be none."""
        path = self._folder / JOURNAL
        try:
            return open_regular(path, flags)
        except OSError as error:
            if error.errno in _NOT_ONE_FILES - {errno.ENOENT}:
                raise
        try:
            self._start_journal()
        except (IsADirectoryError, PermissionError):
            return None
        return open_regular(path, flags)

    def _note(self, line: str) -> None:
        handle = self._open_journal(os.O_WRONLY | os.O_APPEND)
        if handle is None:
            return
        content = f"{line}\n".encode()
        try:
            # One write, which the system puts behind all others. A part of a line spoils the next one, and readers list the folder.
            if os.write(handle, content) != len(content):
                raise OSError(errno.ENOSPC, "there was no room for a line of the journal")
        finally:
            os.close(handle)

    def _read_journal(self) -> tuple[tuple[bytes, int] | None, set[str] | None]:
        """The journal's title with how far it has been read now, and the keys named since; None instead of them: list the folder."""
        handle = self._open_journal(os.O_RDONLY)
        if handle is None:
            return None, None
        with os.fdopen(handle, "rb") as file:
            title = file.read(_TITLE_BYTES)
            size = os.fstat(file.fileno()).st_size
            if self._read_to is None or title != self._read_to[0] or not 0 <= size - self._read_to[1] <= _LONGEST_JOURNAL:
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


def _head_of(key: str, file: BinaryIO, size: int) -> tuple[str, Stored]:
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
    except OSError:
        return 0.0


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
