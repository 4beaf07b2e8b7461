"""Tensors as bytes: safetensors files, and blobs, which are safetensors files behind a checksum.

```
front    16 bytes of BLAKE2b over the key, the rest of the front and the header; the CRC-32 of the body in 8 bytes
header   its length in 8 bytes, then JSON: names, dtypes, shapes and offsets, and as metadata the head
body     the tensors
```

So the head can be trusted before the body is read, and any flipped bit is noticed, as are a blob under another's key and one of another
length. The checksums are against accidents: whoever can write a blob can write its checksums. No header is believed before it is checked
against limits and the length of its file.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.files import MOST_JSON, parse_json

KEY = re.compile(r"[0-9a-f]{1,128}")
# Bytes. The digest that a blob begins with tells it from any other one under its key.
DIGEST, _FRONT, _LENGTH = 16, 24, 8
_METADATA = "__metadata__"
# Dimensions of a tensor, and the longest side of one without elements, for which no file has to be long.
_MOST_DIMENSIONS, _MOST_EMPTY = 16, 1 << 20
# By safetensors' names. Those of one size stand together.
_DTYPES = "F64:float64 I64:int64 U64:uint64 C64:complex64 F32:float32 I32:int32 U32:uint32 F16:float16 BF16:bfloat16 I16:int16 U16:uint16"
_DTYPES += " F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2 F8_E4M3FNUZ:float8_e4m3fnuz F8_E5M2FNUZ:float8_e5m2fnuz I8:int8 U8:uint8 BOOL:bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in (pair.split(":") for pair in _DTYPES.split())}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorLayout(NamedTuple):
    """The content of a safetensors file's header: dtype, shape, start and stop of each tensor, counted from the start of the body."""

    places: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    metadata: dict[str, str]
    size: int  # bytes of the body


class Header(NamedTuple):
    """The front and the header of a blob, once their checksum is right."""

    head: dict[str, Any]
    crc32: int
    layout: TensorLayout
    start: int  # bytes before the body


def dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU and contiguous, not copied where they are so already; a `ConfigError` for what can't be stored."""
    plain = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == _METADATA:
            raise ConfigError.of("tensors", f"names that are strings other than {_METADATA!r}", name)
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in _DTYPE_NAMES or tensor.is_meta:
            got = f"{tensor.layout}, {tensor.dtype}, {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError.of(f"tensors[{name!r}]", f"a dense tensor of {', '.join(map(str, _DTYPE_NAMES))}", got)
        plain[name] = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return plain


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def header_in(read: Callable[[int], bytes], size: int) -> bytes:
    """The header of a safetensors file of so many bytes; an `ArtifactError` if it is longer than the file or the limit."""
    length = read(_LENGTH)
    if len(length) < _LENGTH or int.from_bytes(length, "little") > min(MOST_JSON, size - _LENGTH):
        raise ArtifactError(f"it has {size:,} bytes, and ends in its header")
    return length + read(int.from_bytes(length, "little"))


def layout_of(header: bytes, size: int) -> TensorLayout:
    """The content of a safetensors file's header; an `ArtifactError` if it does not fit the file, or tensors overlap or leave gaps."""
    entries, places, end = parse_json(header[_LENGTH:]), {}, 0
    try:
        metadata = entries.pop(_METADATA, None) or {}
        for name, entry in entries.items():
            shape, (start, stop), dtype = tuple(entry["shape"]), entry["data_offsets"], DTYPES[entry["dtype"]]
            if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in (*shape, start, stop)):
                raise ValueError(f"shape {str(shape)[:100]} and offsets {start}, {stop}")
            if math.prod(shape) * dtype.itemsize != stop - start or (start == stop and max(shape) > _MOST_EMPTY):
                raise ValueError(f"{stop - start} bytes for {dtype} {shape}")
            places[name] = dtype, shape, start, stop
        for start, stop in sorted(place[2:] for place in places.values()):
            if start != end:
                raise ValueError(f"a tensor begins at byte {start}, expected {end}")
            end = stop
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata that are no strings")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"its header makes no sense: {error!r}") from error
    if len(header) + end != size:
        raise ArtifactError(f"it has {size:,} bytes of {len(header) + end:,}")
    return TensorLayout(places, metadata, end)


