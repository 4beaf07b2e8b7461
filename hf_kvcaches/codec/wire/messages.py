"""Tensors as bytes that are checked part by part, while they arrive: codes of a translator or a `KVCodec`, and whole caches.

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
body      a safetensors file
```

Numbers are little-endian. Every digest takes the one before it in, so a part is accepted in its own place of its own message only.
Names, shapes and dtypes of all tensors follow from the head, and with them each body's length and all of it but the numbers; the length of
an entropy-coded tensor follows from that of its body. A reader never takes more memory than it was sent bytes, and decoders never meet a
tensor that they don't expect.

The digests find accidents. Whoever can write codes can write their digests too: any bytes at all end in an `ArtifactError` or in codes of
the right form, but whether a producer is to be believed is for others to say.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs_format import DTYPES, as_bytes
from hf_kvcaches.stores.files import Source, parse_json, reader_of, take

Bytes = bytes | bytearray | memoryview
VERSION = 3
AGAIN = "Have them sent again."

_MAGIC = b"HFKVCODE"
# Magic, version, length of the head.
_START = struct.Struct("<8sII")
# Number, length of the body, digest.
_PART = struct.Struct("<IQ16s")
DIGEST = 16
# Beyond these lies damage, or a trap: small values in JSON take many times their length, and long to read. Commas bound how many there are
# before one is read. 60,000 rows fit.
LONGEST_HEAD = 16 << 20
MOST_COMMAS = 1 << 17


class BodyTensor(NamedTuple):
    """A tensor in the body of a part; `dtype` is safetensors' name.

    A shape of None is that of the only tensor of a body, of one dimension and of a length that the head does not say.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        assert self.shape is not None
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Head(Protocol):
    """What is known of a message before its parts come."""

    kind: ClassVar[str]
    """What the codes are, in small letters: in the head, and in errors."""
    finite: ClassVar[bool]
    """Whether floating-point numbers other than finite ones are refused."""

    @property
    def parts(self) -> Sequence[Any]:
        """What it says of each part; each has a `name`."""
        ...

    def tensors_of(self, part: Any) -> list[BodyTensor]:
        """What the body of a part holds, in its order."""
        ...

    def content(self) -> dict[str, Any]:
        """What is sent of it, for JSON."""
        ...

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """The inverse of `content`; any `ValueError`, `KeyError`, `TypeError` or `AttributeError` for what makes no sense."""
        ...


SomeHead = TypeVar("SomeHead", bound=Head)


def json_of(head: Head) -> bytes:
    """A head as it is sent: for each there are exactly these bytes."""
    return json.dumps({"kind": head.kind, **head.content()}, separators=(",", ":")).encode()


def head_of(head_type: type[SomeHead], text: bytes | bytearray) -> SomeHead:
    """The inverse of `json_of`; an `ArtifactError` for any other bytes."""
    codes = _sentence(head_type.kind)
    if text.count(b",") > MOST_COMMAS:
        raise ArtifactError(f"{codes} have a head with more than the {MOST_COMMAS} commas allowed. {AGAIN}")
    try:
        content = parse_json(text)
        kind = content.pop("kind")
        if kind != head_type.kind:
            raise ArtifactError(f"Expected {head_type.kind}, got {str(kind)[:100]}. Read them with what has written them.")
        head = head_type.of_content(content)
        same = json_of(head) == text
    except ArtifactError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # What a head says may be as long as the head.
        raise ArtifactError(f"{codes} have a head that makes no sense: {str(error)[:300]} {AGAIN}") from error
    if not same:
        raise ArtifactError(f"{codes} have a head that version {VERSION} of the format would write otherwise. {AGAIN}")
    return head


