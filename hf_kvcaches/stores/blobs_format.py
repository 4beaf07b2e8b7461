"""A blob as bytes: a safetensors file that knows when it is damaged.

```
8 bytes   the header's length
header    {"__metadata__": {"check": ..., "crc32": ..., "head": ...}, NAME: {"dtype", "shape", "data_offsets"}, ...}, padded with spaces
body      the tensors
```

`check` is the SHA-256 of the key and all of the header behind itself, what lies before it is always the same, and `crc32` is that of the
body. So any flipped bit is found, as are a blob under another's key and one of another length, and the header can be trusted
before the body is read.

The body has a CRC-32 because it is read at each use: zlib's runs at 2.8 GB/s where SHA-256 does 1.3 on a processor that has
instructions for it, and BLAKE2b 0.5. It misses no error within 32 neighbouring bits, no two flipped bits within 500 MB, and one in four
billion of the others. Neither is there against someone who means harm: whoever can write a blob can write its checksums.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.reading import DTYPES, MOST_JSON, Place, as_bytes, parse_json, places_of

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KEY = re.compile(r"[0-9a-f]{1,128}")
_METADATA = "__metadata__"
_LENGTH = 8
_OPENING = b'{"__metadata__":{"check":"'
_CHECK = slice(_LENGTH + len(_OPENING), _LENGTH + len(_OPENING) + 64)
# The body starts at a multiple of this many bytes, and with it the first tensor: a cache line.
_ALIGNMENT = 64
# Bytes to read at first for a header. Most are shorter.
FIRST_BYTES = 8 << 10


class Encoded(NamedTuple):
    """A blob that is ready to be written: the header, then the pieces of the body one after the other."""

    header: bytes
    body: list[memoryview]

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        return len(self.header) + sum(len(piece) for piece in self.body)

    @property
    def check(self) -> str:
        """As in `Header`."""
        return self.header[_CHECK].decode()


class Header(NamedTuple):
    """What stands in a header whose checksum is right.

    Args:
        check: Of the header; two blobs of one key and check are the same.
        length: Bytes before the body.
        size: Bytes of the whole blob.
    """

    head: dict[str, Any]
    check: str
    crc32: int
    places: dict[str, Place]
    length: int
    size: int


def checked_key(key: str) -> str:
    """The key, or a `ConfigError`. Capitals are refused because some file systems take them for small letters."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ConfigError.of("key", "1 to 128 hexadecimal digits in small letters", key, "Take a digest's hexdigest().")
    return key


def head_as_json(head: Mapping[str, Any]) -> str:
    """The head as JSON, or a `ConfigError` where it would come back as something else."""
    hint = "Give strings as keys, and lists where there are tuples."
    try:
        text = json.dumps(head, separators=(",", ":"))
        same = isinstance(head, dict) and parse_json(text) == head
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError.of("head", "a dict that JSON can hold", str(error), hint) from error
    if not same:
        raise ConfigError.of("head", "a dict that comes back from JSON as it was", head, hint)
    return text


def array_as_text(values: npt.ArrayLike, dtype: str) -> str:
    """An array as a head can hold it; `dtype` in NumPy's notation, with the order of its bytes."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def array_of_text(text: str, dtype: str) -> npt.NDArray[Any]:
    """Undoes `array_as_text`, with the machine's own order of bytes; a `ValueError` or `TypeError` for any other text."""
    array = np.frombuffer(base64.b64decode(text, validate=True), dtype)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU and contiguous, not copied where they are so already; a `ConfigError` for what can't be stored."""
    plain = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == _METADATA:
            raise ConfigError.of("tensors", f"names that are strings other than {_METADATA!r}", name)
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in _NAMES or tensor.is_meta:
            got = f"{tensor.layout}, {tensor.dtype}, {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError.of(f"tensors[{name!r}]", f"a dense tensor of {', '.join(map(str, _NAMES))}", got)
        plain[name] = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return plain


