"""Semantic codes that are still on their way: each part is checked and handed on as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import Tensor

from hf_kvcaches.core.quantize import Quantized
from hf_kvcaches.errors import ArtifactError, UnsupportedError
from hf_kvcaches.stores.reading import DTYPES
from hf_kvcaches.translate._codes_format import (
    DIGEST,
    LONGEST_HEAD,
    MAGIC,
    PART,
    PLAIN,
    START,
    VERSION,
    body_header,
    body_size,
    digest_of,
    digest_of_part,
)
from hf_kvcaches.translate.codes import Part, SemanticCodes
from hf_kvcaches.translate.head import AGAIN, CodesHead, PartHead

Bytes = bytes | bytearray | memoryview

# What is asked for at once: memory grows with what came, not with what a length promises.
_READ = 1 << 20


class ArrivingCodes:
    """The one reader of semantic codes: iterate over it, once, for the parts in their order.

    The head is read when it is made. Whatever is wrong is an `ArtifactError`, then and each time one asks again; parts that were handed
    out before stay good, but are no longer all of the prompt.

    Args:
        source: The bytes of one message and no more, in pieces of any sizes, or a function that returns between 1 and the given number
            of bytes, and none at the end. Such a function is asked for no byte beyond the message.
        ending: How it is said that no more bytes come.
    """

    def __init__(self, source: Iterable[Bytes] | Callable[[int], Bytes], ending: str = "Semantic codes end") -> None:
        self._whole = not callable(source)
        self._read: Callable[[int], Bytes] = source if callable(source) else _Pieces(source).read
        self._ending = ending
        self._at, self._number, self._finished, self._failure = 0, 0, False, ""
        self.head, self._digest = self._read_head()

    @property
    def nbytes(self) -> int:
        """Of the whole message."""
        return self.head.nbytes

    def collect(self) -> SemanticCodes:
        """Waits for all parts. They can't be collected once one was taken."""
        if self._number or self._finished:
            raise UnsupportedError("Parts of these codes were taken already, and are not kept. Collect them first, then iterate.")
        return SemanticCodes(self.head, self)

    def __iter__(self) -> Self:
        if self._finished:
            raise UnsupportedError("All parts of these codes were taken already, and are not kept. Use collect() to have them twice.")
        return self

    def __next__(self) -> Part:
        if self._failure:
            raise ArtifactError(self._failure)
        if self._finished:
            raise StopIteration
        try:
            if self._number < len(self.head.parts):
                return self._read_part(self.head.parts[self._number])
            if self._whole and self._read(1):
                raise ArtifactError(f"Bytes follow semantic codes that end after {self._at} bytes. Give the bytes of one message only.")
        except BaseException as error:
            # Bytes may be gone: who asks again must not be given what follows them.
            self._failure = str(error) if isinstance(error, ArtifactError) else f"Reading semantic codes was broken off: {error!r}. {AGAIN}"
            raise
        self._finished = True
        raise StopIteration

    def __repr__(self) -> str:
        return f"ArrivingCodes({self.head.method}, {self.head.dtype}, {self._number} of {len(self.head.parts)} parts taken)"

    def _read_head(self) -> tuple[CodesHead, bytes]:
        start = self._available(START.size)
        if not start.startswith(MAGIC[: len(start)]):
            raise ArtifactError(f"Expected semantic codes, got bytes that begin with {bytes(start[:8])!r}. Give those of SemanticCodes.")
        if len(start) < START.size:
            raise ArtifactError(f"{self._ending} after {self._at} bytes, in their head. {AGAIN}")
        _, version, length = START.unpack(start)
        if version > VERSION:
            raise ArtifactError(f"Semantic codes have format version {version}, this reads version {VERSION}. Upgrade hf-kvcaches.")
        if version < VERSION:
            raise ArtifactError(f"Semantic codes have format version {version}, this reads version {VERSION}. Encode the prompt again.")
        if length > LONGEST_HEAD:
            raise ArtifactError(f"Semantic codes say that their head has {length} bytes, more than the {LONGEST_HEAD} allowed. {AGAIN}")
        rest = self._available(length + DIGEST)
        if (missing := length + DIGEST - len(rest)) > 0:
            raise ArtifactError(f"{self._ending} after {self._at} bytes, at least {missing} too early: in their head. {AGAIN}")
        text, digest = rest[:length], bytes(rest[length:])
        if digest_of(start, text) != digest:
            raise ArtifactError(f"Semantic codes have a damaged head. {AGAIN}")
        return CodesHead.from_json(text), digest

    def _read_part(self, expected: PartHead) -> Part:
        tensors, name = self.head.tensors_of(expected), f"{expected.name!r} ({self._number + 1} of {len(self.head.parts)})"
        number, length, digest = PART.unpack(self._exactly(PART.size))
        if number != self._number:
            raise ArtifactError(f"Part {number} of semantic codes came where part {self._number} was next. {AGAIN}")
        if length != (size := body_size(tensors)):
            raise ArtifactError(f"Part {name} of semantic codes has {length} bytes, their head says {size}. {AGAIN}")
        body = self._exactly(size)
        if digest != digest_of_part(self._digest, number, body):
            raise ArtifactError(f"Part {name} of semantic codes is damaged, or of other codes. {AGAIN}")
        if not body.startswith(header := body_header(tensors)):
            raise ArtifactError(f"Part {name} of semantic codes holds other tensors than their head says. {AGAIN}")
        found, start = {}, len(header)
        for tensor in tensors:
            found[tensor.name] = _tensor(body, start, DTYPES[tensor.dtype], tensor.shape)
            start += tensor.nbytes
        if not all(bool(tensor.isfinite().all()) for tensor in found.values() if tensor.is_floating_point()):
            raise ArtifactError(f"Part {name} of semantic codes has infinities or NaN. Look for them in what the producer computed.")
        self._number, self._digest = number + 1, digest
        return Part(expected.name, {code: _code(found, code, self.head, rank) for code, rank in expected.ranks.items()})

    def _exactly(self, count: int) -> bytearray:
        content = self._available(count)
        if len(content) < count:
            raise ArtifactError(f"{self._ending} after {self._at} bytes, {self.head.nbytes - self._at} too early. {AGAIN}")
        return content

    def _available(self, count: int) -> bytearray:
        """So many bytes, or fewer where the source ends."""
        content = bytearray()
        while len(content) < count and (piece := self._read(min(count - len(content), _READ))):
            content += piece
            self._at += len(piece)
        assert len(content) <= count, "a source gave more than was asked for"
        return content


class _Pieces:
    """Pieces of any sizes as something to read from."""

    def __init__(self, pieces: Iterable[Bytes]) -> None:
        # Bytes are iterable too, as numbers.
        self._pieces = iter([pieces] if isinstance(pieces, bytes | bytearray | memoryview) else pieces)
        self._rest = memoryview(b"")

    def read(self, count: int) -> memoryview:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                break
            view = memoryview(piece)
            self._rest = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


def _code(found: dict[str, Tensor], name: str, head: CodesHead, rank: int) -> Tensor | Quantized:
    if head.dtype in PLAIN:
        return found[name]
    return Quantized.from_tensors({piece: found[f"{name}.{piece}"] for piece in ("data", "scale", "zero")}, head.meta_of(rank))


def _tensor(body: bytearray, start: int, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(body, dtype=dtype, count=shape[0] * shape[1], offset=start).reshape(shape)
