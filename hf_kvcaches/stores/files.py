"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

# What marks a temporary file as ours, so that one left by a killed process can be swept.
TEMPORARY_SUFFIX = ".hf_kvcaches.tmp"


def write_atomically(path: str | os.PathLike[str], content: bytes | Callable[[Path], None], *, sync: bool = True) -> None:
    """Writes a file so that a crash at any moment leaves either the old or the new one, complete.

    Args:
        path: The file. Its folder must exist.
        content: The bytes, or a function that writes them to the temporary path that it is given.
        sync: Whether that holds for a power cut too.
    """
    target = Path(path)
    temporary = temporary_beside(target)
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        if sync:
            move_into_place(temporary, target)
        else:
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_beside(target: Path) -> Path:
    """An unused path in the same folder, so that a rename suffices to put it in the target's place."""
    return target.parent / f".{target.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"


def move_into_place(temporary: Path, target: Path) -> None:
    """Renames a finished file over another. Without the syncs a power cut can leave the new name on data that never reached the disk."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, target)
    # The rename itself, where the system can sync folders.
    with contextlib.suppress(OSError):
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
