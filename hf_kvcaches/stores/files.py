"""Atomic writes, and bounded reads of untrusted files and JSON.

Untrusted content becomes a complete, finite value or an `ArtifactError`. Files are read and never mapped: bytes of a mapped file can change
after they were verified, and an access behind the end of a truncated file kills the process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from hf_kvcaches.errors import ArtifactError

Bytes = bytes | bytearray | memoryview
Source = Bytes | Iterable[Bytes] | Callable[[int], Bytes]

_STEP = 1 << 20  # bytes asked for at once
TEMPORARY_SUFFIX = ".hf_kvcaches.tmp"  # tells which files of a killed process can be deleted
MOST_JSON = 64 << 20  # bytes, in a file or as the header of one
# Values in JSON, since small ones take many times their length in memory; levels of nesting; and integers, which must fit a float.
_MOST_VALUES, _MOST_LEVELS, _MOST_WHOLE = 1 << 20, 64, 10**300
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)  # for FIFOs and terminals; Windows lacks both


def write_atomically(path: str | os.PathLike[str], pieces: Iterable[bytes | bytearray | memoryview], sync: bool = True) -> None:
    """Write a file in a folder that exists; a crash at any moment leaves either the old or the new one, complete; so does a power cut.

    Without `sync` a power cut may leave the new name on data that never reached the disk.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "xb") as file:
            file.writelines(pieces)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        # The kernel's time stamps are milliseconds apart, and a file may be deleted and written again within one.
        now = time.time_ns()
        os.utime(temporary, ns=(now, now))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BufferedReader]:
    """Open a regular file, or a link to one, for reading without waiting; raise an `OSError` for a folder, a FIFO or a device."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAIT)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{os.fspath(path)} is no regular file")
        yield file


def parse_json(text: str | bytes | bytearray | memoryview) -> Any:
    """Return the value of a JSON text, a string or UTF-8; raise an `ArtifactError` if it is too long, too deep or not finite."""
    try:
        string = text if isinstance(text, str) else bytes(text).decode("utf-8")
        if len(string) > MOST_JSON or sum(map(string.count, ",[{")) > _MOST_VALUES:
            raise ValueError(f"more than {MOST_JSON:,} characters, or {_MOST_VALUES:,} values")
        value = json.loads(string)
        _check_bounds(value, _MOST_LEVELS)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"expected JSON of bounded size with finite numbers, got {str(error)[:200]}") from error
    return value


def _check_bounds(value: Any, levels: int) -> None:
    if isinstance(value, float | int) and not abs(value) < (math.inf if isinstance(value, float) else _MOST_WHOLE):
        raise ValueError(f"the number {str(value)[:20]}")
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError(f"more than {_MOST_LEVELS} levels")
        for item in value.values() if isinstance(value, dict) else value:
            _check_bounds(item, levels - 1)


def reader_of(source: Source) -> Callable[[int], Bytes]:
    """Return a function that gives between 1 and the given number of bytes, and none at the end of the source."""
    if callable(source):
        return source
    # Bytes are iterable too, as numbers.
    pieces = iter([source] if isinstance(source, bytes | bytearray | memoryview) else source)
    rest = memoryview(b"")

    def read(count: int) -> memoryview:
        nonlocal rest
        while not rest and (piece := next(pieces, None)) is not None:
            view = memoryview(piece)
            rest = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        taken, rest = rest[:count], rest[count:]
        return taken

    return read


def take(read: Callable[[int], Bytes], count: int) -> bytearray:
    """Return the next `count` bytes, or fewer at the end. Memory grows with what arrives, not with what a length promises."""
    content = bytearray()
    while len(content) < count and (piece := read(min(count - len(content), _STEP))):
        content += piece
    assert len(content) <= count, "a source gave more than was asked for"
    return content