def tensors_in(body: bytearray | memoryview, layout: TensorLayout) -> dict[str, Tensor]:
    """The tensors of a safetensors file in the memory of its body, which lives as long as any of them."""
    tensors = {}
    for name, (dtype, shape, start, stop) in layout.places.items():
        count = (stop - start) // dtype.itemsize
        flat = torch.frombuffer(body, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(shape)
    return tensors


def checked_key(key: str) -> str:
    """The key, or a `ConfigError`. Capitals are refused because some file systems take them for small letters."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ConfigError.of("key", "1 to 128 hexadecimal digits in small letters", key, "Take a digest's hexdigest().")
    return key


def head_as_json(head: Mapping[str, Any]) -> str:
    """The head as JSON, or a `ConfigError` where it would come back as something else."""
    try:
        text = json.dumps(head, separators=(",", ":"))
        if not isinstance(head, dict) or parse_json(text) != head:
            raise ValueError(text)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "Give strings as keys, and lists where there are tuples."
        raise ConfigError.of("head", "a dict that comes back from JSON as it was", str(error), hint) from error
    return text


def array_as_text(values: npt.ArrayLike, dtype: str) -> str:
    """An array as a head can hold it; `dtype` in NumPy's notation, with the order of its bytes."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def array_of_text(text: str, dtype: str) -> npt.NDArray[Any]:
    """Undoes `array_as_text`; a `ValueError` or `TypeError` for any other text."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def encode(key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """A blob as pieces of bytes, the front and the header first. Those of tensors are their memory, not a copy."""
    # The largest elements first, so that each tensor begins at a multiple of its element's size.
    plain = sorted(dense(tensors).items(), key=lambda item: -item[1].itemsize)
    layout: dict[str, Any] = {_METADATA: {"head": head_as_json(head)}}
    start = crc32 = 0
    for name, tensor in plain:
        stop = start + tensor.nbytes
        layout[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start, crc32 = stop, zlib.crc32(as_bytes(tensor), crc32)
    text = json.dumps(layout, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_JSON:
        raise ConfigError.of("head", f"a head, names and shapes of at most {MOST_JSON:,} bytes", len(text), "Put less into one blob.")
    covered = crc32.to_bytes(_FRONT - DIGEST, "little") + len(text).to_bytes(_LENGTH, "little") + text
    return [_digest(checked_key(key), covered) + covered, *(as_bytes(tensor) for _, tensor in plain)]


def _digest(key: str, covered: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + b" " + covered, digest_size=DIGEST).digest()


def read_header(key: str, size: int, read: Callable[[int], bytes]) -> Header:
    """The header of a blob of so many bytes; an `ArtifactError` with the reason where it can't be trusted."""
    front = read(_FRONT)
    text = header_in(read, size - _FRONT)
    if front[:DIGEST] != _digest(key, front[DIGEST:] + text):
        raise ArtifactError("its header's checksum is wrong")
    layout = layout_of(text, size - _FRONT)
    head = parse_json(layout.metadata.get("head", "null"))
    if not isinstance(head, dict):
        raise ArtifactError("its head is no dict")
    return Header(head, int.from_bytes(front[DIGEST:], "little"), layout, _FRONT + len(text))


def tensors_of(body: bytearray | memoryview, header: Header, verify: bool = True) -> dict[str, Tensor]:
    """The tensors of a blob, in the memory of its body; an `ArtifactError` for a body of another length, or of another checksum."""
    if len(body) != header.layout.size or (verify and zlib.crc32(body) != header.crc32):
        raise ArtifactError("the checksum of its tensors is wrong")
    return tensors_in(body, header.layout)


def decode(key: str, content: bytes, verify: bool = True) -> dict[str, Tensor]:
    """The tensors of a blob; an `ArtifactError` with the reason if a bit of it, or of its header without `verify`, is not as it was."""
    header = read_header(key, len(content), io.BytesIO(content).read)
    # A copy, because torch takes only memory that can be written to.
    return tensors_of(bytearray(memoryview(content)[header.start :]), header, verify)
