"""Reading what others wrote: files, JSON and safetensors, of which no size is believed before it is bounded.

Everything here ends in a value that is whole and finite, or in an `ArtifactError`, in time and memory that the limits below and the
length of the file bound. Files are read and never mapped: bytes of a mapped file change after they were checked, and where the
file is cut short, looking at them kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
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
_MOST_DIMENSIONS = 16
# The longest side of a tensor without elements: no file has to be long to have such a one.
_MOST_EMPTY = 1 << 20
LENGTH = 8  # bytes of the length that a safetensors file begins with
METADATA = "__metadata__"
# Without these a FIFO or a terminal would be waited for. Windows lacks some, and has one that keeps line ends as they are.
_FLAGS = [getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")]

# By safetensors' names. Those of one size stand together.
_DTYPES = "F64:float64 I64:int64 U64:uint64 C64:complex64 F32:float32 I32:int32 U32:uint32 F16:float16 BF16:bfloat16 I16:int16 U16:uint16"
_DTYPES += " F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2 F8_E4M3FNUZ:float8_e4m3fnuz F8_E5M2FNUZ:float8_e5m2fnuz I8:int8 U8:uint8 BOOL:bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in (pair.split(":") for pair in _DTYPES.split())}


class Place(NamedTuple):
    """Where a tensor lies, in bytes from the start of the body."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorLayout(NamedTuple):
    """What the header of a safetensors file says."""

    places: dict[str, Place]
    metadata: dict[str, str]
    size: int  # bytes of the body


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


def header_in(read: Callable[[int], bytes], size: int) -> bytes:
    """The header of a safetensors file, which is its length and JSON; an `ArtifactError` if it is longer than the file or the limit.

    Args:
        read: Gives so many bytes more, or fewer where there are no more.
        size: Bytes of the file.
    """
    length = read(LENGTH)
    if len(length) < LENGTH or int.from_bytes(length, "little") > min(MOST_JSON, size - LENGTH):
        raise ArtifactError(f"it has {size:,} bytes, and ends in its header")
    return length + read(int.from_bytes(length, "little"))


def layout_of(header: bytes, size: int) -> TensorLayout:
    """What the header of a safetensors file says; an `ArtifactError` if it does not fit the file, or tensors overlap or leave gaps."""
    entries, end = parse_json(header[LENGTH:]), 0
    try:
        metadata = entries.pop(METADATA, None) or {}
        places = {name: _place(entry) for name, entry in entries.items()}
        for place in sorted(places.values(), key=lambda place: (place.start, place.stop)):
            if place.start != end:
                raise ValueError(f"a tensor begins at byte {place.start}, expected {end}")
            end = place.stop
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata that are no strings")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"its header makes no sense: {error!r}") from error
    if len(header) + end != size:
        raise ArtifactError(f"it has {size:,} bytes of {len(header) + end:,}")
    return TensorLayout(places, metadata, end)


def _place(entry: Mapping[str, Any]) -> Place:
    shape, (start, stop), dtype = tuple(entry["shape"]), entry["data_offsets"], DTYPES[entry["dtype"]]
    if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 63 for size in (*shape, start, stop)):
        raise ValueError(f"shape {str(shape)[:100]} and offsets {start}, {stop}")
    if math.prod(shape) * dtype.itemsize != stop - start or (start == stop and max(shape) > _MOST_EMPTY):
        raise ValueError(f"{stop - start} bytes for {dtype} {shape}")
    return Place(dtype, shape, start, stop)


def tensors_in(body: bytearray | memoryview, layout: TensorLayout) -> dict[str, Tensor]:
    """The tensors of a safetensors file in the memory of its body, which lives as long as any of them."""
    tensors = {}
    for name, (dtype, shape, start, stop) in layout.places.items():
        count = (stop - start) // dtype.itemsize
        flat = torch.frombuffer(body, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(shape)
    return tensors


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