def crc32_of(pieces: Iterable[memoryview]) -> int:
    """The CRC-32 of the pieces one after the other."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def encode(key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Encoded:
    """A blob as bytes. The pieces of its body are the tensors' own memory where they are dense.

    Args:
        key: A checked key. It isn't written, but in the checksum.
    """
    written, plain = head_as_json(head), dense(tensors)
    layout: dict[str, Any] = dict.fromkeys(plain)
    body, end = [], 0
    # The widest first: so each begins at a multiple of its elements' size.
    for name, tensor in sorted(plain.items(), key=lambda item: -item[1].element_size()):
        start, end = end, end + tensor.nbytes
        layout[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        body.append(as_bytes(tensor))
    metadata = {"check": "0" * 64, "crc32": f"{crc32_of(body):08x}", "head": written}
    text = json.dumps({_METADATA: metadata, **layout}, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH + len(text)) % _ALIGNMENT)
    if len(text) > MOST_JSON:
        raise ConfigError.of("head", f"a head, names and shapes of at most {MOST_JSON:,} bytes", len(text), "Put less into one blob.")
    header = bytearray(len(text).to_bytes(_LENGTH, "little") + text)
    assert header[_LENGTH : _CHECK.start] == _OPENING
    header[_CHECK] = _check(key, header)
    return Encoded(bytes(header), body)


def _check(key: str, header: bytes | bytearray | memoryview) -> bytes:
    # With another length it would be another header: the length need not go in.
    hasher = hashlib.sha256(key.encode() + b" ")
    hasher.update(header[_CHECK.stop :])
    return hasher.hexdigest().encode()


def header_length(start: bytes | memoryview, size: int) -> int:
    """Bytes before the body, as the blob's first bytes say; an `ArtifactError` if a blob of this size can't hold them.

    Args:
        start: The first 8 bytes or more.
    """
    if size < _CHECK.stop or len(start) < _LENGTH:
        raise ArtifactError(f"it ends after {size} bytes, in its header")
    length = _LENGTH + int.from_bytes(start[:_LENGTH], "little")
    if not _CHECK.stop < length <= min(size, _LENGTH + MOST_JSON):
        raise ArtifactError(f"its header should take {length} of its {size} bytes")
    return length


def read_header(key: str, header: bytes | memoryview) -> Header:
    """What a header says, or an `ArtifactError` with the reason why it can't be trusted.

    Args:
        header: All that stands before the body, and nothing else.
    """
    if header_length(header, len(header)) != len(header):
        raise ArtifactError("its header is of another length than it says")
    if header[_LENGTH : _CHECK.start] != _OPENING or header[_CHECK] != _check(key, header):
        raise ArtifactError("its header's checksum is wrong")
    try:
        layout = parse_json(header[_LENGTH:])
        metadata = layout.pop(_METADATA)
        head = parse_json(metadata["head"])
        if not isinstance(head, dict):
            raise ArtifactError("its head is no dict")
        places = places_of(layout)
        size = len(header) + max((place.stop for place in places.values()), default=0)
        return Header(head, metadata["check"], int(metadata["crc32"], 16), places, len(header), size)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"its header makes no sense: {error}") from error


def complete_header(key: str, first: bytes, size: int, read: Callable[[int], bytes]) -> Header:
    """The header of a blob of which some bytes were read; an `ArtifactError` where it can't be trusted, or says another size.

    Args:
        first: Its first `FIRST_BYTES`.
        read: Gives the first bytes, as many as it is called with.
    """
    length = header_length(first, size)
    header = read_header(key, first[:length] if length <= len(first) else read(length))
    if header.size != size:
        raise ArtifactError(f"it has {size} bytes of {header.size}")
    return header


def decode(key: str, content: Any) -> dict[str, Tensor]:
    """The tensors of a blob, in its own memory; an `ArtifactError` with the reason if a single bit is not as it was.

    Args:
        content: All of it, in writable memory: torch warns of any other. It lives as long as the tensors do.
    """
    view = memoryview(content)
    header = read_header(key, view[: header_length(view, len(view))])
    if header.size != len(view):
        raise ArtifactError(f"it has {len(view)} bytes of {header.size}")
    if zlib.crc32(view[header.length :]) != header.crc32:
        raise ArtifactError("the checksum of its tensors is wrong")
    try:
        return {name: _tensor(content, header.length, place) for name, place in header.places.items()}
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArtifactError(f"its header makes no sense: {error!r}") from error


def _tensor(content: Any, offset: int, place: Place) -> Tensor:
    count = (place.stop - place.start) // place.dtype.itemsize
    if count == 0:
        return torch.empty(place.shape, dtype=place.dtype).reshape(place.shape)
    return torch.frombuffer(content, dtype=place.dtype, count=count, offset=offset + place.start).reshape(place.shape)
