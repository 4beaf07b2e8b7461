"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from hf_kvcaches.stores.blobs_format import unshared

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


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Holds off other writers of a folder; yields whether that worked, which some network file systems and Windows don't offer."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        # Closing also unlocks, as does the end of a killed process.
        os.close(handle)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors of any dtype that safetensors knows; views and tied tensors are written as copies."""
    plain = unshared(tensors)
    path.touch()
    # The library makes its files private to their owner; ours are shared as any new file is.
    permissions = path.stat().st_mode
    # The library has a temporary file of its own beside the one it is given. In a folder with our mark it can be swept.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".", suffix=TEMPORARY_SUFFIX) as scratch:
        inside = Path(scratch) / "tensors"
        # With an empty dict and no tensors the library writes a file that it can not read.
        save_file(plain, inside, dict(metadata) if metadata else None)
        inside.replace(path)
    path.chmod(permissions)
