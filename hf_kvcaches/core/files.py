"""Files of artifacts and of saved caches: one writer at a time, safetensors, digests."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.stores.blobs_format import unshared
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX
from hf_kvcaches.stores.reading import LENGTH, MOST_JSON, layout_of, opened, tensors_in

_AGAIN = "Copy or download it again, or make it anew."


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


def read_bytes(path: str | os.PathLike[str], most: int = MOST_JSON) -> bytes:
    """All bytes of a regular file; an `ArtifactError` if there are too many, an `OSError` if it can't be read."""
    with opened(path) as file:
        # The size that the system tells may change, and is 0 for some files that aren't empty.
        if (size := os.fstat(file.fileno()).st_size) <= most and (size := len(content := file.read(most + 1))) <= most:
            return content
    raise ArtifactError(f"{path}: expected at most {most:,} bytes, got {size:,} or more. {_AGAIN}")


def read_safetensors(path: str | os.PathLike[str], sha256: str | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, and its metadata. Any damage is an `ArtifactError`.

    Args:
        sha256: The digest, in hex, that the bytes which were read must have.
    """
    try:
        with opened(path) as file:
            size, start = os.fstat(file.fileno()).st_size, file.read(LENGTH)
            length = int.from_bytes(start, "little")
            if len(start) < LENGTH or length > min(MOST_JSON, size - LENGTH):
                raise ArtifactError(f"a header of {length:,} bytes in a file of {size:,}")
            header = file.read(length)
            layout = layout_of(header)
            if LENGTH + length + layout.size != size:
                raise ArtifactError(f"{size:,} bytes where the header says {LENGTH + length + layout.size:,}")
            body = bytearray(layout.size)
            if file.readinto(body) != len(body):  # type: ignore[attr-defined]
                raise ArtifactError("a file that ends too early")
        if sha256 is not None:
            hasher = hashlib.sha256(start + header)
            hasher.update(body)
            if hasher.hexdigest() != sha256:
                raise ArtifactError("other bytes, its checksum is wrong")
        return tensors_in(body, layout), dict(layout.metadata)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: expected a safetensors file, there is none. Copy or download it again.") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        raise ArtifactError(f"{path}: expected a complete safetensors file, got {error}. Copy or download it again.") from error


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
