"""A blob as bytes: a checksum, then a safetensors file.

```
front    16 bytes of BLAKE2b over the key, the rest of the front and the header; the CRC-32 of the body in 8 bytes
header   its length in 8 bytes, then JSON: names, dtypes, shapes and offsets, and as metadata the head
body     the tensors
```

So the head can be trusted before the body is read, and any flipped bit is noticed, as are a blob under another's key and one of another
length. The checksums are against accidents: whoever can write a blob can write its checksums.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.reading import (
    DTYPES,
    LENGTH,
    METADATA,
    MOST_JSON,
    TensorLayout,
    as_bytes,
    header_in,
    layout_of,
    parse_json,
    tensors_in,
)

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KEY = re.compile(r"[0-9a-f]{1,128}")
_DIGEST, _FRONT = 16, 24  # bytes


class Header(NamedTuple):
    """The front and the header of a blob, once their checksum is right."""

    head: dict[str, Any]
    crc32: int
    layout: TensorLayout
    start: int  # bytes before the body


def checked_key(key: str) -> str:
    """The key, or a `ConfigError`. Capitals are refused because some file systems take them for small letters."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ConfigError.of("key", "1 to 128 hexadecimal digits in small letters", key, "Take a digest's hexdigest().")
    return key


def head_as_json(head: Mapping[str, Any]) -> str:
    """The head as JSON, or a `ConfigError` where it would come back as something else."""
    try:
        text = json.dumps(head, separators=(",", ":"))
        if isinstance(head, dict) and parse_json(text) == head:
            return text
        got: object = head
    except (TypeError, ValueError, RecursionError) as error:
        got = str(error)
    hint = "Give strings as keys, and lists where there are tuples."
    raise ConfigError.of("head", "a dict that comes back from JSON as it was", got, hint)


def array_as_text(values: npt.ArrayLike, dtype: str) -> str:
    """An array as a head can hold it; `dtype` in NumPy's notation, with the order of its bytes."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def array_of_text(text: str, dtype: str) -> npt.NDArray[Any]:
    """Undoes `array_as_text`; a `ValueError` or `TypeError` for any other text."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU and contiguous, not copied where they are so already; a `ConfigError` for what can't be stored."""
    plain = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == METADATA:
            raise ConfigError.of("tensors", "names that are strings other than '__metadata__'", name)
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in _DTYPE_NAMES or tensor.is_meta:
            got = f"{tensor.layout}, {tensor.dtype}, {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError.of(f"tensors[{name!r}]", f"a dense tensor of {', '.join(map(str, DTYPES.values()))}", got)
        plain[name] = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return plain


def encode(key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """A blob as pieces of bytes, the front first. Those of tensors are their memory, not a copy."""
    # The largest elements first, so that each tensor begins at a multiple of its element's size.
    plain = sorted(dense(tensors).items(), key=lambda item: -item[1].itemsize)
    layout: dict[str, Any] = {METADATA: {"head": head_as_json(head)}}
    start = crc32 = 0
    for name, tensor in plain:
        stop = start + tensor.nbytes
        layout[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start, crc32 = stop, zlib.crc32(as_bytes(tensor), crc32)
    text = json.dumps(layout, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_JSON:
        raise ConfigError.of("head", f"a head, names and shapes of at most {MOST_JSON:,} bytes", len(text), "Put less into one blob.")
    covered = crc32.to_bytes(_FRONT - _DIGEST, "little") + len(text).to_bytes(LENGTH, "little") + text
    return [_digest(checked_key(key), covered) + covered, *(as_bytes(tensor) for _, tensor in plain)]


def version_of(blob: bytes) -> bytes:
    """The checksum that a blob, or its front, begins with: blobs of one key and version are the same, unless one is damaged."""
    return blob[:_DIGEST]


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + b" " + content, digest_size=_DIGEST).digest()


def read_header(key: str, size: int, read: Callable[[int], bytes]) -> Header:
    """The header of a blob; an `ArtifactError` with the reason where it can't be trusted.

    Args:
        size: Bytes of the blob, by the place.
        read: Returns the next bytes, at most as many as it is asked for.
    """
    front = read(_FRONT)
    text = header_in(read, size - _FRONT)
    if front[:_DIGEST] != _digest(key, front[_DIGEST:] + text):
        raise ArtifactError("its header's checksum is wrong")
    layout = layout_of(text, size - _FRONT)
    head = parse_json(layout.metadata.get("head", "null"))
    if not isinstance(head, dict):
        raise ArtifactError("its head is no dict")
    return Header(head, int.from_bytes(front[_DIGEST:], "little"), layout, _FRONT + len(text))


def verified(body: bytearray | memoryview, header: Header, known: bool = False) -> dict[str, Tensor]:
    """The tensors of a blob, in the memory of its body; an `ArtifactError` if a bit is not as it was.

    Args:
        known: Whether the checksum of this body was verified before.
    """
    if len(body) != header.layout.size or not (known or zlib.crc32(body) == header.crc32):
        raise ArtifactError("the checksum of its tensors is wrong")
    return tensors_in(body, header.layout)


def decode(key: str, content: bytes, known: bool = False) -> dict[str, Tensor]:
    """The tensors of a blob; an `ArtifactError` with the reason if a bit is not as it was.

    Args:
        known: As of `verified`.
    """
    header = read_header(key, len(content), io.BytesIO(content).read)
    # A copy, because torch takes only memory that can be written to.
    return verified(bytearray(memoryview(content)[header.start :]), header, known)
