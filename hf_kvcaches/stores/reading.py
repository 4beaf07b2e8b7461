"""Reading what others wrote: files, JSON and safetensors, of which no size is believed before it is bounded.

Everything here ends in a value that is whole and finite, or in an `ArtifactError`, in time and memory that the limits below and the
length of the file bound. Files are read and never mapped: bytes of a mapped file change after they were checked, and where the
file is cut short, looking at them kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError

# Bytes of JSON, in a file of its own or as the header of another one.
MOST_JSON = 64 << 20
# Values in it, since small ones take many times their length, and levels of nesting.
_MOST_VALUES, _MOST_LEVELS = 1 << 20, 64
# Digits of a whole number: with fewer it can be converted to a float.
_MOST_DIGITS = 300
# Layers of a model, far beyond any. Each is worked out, however short a file is that says how many there are.
MOST_LAYERS = 1 << 10
_MOST_DIMENSIONS = 16
# The longest side of a tensor without elements: no file has to be long to have such a one.
_MOST_EMPTY = 1 << 20
_CHUNK = 8 << 20
_LENGTH = 8
_METADATA = "__metadata__"
_AGAIN = "Copy or download it again, or make it anew."
# Without these a FIFO or a terminal would be waited for. Windows lacks some, and has one that keeps line ends as they are.
_FLAGS = [getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")]

# safetensors' names. Those of one size stand together.
DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Place(NamedTuple):
    """Where a tensor lies, in bytes from the start of the body."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens a regular file, also behind a link, without waiting for anything. A folder, a FIFO or a device is an `OSError`."""
    handle = os.open(path, flags | sum(_FLAGS))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return handle


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A regular file to read from."""
    with os.fdopen(open_regular(path), "rb") as file:
        yield file


def read_bytes(path: str | os.PathLike[str], most: int = MOST_JSON) -> bytes:
    """All bytes of a regular file; an `ArtifactError` if there are too many, an `OSError` if it can't be read."""
    with opened(path) as file:
        # The size that the system tells may change, and is 0 for some files that aren't empty.
        if (size := os.fstat(file.fileno()).st_size) <= most and (size := len(content := file.read(most + 1))) <= most:
            return content
    raise ArtifactError(f"{path}: expected at most {most:,} bytes, got {size:,} or more. {_AGAIN}")


def parse_json(text: str | bytes | bytearray | memoryview) -> Any:
    """The value of a JSON text; an `ArtifactError` if it is too long or too deep, or a number is not finite.

    Args:
        text: In UTF-8 where it is bytes.
    """
    try:
        plain = text if isinstance(text, str) else bytes(text).decode("utf-8")
        if len(plain) > MOST_JSON or sum(map(plain.count, ",[{")) > _MOST_VALUES:
            raise ValueError(f"more than {MOST_JSON:,} characters, or {_MOST_VALUES:,} values")
        value = json.loads(plain, parse_float=_finite, parse_int=_whole, parse_constant=_finite)
        _check_depth(value)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"expected JSON of bounded size with finite numbers, got {str(error)[:200]}") from error
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:20]}")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [item for each in level if isinstance(each, dict | list) for item in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise ValueError(f"more than {_MOST_LEVELS} levels")


def places_of(layout: Mapping[str, Any]) -> dict[str, Place]:
    """Where the tensors of a safetensors file lie, by their entries in its header; an `ArtifactError` if these leave gaps or overlap."""
    try:
        places = {name: _place(entry) for name, entry in layout.items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"its header makes no sense: {error!r}") from error
    end = 0
    for place in sorted(places.values(), key=lambda place: (place.start, place.stop)):
        if place.start != end:
            raise ArtifactError(f"its header makes no sense: a tensor begins at byte {place.start}, expected {end}")
        end = place.stop
    return places


def _place(entry: Mapping[str, Any]) -> Place:
    shape, (start, stop), dtype = tuple(entry["shape"]), entry["data_offsets"], DTYPES[entry["dtype"]]
    if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 63 for size in (*shape, start, stop)):
        raise ValueError(f"shape {str(shape)[:100]} and offsets {start}, {stop}")
    if math.prod(shape) * dtype.itemsize != stop - start or (start == stop and max(shape) > _MOST_EMPTY):
        raise ValueError(f"{stop - start} bytes for {dtype} {shape}")
    return Place(dtype, shape, start, stop)


def read_safetensors(path: str | os.PathLike[str], sha256: str | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, and its metadata. Any damage is an `ArtifactError`.

    Args:
        sha256: The digest, in hex, that the bytes which were read must have.
    """
    try:
        with opened(path) as file:
            return _read(_Digested(file), os.fstat(file.fileno()).st_size, sha256)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: expected a safetensors file, there is none. Copy or download it again.") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        raise ArtifactError(f"{path}: expected a complete safetensors file, got {error}. Copy or download it again.") from error


def _read(file: _Digested, size: int, sha256: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    length = int.from_bytes(file.take(_LENGTH), "little")
    if length > min(MOST_JSON, size - _LENGTH):
        raise ArtifactError(f"a header of {length:,} bytes in a file of {size:,}")
    layout = parse_json(file.take(length))
    metadata = layout.pop(_METADATA, None) or {}
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ArtifactError("metadata that are no strings")
    places = places_of(layout)
    end = max((place.stop for place in places.values()), default=0)
    if _LENGTH + length + end != size:
        raise ArtifactError(f"{size:,} bytes where the header says {_LENGTH + length + end:,}")
    found: dict[str, Tensor] = {}
    for name, place in sorted(places.items(), key=lambda item: item[1][2:]):
        found[name] = torch.empty(place.shape, dtype=place.dtype)
        file.fill(as_bytes(found[name]))
    if sha256 is not None and file.hexdigest() != sha256:
        raise ArtifactError("other bytes, its checksum is wrong")
    return {name: found[name] for name in places}, dict(metadata)


class _Digested:
    """A file whose bytes are digested as they are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hasher = file, hashlib.sha256()

    def take(self, count: int) -> bytearray:
        content = bytearray(count)
        self.fill(memoryview(content))
        return content

    def fill(self, memory: memoryview) -> None:
        for start in range(0, len(memory), _CHUNK):
            chunk = memory[start : start + _CHUNK]
            if self._file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
                raise ArtifactError("a file that ends too early")
            self._hasher.update(chunk)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


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


def checked_layers(count: Any) -> int:
    """A number of layers as a file says it, or an `ArtifactError`."""
    if type(count) is not int or not 0 <= count <= MOST_LAYERS:
        raise ArtifactError(f"layers: expected a number from 0 to {MOST_LAYERS}, got {str(count)[:50]}. {_AGAIN}")
    return count


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    hasher = hashlib.sha256()
    with open(Path(path), "rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()