class MessageWriter:
    """A message part by part: a producer sends a layer while it computes the next.

    Attributes:
        number: That of the next part.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        self.number = 0
        self._digest: bytes | None = None

    def begin(self) -> bytes:
        """What is sent first. Called once."""
        assert self._digest is None, "the message was begun already"
        text = json_of(self.head)
        if len(text) > LONGEST_HEAD or text.count(b",") > MOST_COMMAS:
            limits = f"at most {LONGEST_HEAD} bytes of JSON and {MOST_COMMAS} commas in it"
            raise ConfigError.of("head", limits, (len(text), text.count(b",")), "Encode fewer rows at once.")
        start = _START.pack(_MAGIC, VERSION, len(text)) + text
        self._digest = _digest_of(start)
        return start + self._digest

    def add(self, tensors: Mapping[str, Tensor]) -> list[Bytes]:
        """The bytes of the next part, in pieces, of which the numbers of tensors on a CPU are not copied.

        Args:
            tensors: As the head says, by name.
        """
        assert self._digest is not None, "begin() comes first"
        expected = [
            tensor if tensor.shape is not None else tensor._replace(shape=(tensors[tensor.name].numel(),))
            for tensor in self.head.tensors_of(self.head.parts[self.number])
        ]
        form = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        assert form == {tensor.name: (DTYPES[tensor.dtype], tensor.shape) for tensor in expected}, f"the head says {expected}, got {form}"
        body: list[Bytes] = [_body_header(expected), *(as_bytes(tensors[tensor.name].detach().cpu().contiguous()) for tensor in expected)]
        self._digest = _digest_of_part(self._digest, self.number, *body)
        start = _PART.pack(self.number, sum(map(len, body)), self._digest)
        self.number += 1
        return [start, *body]


class MessageReader(Generic[SomeHead]):
    """The one reader of messages: iterate over it, once, for the tensors of each part in their order.

    The head is read when it is made. Whatever is wrong is an `ArtifactError`, then and each time one asks again; parts that were handed
    out before stay good, but are no longer all of the message.

    Args:
        source: The bytes of one message and no more, whole or in pieces of any sizes, or a function that returns between 1 and the given
            number of bytes, and none at the end. Such a function is asked for no byte beyond the message.
        head_type: Of the message.
        ending: How it is said that no more bytes come.

    Attributes:
        nbytes: That were read.
    """

    def __init__(self, source: Source, head_type: type[SomeHead], ending: str = "") -> None:
        self._whole = not callable(source)
        self._read = reader_of(source)
        self._codes, self._ending = head_type.kind, ending or f"{_sentence(head_type.kind)} end"
        self.nbytes, self._failure = 0, ""
        self.taken, self.finished = 0, False
        self.head, self._digest = self._read_head(head_type)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._failure:
            raise ArtifactError(self._failure)
        if self.finished:
            raise StopIteration
        try:
            if self.taken < len(self.head.parts):
                return self._read_part(self.head.parts[self.taken])
            if self._whole and self._read(1):
                raise ArtifactError(f"Bytes follow {self._codes} that end after {self.nbytes} bytes. Give the bytes of one message only.")
        except BaseException as error:
            # Bytes may be gone: who asks again must not be given what follows them.
            known = isinstance(error, ArtifactError)
            self._failure = str(error) if known else f"Reading {self._codes} was broken off: {error!r}. {AGAIN}"
            raise
        self.finished = True
        raise StopIteration

    def _read_head(self, head_type: type[SomeHead]) -> tuple[SomeHead, bytes]:
        start, codes = self._available(_START.size), _sentence(self._codes)
        if not start.startswith(_MAGIC[: len(start)]):
            raise ArtifactError(
                f"Expected {self._codes}, got bytes that begin with {bytes(start[:8])!r}. Give what was sent, from its start."
            )
        if len(start) < _START.size:
            raise ArtifactError(f"{self._ending} after {self.nbytes} bytes, in their head. {AGAIN}")
        _, version, length = _START.unpack(start)
        if version != VERSION:
            hint = "Upgrade hf-kvcaches." if version > VERSION else "Encode the prompt again."
            raise ArtifactError(f"{codes} have format version {version}, this reads version {VERSION}. {hint}")
        if length > LONGEST_HEAD:
            raise ArtifactError(f"{codes} say that their head has {length} bytes, more than the {LONGEST_HEAD} allowed. {AGAIN}")
        rest = self._available(length + DIGEST)
        if (missing := length + DIGEST - len(rest)) > 0:
            raise ArtifactError(f"{self._ending} after {self.nbytes} bytes, at least {missing} too early: in their head. {AGAIN}")
        text, digest = rest[:length], bytes(rest[length:])
        if _digest_of(start, text) != digest:
            raise ArtifactError(f"{codes} have a damaged head. {AGAIN}")
        return head_of(head_type, text), digest

    def _read_part(self, part: Any) -> dict[str, Tensor]:
        codes, parts = self._codes, len(self.head.parts)
        name = f"{part.name!r} ({self.taken + 1} of {parts})"
        number, length, digest = _PART.unpack(self._exactly(_PART.size, name))
        if number != self.taken:
            raise ArtifactError(f"Part {number} of {codes} came where part {self.taken} was next. {AGAIN}")
        tensors = _with_shapes(self.head.tensors_of(part), length)
        if length != (size := _body_size(tensors)):
            raise ArtifactError(f"Part {name} of {codes} has {length} bytes, where {size} fit their head. {AGAIN}")
        body = self._exactly(size, name)
        if digest != _digest_of_part(self._digest, number, body):
            raise ArtifactError(f"Part {name} of {codes} is damaged, or of other codes. {AGAIN}")
        if not body.startswith(header := _body_header(tensors)):
            raise ArtifactError(f"Part {name} of {codes} holds other tensors than their head says. {AGAIN}")
        found, start = {}, len(header)
        for tensor in tensors:
            found[tensor.name] = _tensor(body, start, DTYPES[tensor.dtype], tensor.shape or ())
            start += tensor.nbytes
        if self.head.finite and not all(bool(tensor.isfinite().all()) for tensor in found.values() if tensor.is_floating_point()):
            raise ArtifactError(f"Part {name} of {codes} has infinities or NaN. Look for them in what the producer computed.")
        self.taken, self._digest = number + 1, digest
        return found

    def _exactly(self, count: int, part: str) -> bytearray:
        content = self._available(count)
        if missing := count - len(content):
            raise ArtifactError(f"{self._ending} in part {part} after {self.nbytes} bytes, at least {missing} too early. {AGAIN}")
        return content

    def _available(self, count: int) -> bytearray:
        """So many bytes, or fewer where the source ends."""
        content = take(self._read, count)
        self.nbytes += len(content)
        return content


def _body_header(tensors: Sequence[BodyTensor]) -> bytes:
    """What stands in a safetensors file before the numbers."""
    layout, end = {}, 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        layout[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(layout, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _with_shapes(tensors: list[BodyTensor], length: int) -> list[BodyTensor]:
    """The tensors of a body of this length, as the head says; one of unknown shape has the length that fits."""
    if len(tensors) != 1 or tensors[0].shape is not None:
        return tensors
    sized = lambda numbers: [tensors[0]._replace(shape=(max(0, numbers),))]  # noqa: E731
    itemsize = DTYPES[tensors[0].dtype].itemsize
    # A header with more digits is longer, in steps of 8 bytes.
    headers = range(len(_body_header(sized(0))), len(_body_header(sized(length))) + 1, 8)
    fitting = (found for header in headers if _body_size(found := sized((length - header) // itemsize)) == length)
    return next(fitting, sized(length // itemsize))


def _body_size(tensors: Sequence[BodyTensor]) -> int:
    """Bytes of a body."""
    return len(_body_header(tensors)) + sum(tensor.nbytes for tensor in tensors)


def _digest_of(*pieces: Bytes) -> bytes:
    """The digest of the pieces one after the other."""
    hasher = hashlib.blake2b(digest_size=DIGEST)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def _digest_of_part(before: bytes, number: int, *body: Bytes) -> bytes:
    """The digest of a part, which has those of all parts before it in it.

    Args:
        before: The digest of the part before, or of the head.
    """
    return _digest_of(before, number.to_bytes(4, "little"), *body)


def _tensor(body: bytearray, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(body, dtype=dtype, count=math.prod(shape), offset=start).reshape(shape)


def _sentence(kind: str) -> str:
    """As a sentence begins."""
    return kind[:1].upper() + kind[1:]
