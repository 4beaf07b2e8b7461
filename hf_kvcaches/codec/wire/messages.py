"""Records as bytes that are checked part by part, while they arrive: codes of a translator or a `KVCodec`.

```
8 bytes   HFKVCODE
4         version
4         length of the head
head      JSON: what the codes are, and what parts follow
16        BLAKE2b of all before it
          then for each part:
4         its number, from 0
8         length of its body
16        BLAKE2b of the digest before it, the number and the body
body      a safetensors file with one tensor, the record: `codes`, (bytes,), uint8
```

Numbers are little-endian. Every digest takes the one before it in, so a part is accepted in its own place of its own message only. All of a
body but the record follows from its length. A reader never takes more memory than it was sent bytes.

The digests find accidents. Whoever can write codes can write their digests too: any bytes at all end in an `ArtifactError` or in codes of
the right form, but whether a producer is to be believed is for others to say.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs_format import as_bytes
from hf_kvcaches.stores.files import Bytes, Source, parse_json, reader_of, take

_MAGIC, _VERSION = b"HFKVCODE", 3
_START = struct.Struct("<8sII")  # magic, version, length of the head
_PART = struct.Struct("<IQ16s")  # number, length of the body, digest
_DIGEST = 16
_AGAIN = "Have them sent again."
# Beyond these lies damage, or a trap: small values in JSON take many times their length, and long to read. Commas bound how many there are
# before one is read. 60,000 rows fit.
_LONGEST_HEAD, _MOST_COMMAS, _LONGEST_RECORD = 16 << 20, 1 << 17, 1 << 40


class Head(Protocol):
    """What is known of a message before its parts come."""

    kind: ClassVar[str]  # what the codes are, in small letters: in the head, and in errors

    @property
    def names(self) -> Sequence[str]: ...  # of the parts, for errors

    def content(self) -> dict[str, Any]: ...  # what is sent of it, for JSON

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self: ...  # a `ValueError`, `KeyError`, `TypeError` or `AttributeError` for nonsense


SomeHead = TypeVar("SomeHead", bound=Head)


def message_chunks(head: Head, records: Iterable[Tensor]) -> Iterator[bytes]:
    """Yield the bytes of a message: the head, then each part as soon as there is its record, (bytes,), uint8."""
    text = _json_of(head)
    if len(text) > _LONGEST_HEAD or text.count(b",") > _MOST_COMMAS:
        limits = f"at most {_LONGEST_HEAD} bytes of JSON and {_MOST_COMMAS} commas in it"
        raise ConfigError.of("head", limits, (len(text), text.count(b",")), "Encode fewer rows at once.")
    start = _START.pack(_MAGIC, _VERSION, len(text)) + text
    digest = _digest_of(start)
    yield start + digest
    for number, record in enumerate(records):
        assert (record.ndim, record.dtype) == (1, torch.uint8), f"a record is bytes, got {record.dtype} of {tuple(record.shape)}"
        body = _body_header(len(record)), as_bytes(record.detach().cpu().contiguous())
        digest = _digest_of(digest, number.to_bytes(4, "little"), *body)
        yield b"".join([_PART.pack(number, sum(map(len, body)), digest), *body])


class MessageReader(Generic[SomeHead]):
    """Reads a message: the head when it is made, and the records of the parts, (bytes,), uint8, by iterating over it, once.

    Whatever is wrong is an `ArtifactError`, then and each time one asks again; records that were handed out before stay good, but are no
    longer all of the message. `nbytes` counts what was read.

    Args:
        source: The bytes of one message and no more, whole or in pieces of any sizes, or a function that returns between 1 and the given
            number of bytes, and none at the end. Such a function is asked for no byte beyond the message.
        ending: How it is said that no more bytes come.
    """

    def __init__(self, source: Source, head_type: type[SomeHead], ending: str = "") -> None:
        self._whole, self._read, self.nbytes, self._failure = not callable(source), reader_of(source), 0, ""
        self._codes, self._sentence = head_type.kind, head_type.kind[:1].upper() + head_type.kind[1:]
        self._ending = ending or f"{self._sentence} end"
        self.head, digest = self._read_head(head_type)
        self._records = self._read_parts(digest)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        if self._failure:
            raise ArtifactError(self._failure)
        try:
            return next(self._records)
        except StopIteration:
            raise
        except BaseException as error:
            # Bytes may be gone: who asks again must not be given what follows them.
            known = isinstance(error, ArtifactError)
            self._failure = str(error) if known else f"Reading {self._codes} was broken off: {error!r}. {_AGAIN}"
            raise

    def _read_head(self, head_type: type[SomeHead]) -> tuple[SomeHead, bytes]:
        start = self._take(_START.size, magic=_MAGIC)
        _, version, length = _START.unpack(start)
        if version != _VERSION:
            hint = "Upgrade hf-kvcaches." if version > _VERSION else "Encode the prompt again."
            raise ArtifactError(f"{self._sentence} have format version {version}, this reads version {_VERSION}. {hint}")
        if length > _LONGEST_HEAD:
            raise ArtifactError(f"{self._sentence} say that their head has {length} bytes, more than the {_LONGEST_HEAD} allowed. {_AGAIN}")
        rest = self._take(length + _DIGEST)
        text, digest = rest[:length], bytes(rest[length:])
        if _digest_of(start, text) != digest:
            raise ArtifactError(f"{self._sentence} have a damaged head. {_AGAIN}")
        if text.count(b",") > _MOST_COMMAS:
            raise ArtifactError(f"{self._sentence} have a head with more than the {_MOST_COMMAS} commas allowed. {_AGAIN}")
        try:
            content = parse_json(text)
            if (kind := content.pop("kind")) != self._codes:
                raise ArtifactError(f"Expected {self._codes}, got {str(kind)[:100]}. Read them with what has written them.")
            head = head_type.of_content(content)
            same = _json_of(head) == text
        except ArtifactError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # What a head says may be as long as the head.
            raise ArtifactError(f"{self._sentence} have a head that makes no sense: {str(error)[:300]} {_AGAIN}") from error
        if not same:
            raise ArtifactError(f"{self._sentence} have a head that version {_VERSION} of the format would write otherwise. {_AGAIN}")
        return head, digest

    def _read_parts(self, digest: bytes) -> Iterator[Tensor]:
        names = self.head.names
        for expected, name in enumerate(names):
            part = f"{name!r} ({expected + 1} of {len(names)})"
            number, length, stored = _PART.unpack(self._take(_PART.size, f" in part {part}"))
            if number != expected:
                raise ArtifactError(f"Part {number} of {self._codes} came where part {expected} was next. {_AGAIN}")
            body = self._take(length, f" in part {part}")
            digest = _digest_of(digest, number.to_bytes(4, "little"), body)
            if stored != digest:
                raise ArtifactError(f"Part {part} of {self._codes} is damaged, or of other codes. {_AGAIN}")
            start = 8 + int.from_bytes(body[:8], "little")
            if start > length or not body.startswith(_body_header(length - start)):
                raise ArtifactError(f"Part {part} of {self._codes} holds other tensors than one record. {_AGAIN}")
            yield torch.frombuffer(body, dtype=torch.uint8, offset=start) if start < length else torch.empty(0, dtype=torch.uint8)
        if self._whole and self._read(1):
            raise ArtifactError(f"Bytes follow {self._codes} that end after {self.nbytes} bytes. Give the bytes of one message only.")

    def _take(self, count: int, where: str = "", magic: bytes = b"") -> bytearray:
        content = take(self._read, count)
        self.nbytes += len(content)
        if not content.startswith(magic[: len(content)]):
            got = f"got bytes that begin with {bytes(content[:8])!r}"
            raise ArtifactError(f"Expected {self._codes}, {got}. Give what was sent, from its start.")
        if missing := count - len(content):
            raise ArtifactError(f"{self._ending}{where} after {self.nbytes} bytes, at least {missing} too early. {_AGAIN}")
        return content


def _json_of(head: Head) -> bytes:
    """A head as it is sent: for each there are exactly these bytes."""
    return json.dumps({"kind": head.kind, **head.content()}, separators=(",", ":")).encode()


def _body_header(size: int) -> bytes:
    """What stands in a safetensors file before a record of so many bytes."""
    text = json.dumps({"codes": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _digest_of(*pieces: Bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=_DIGEST)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


@dataclass(frozen=True)
class CodecHead:
    """What is known of the records of a `KVCodec` before they come."""

    kind: ClassVar[str] = "codes of a KVCodec"

    codec: str  # its digest
    layers: list[list[int] | None]  # the bytes of each row's record, or None where the layer is not coded

    @property
    def names(self) -> list[str]:
        return [f"layer.{index}" for index, lengths in enumerate(self.layers) if lengths is not None]

    def content(self) -> dict[str, Any]:
        return {"codec": self.codec, "layers": self.layers}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        head = cls(**content)
        rows = [lengths for lengths in head.layers if lengths is not None]
        counts = [count for lengths in rows for count in lengths]
        fits = isinstance(head.layers, list) and len(head.layers) <= MOST_LAYERS and all(isinstance(lengths, list) for lengths in rows)
        if not fits or not all(type(count) is int and 0 <= count <= _LONGEST_RECORD for count in counts):
            raise ValueError(f"{len(head.layers)} layers, and the counts {counts[:8]}")
        return head
