"""Semantic codes: what a producer sends in place of its keys and values, and consumers rebuild theirs from.

A batch's tokens are concatenated without padding, so the codes of a part are `(bytes of a token, tokens of all rows)`. Codes come in parts,
one for each layer that is sent or one for all, and the head that comes before them says what they will be. `core/wire/messages.py` has the
bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_kvcaches.core.files import write_atomically
from hf_kvcaches.core.wire.messages import Bytes, MessageReader, MessageWriter
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from hf_kvcaches.stores.files import opened
from hf_kvcaches.translate.head import CodesHead


class Part(NamedTuple):
    """The codes of a layer, or of all.

    Args:
        name: That of its `PartHead`.
        codes: Packed, (bytes of a token, tokens), uint8.
    """

    name: str
    codes: Tensor


class CodesWriter:
    """Codes as bytes, part by part: a producer sends a layer while it computes the next."""

    def __init__(self, head: CodesHead) -> None:
        self.head = head
        self._message = MessageWriter(head)

    def begin(self) -> bytes:
        """What is sent first. Called once."""
        return self._message.begin()

    def add(self, part: Part) -> bytes:
        """The bytes of the next part."""
        _check_part(self.head, self._message.number, part)
        return self._message.add({"codes": part.codes})


class SemanticCodes:
    """All codes of one or more prompts, in memory.

    Args:
        head: What they are.
        parts: As the head says, in its order.
    """

    def __init__(self, head: CodesHead, parts: Iterable[Part]) -> None:
        self.head = head
        self.parts = tuple(parts)
        assert len(self.parts) == len(head.parts), f"{len(self.parts)} parts for a head of {len(head.parts)}"
        for number, part in enumerate(self.parts):
            _check_part(head, number, part)

    @property
    def nbytes(self) -> int:
        """The length of `to_bytes()`."""
        return self.head.nbytes

    def chunks(self) -> Iterator[bytes]:
        """The bytes to send: the head, then part by part."""
        writer = CodesWriter(self.head)
        yield writer.begin()
        for part in self.parts:
            yield writer.add(part)

    def to_bytes(self) -> bytes:
        """All bytes at once."""
        return b"".join(self.chunks())

    @staticmethod
    def from_bytes(data: Bytes) -> SemanticCodes:
        """The inverse of `to_bytes`. Anything else is an `ArtifactError`.

        Args:
            data: All of the bytes, and no more.
        """
        if not isinstance(data, Bytes):
            raise ConfigError.of("data", "bytes", type(data).__name__)
        return ArrivingCodes([data]).collect()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file, whole or not at all.

        Args:
            path: In a folder that exists.
        """

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                file.writelines(self.chunks())

        write_atomically(path, write)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SemanticCodes:
        """Reads what `save` wrote.

        Args:
            path: The file.
        """
        try:
            with opened(path) as file:
                return ArrivingCodes(iter(lambda: file.read(1 << 20), b"")).collect()
        except OSError as error:
            raise ArtifactError(f"{path}: expected a file of semantic codes, got {error}. Write one with SemanticCodes.save.") from error
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}") from error

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        head = self.head
        return f"SemanticCodes({len(head.rows)} rows of {head.tokens} tokens in all, {len(self.parts)} parts, {self.nbytes:,} bytes)"


class ArrivingCodes:
    """Semantic codes as a `MessageReader` takes them in: iterate over it, once, for the parts in their order.

    Args:
        source: The bytes of one message and no more, in pieces of any sizes, or a function that returns between 1 and the given number
            of bytes, and none at the end. Such a function is asked for no byte beyond the message.
        ending: How it is said that no more bytes come.
    """

    def __init__(self, source: Iterable[Bytes] | Callable[[int], Bytes], ending: str = "") -> None:
        self._message = MessageReader(source, CodesHead, ending)
        self.head = self._message.head

    @property
    def nbytes(self) -> int:
        """Of the whole message."""
        return self.head.nbytes

    def collect(self) -> SemanticCodes:
        """Waits for all parts. They can't be collected once one was taken."""
        if self._message.taken or self._message.finished:
            raise UnsupportedError("Parts of these codes were taken already, and are not kept. Collect them first, then iterate.")
        return SemanticCodes(self.head, self)

    def __iter__(self) -> Self:
        if self._message.finished:
            raise UnsupportedError("All parts of these codes were taken already, and are not kept. Use collect() to have them twice.")
        return self

    def __next__(self) -> Part:
        tensors = next(self._message)
        return Part(self.head.parts[self._message.taken - 1].name, tensors["codes"])

    def __repr__(self) -> str:
        return f"ArrivingCodes({self._message.taken} of {len(self.head.parts)} parts taken)"


def _check_part(head: CodesHead, number: int, part: Part) -> None:
    """An assertion that this is the part of that number."""
    assert number < len(head.parts), f"a part {part.name!r} after the last of {len(head.parts)}"
    expected, form = head.parts[number], (part.codes.dtype, tuple(part.codes.shape))
    assert part.name == expected.name, f"part {part.name!r} where {expected.name!r} is next"
    assert form == (torch.uint8, (expected.rows, head.tokens)), f"part {part.name!r} has {form}, its head says {expected}"
