"""Files of artifacts and of saved caches: one writer at a time, safetensors, digests."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.stores.blobs_format import dense, header_in, layout_of, read_body, tensors_in
from hf_kvcaches.stores.files import MOST_JSON, TEMPORARY_SUFFIX, opened, temporary_beside

# Layers of a model, far beyond any. Each is worked out, however short a file is that says how many there are.
MOST_LAYERS = 1 << 10
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


def write_atomically(path: str | os.PathLike[str], content: bytes | Callable[[Path], None]) -> None:
    """Writes a file so that a crash or a power cut at any moment leaves either the old or the new one, complete.

    Args:
        path: The file. Its folder must exist.
        content: The bytes, or a function that writes them to the temporary path that it is given.
    """
    with temporary_beside(Path(path)) as temporary:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        move_into_place(temporary, Path(path))


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


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors of any dtype that safetensors knows; views and tied tensors are written as copies."""
    plain = _unshared(tensors)
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


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Dense tensors, copied where two of them, or one and something outside, lie in one storage: safetensors refuses those."""
    storages: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in dense(tensors).items():
        storage = tensor.untyped_storage()
        plain[name] = tensor.clone() if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages else tensor
        storages.add(plain[name].untyped_storage().data_ptr())
    return plain


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
            size = os.fstat(file.fileno()).st_size
            header = header_in(file.read, size)
            layout = layout_of(header, size)
            body = read_body(file, layout)
        if sha256 is not None:
            hasher = hashlib.sha256(header)
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


def checked_layers(count: Any) -> int:
    """A number of layers as a file says it, or an `ArtifactError`."""
    if type(count) is not int or not 0 <= count <= MOST_LAYERS:
        raise ArtifactError(f"layers: expected a number from 0 to {MOST_LAYERS}, got {str(count)[:50]}. {_AGAIN}")
    return count


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that has infinities or NaN, or None."""
    for name, tensor in tensors.items():
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if plain.is_floating_point() and plain.numel():
            # Either end shows both, and no copy is made. There are no such operations for 8 bits.
            ends = (plain.float() if plain.element_size() == 1 else plain).aminmax()
            if not all(math.isfinite(end.item()) for end in ends):
                return name
    return None
