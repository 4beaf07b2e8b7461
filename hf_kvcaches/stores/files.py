"""Files that are whole or not there, and files and JSON of others, of which no size is believed before it is bounded.

Untrusted content becomes a value that is whole and finite, or an `ArtifactError`. Files are read and never mapped: bytes of a mapped file
change after they were checked, and where the file is cut short, looking at them kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hf_kvcaches.errors import ArtifactError

# What marks a temporary file as ours, so that one left by a killed process can be swept.
TEMPORARY_SUFFIX = ".hf_kvcaches.tmp"
# Bytes of JSON, in a file of its own or as the header of another one.
MOST_JSON = 64 << 20
# Values in it, since small ones take many times their length; levels of nesting; and whole numbers, which must fit a float.
_MOST_VALUES, _MOST_LEVELS, _MOST_WHOLE = 1 << 20, 64, 10**300
# Without these a FIFO or a terminal would be waited for. Windows lacks some, and has one that keeps line ends as they are.
_FLAGS = [getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")]


@contextlib.contextmanager
def temporary_beside(target: Path) -> Iterator[Path]:
    """An unused path in the same folder, to write a file that is renamed once it is whole. A file that was not renamed is removed."""
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A regular file to read from, also behind a link, opened without waiting. A folder, a FIFO or a device is an `OSError`."""
    handle = os.open(path, os.O_RDONLY | sum(_FLAGS))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    with os.fdopen(handle, "rb") as file:
        yield file


def parse_json(text: str | bytes | bytearray | memoryview) -> Any:
    """The value of a JSON text, as a string or in UTF-8; an `ArtifactError` if it is too long or too deep, or a number is not finite."""
    try:
        plain = text if isinstance(text, str) else bytes(text).decode("utf-8")
        if len(plain) > MOST_JSON or sum(map(plain.count, ",[{")) > _MOST_VALUES:
            raise ValueError(f"more than {MOST_JSON:,} characters, or {_MOST_VALUES:,} values")
        value = json.loads(plain)
        _check(value, _MOST_LEVELS)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"expected JSON of bounded size with finite numbers, got {str(error)[:200]}") from error
    return value


def _check(value: Any, levels: int) -> None:
    if isinstance(value, float | int) and not abs(value) < (math.inf if isinstance(value, float) else _MOST_WHOLE):
        raise ValueError(f"the number {str(value)[:20]}")
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError(f"more than {_MOST_LEVELS} levels")
        for item in value.values() if isinstance(value, dict) else value:
            _check(item, levels - 1)
