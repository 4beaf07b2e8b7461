"""Safetensors files, and blobs, which are safetensors files behind checksums.

```
front    16 bytes of BLAKE2b over the key, the rest of the front and the header; the CRC-32 of the body in 8 bytes
header   its length in 8 bytes, then JSON: names, dtypes, shapes and offsets, and the head as metadata
body     the tensors
```

The head is verified without the body; a flipped bit, another length and the key of another blob are detected. The checksums protect from
accidents only: whoever can write a blob can write its checksums. A header is used once it fits limits and the length of its file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.files import MOST_JSON, Bytes, parse_json, reader_of, take

KEY = re.compile(r"[0-9a-f]{1,128}")
DIGEST, _FRONT, _LENGTH = 16, 24, 8  # bytes; the digest differs from that of any other blob under the key
_METADATA = "__metadata__"
_MOST_DIMENSIONS, _MOST_EMPTY = 16, 1 << 20  # the longest side of an empty tensor, which the length of a file does not bound
# By safetensors' names, in groups of one size.
_DTYPES = "F64:float64 I64:int64 U64:uint64 C64:complex64 F32:float32 I32:int32 U32:uint32 F16:float16 BF16:bfloat16 I16:int16 U16:uint16"
_DTYPES += " F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2 F8_E4M3FNUZ:float8_e4m3fnuz F8_E5M2FNUZ:float8_e5m2fnuz I8:int8 U8:uint8 BOOL:bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in (pair.split(":") for pair in _DTYPES.split())}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorLayout(NamedTuple):
    """A checked header of a safetensors file: dtype, shape and first byte in the body of each tensor."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]]
    metadata: dict[str, str]
    size: int  # bytes of the body


def dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU and contiguous, copied only if needed; raise a `ConfigError` for what can't be stored.

    The largest elements come first, so that in a file each tensor begins at a multiple of its element's size.
    """
    contiguous = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == _METADATA:
            raise ConfigError.of("tensors", f"names that are strings other than {_METADATA!r}", name)
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in _DTYPE_NAMES or tensor.is_meta:
            got = f"{tensor.layout}, {tensor.dtype}, {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError.of(f"tensors[{name!r}]", f"a dense tensor of {', '.join(map(str, _DTYPE_NAMES))}", got)
        contiguous[name] = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return dict(sorted(contiguous.items(), key=lambda item: -item[1].itemsize))


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file, whose body is the memory of the tensors, which are `dense`, in their order."""
    layout: dict[str, Any] = {_METADATA: dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        layout[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(layout, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_JSON:
        raise ConfigError.of("head", f"a head, names and shapes of at most {MOST_JSON:,} bytes", len(text), "Put less into one file.")
    return len(text).to_bytes(_LENGTH, "little") + text


def read_tensors(read: Callable[[int], Bytes], size: int | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file; raise an `ArtifactError` if its header makes no sense or it ends early.

    `read` gives between 1 and the given number of bytes, and is not asked for any behind the file's `size`, which may be None.
    """
    layout = layout_of(header_in(read, size), size)
    body = take(read, layout.size)
    if len(body) < layout.size:
        raise ArtifactError(f"it ends {layout.size - len(body):,} bytes too early")
    return tensors_in(memoryview(body), layout), layout.metadata


def header_in(read: Callable[[int], Bytes], size: int | None) -> bytes:
    """Return the header of a safetensors file of `size` bytes; raise an `ArtifactError` if it is longer than the file or the limit."""
    length = bytes(take(read, _LENGTH))
    count, most = int.from_bytes(length, "little"), MOST_JSON if size is None else min(MOST_JSON, size - _LENGTH)
    text = take(read, count) if count <= most else b""
    if len(length) < _LENGTH or len(text) < count:
        raise ArtifactError(f"it ends in its header, of {count:,} bytes")
    return length + text


def layout_of(header: bytes, size: int | None) -> TensorLayout:
    """Return the layout of a safetensors file of `size` bytes; raise an `ArtifactError` if tensors overlap, leave gaps or don't fill it."""
    entries, tensors, end = parse_json(header[_LENGTH:]), {}, 0
    try:
        metadata = entries.pop(_METADATA, None) or {}
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            shape, offsets, dtype = tuple(entry["shape"]), entry["data_offsets"], DTYPES[entry["dtype"]]
            if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in (*shape, *offsets)):
                raise ValueError(f"shape {str(shape)[:100]} and offsets {str(offsets)[:100]}")
            start, end = end, end + math.prod(shape) * dtype.itemsize
            if offsets != [start, end] or (start == end and max(shape) > _MOST_EMPTY):
                raise ValueError(f"offsets {str(offsets)[:100]} for {dtype} {str(shape)[:100]} at byte {start}")
            tensors[name] = dtype, shape, start
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata that are no strings")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"its header makes no sense: {error!r}") from error
    if size is not None and len(header) + end != size:
        raise ArtifactError(f"it has {size:,} bytes of {len(header) + end:,}")
    return TensorLayout(tensors, metadata, end)


def tensors_in(body: memoryview, layout: TensorLayout) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file in the memory of its body."""
    tensors = {}
    for name, (dtype, shape, start) in layout.tensors.items():
        count = math.prod(shape)
        flat = torch.frombuffer(body, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(shape)
    return tensors


def not_finite(tensors: Mapping[str, Tensor], exempt: Collection[str] = ()) -> str | None:
    """Return the name of a tensor that has infinities or NaN and is not exempt, or None."""
    for name, tensor in tensors.items():
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if plain.is_floating_point() and plain.numel() and name not in exempt:
            # Either end shows both, and no copy is made. There are no such operations for 8 bits.
            ends = (plain.float() if plain.element_size() == 1 else plain).aminmax()
            if not all(math.isfinite(end.item()) for end in ends):
                return name
    return None


def checked_key(key: str) -> str:
    """Return the key if it is valid; raise a `ConfigError` for others, also with capitals, which some file systems ignore."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ConfigError.of("key", "1 to 128 hexadecimal digits in small letters", key, "Take a digest's hexdigest().")
    return key


def head_as_json(head: Mapping[str, Any]) -> str:
    """Return the head as JSON; raise a `ConfigError` if JSON would change it."""
    try:
        text = json.dumps(head, separators=(",", ":"))
        if not isinstance(head, dict) or parse_json(text) != head:
            raise ValueError(text)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "Give strings as keys, and lists where there are tuples."
        raise ConfigError.of("head", "a dict that comes back from JSON as it was", str(error), hint) from error
    return text


def encode(key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return a blob as a list of bytes: the front with the header, then the memory of each tensor."""
    contiguous, crc32 = dense(tensors), 0
    for tensor in contiguous.values():
        crc32 = zlib.crc32(as_bytes(tensor), crc32)
    covered = crc32.to_bytes(_FRONT - DIGEST, "little") + header_of(contiguous, {"head": head_as_json(head)})
    return [_digest(checked_key(key), covered) + covered, *map(as_bytes, contiguous.values())]


def _digest(key: str, covered: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + b" " + covered, digest_size=DIGEST).digest()


def read_header(key: str, size: int, read: Callable[[int], Bytes]) -> tuple[dict[str, Any], TensorLayout, int]:
    """Return the head, the layout and the CRC-32 of a blob of `size` bytes; raise an `ArtifactError` if its header is damaged."""
    front = bytes(take(read, _FRONT))
    text = header_in(read, size - _FRONT)
    if front[:DIGEST] != _digest(key, front[DIGEST:] + text):
        raise ArtifactError("its header's checksum is wrong")
    layout = layout_of(text, size - _FRONT)
    head = parse_json(layout.metadata.get("head", "null"))
    if not isinstance(head, dict):
        raise ArtifactError("its head is no dict")
    return head, layout, int.from_bytes(front[DIGEST:], "little")


def decode(key: str, content: Bytes, verify: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a blob, in the memory of `content` if that is writable; raise an `ArtifactError` for damage.

    Without `verify` the body's checksum is not compared.
    """
    memory = memoryview(content)
    _, layout, crc32 = read_header(key, len(memory), reader_of(memory))
    body = memory[len(memory) - layout.size :]
    return checked_tensors(memoryview(bytearray(body)) if body.readonly else body, layout, crc32 if verify else None)


def checked_tensors(body: memoryview, layout: TensorLayout, crc32: int | None) -> dict[str, Tensor]:
    """Return the tensors in the body of a blob; raise an `ArtifactError` if it has another checksum than a given one."""
    if crc32 is not None and zlib.crc32(body) != crc32:
        raise ArtifactError("the checksum of its tensors is wrong")
    return tensors_in(body, layout)
