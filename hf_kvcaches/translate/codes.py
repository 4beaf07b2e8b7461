"""Semantic codes: what a producer sends instead of its keys and values, and consumers rebuild theirs from.

The tokens of a batch are concatenated without padding, so a part's codes are (bytes of a token, tokens of all rows). Codes come in parts,
each of one or more layers, behind a head that says what they are. `codec/wire/messages.py` describes the bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor

from hf_kvcaches.codec.wire.messages import DIGEST, BodyTensor, MessageReader, MessageWriter, message_bytes
from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.files import opened, write_atomically
from hf_kvcaches.stores.streams import Bytes

# Texts of a head are repeated in errors.
_LONGEST_TEXT = 1000
_MOST_TOKENS, _MOST_BYTES = 1 << 40, 1 << 31
_ROW_DIGEST = re.compile(r"[0-9a-f]{32}")

TokenIds = Tensor | Sequence[int] | np.ndarray[Any, Any]


class Row(NamedTuple):
    """A coded prompt, identified by the digest of its token ids.

    Args:
        tokens: How many, without padding.
        digest: Of their ids, as from `Row.of`.
        first: The first token with codes; those before it are expected in the cache.
    """

    tokens: int
    digest: str
    first: int = 0

    @classmethod
    def of(cls, ids: TokenIds, first: int = 0) -> Self:
        """The row of some token ids, without padding."""
        return cls(len(ids), _digest(ids), first)

    @property
    def coded(self) -> int:
        """How many tokens have codes."""
        return self.tokens - self.first

    def begins(self, ids: TokenIds) -> bool:
        """Whether a text begins with this row."""
        return len(ids) >= self.tokens and _digest(ids[: self.tokens]) == self.digest


def _digest(ids: TokenIds) -> str:
    return hashlib.blake2b(np.asarray(ids).astype("<u4").tobytes(), digest_size=DIGEST).hexdigest()


class PartHead(NamedTuple):
    """A part that follows: its name, such as `layer.3` or `layers.1-3`, and its bytes of a token."""

    name: str
    rows: int


@dataclass(frozen=True)
class CodesHead:
    """What a consumer is told before the codes.

    Args:
        translator: The translator's digest.
        rows: The prompts, in the order of their tokens.
        parts: In the order in which they are sent; none where all is rebuilt from the token ids.
    """

    kind: ClassVar[str] = "semantic codes"
    finite: ClassVar[bool] = True

    translator: str
    rows: tuple[Row, ...]
    parts: tuple[PartHead, ...]

    @cached_property
    def tokens(self) -> int:
        """Tokens with codes, of all rows."""
        return sum(row.coded for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Of the whole message."""
        return message_bytes(self)

    def tensors_of(self, part: PartHead) -> list[BodyTensor]:
        """What the body of a part holds."""
        return [BodyTensor("codes", "U8", (part.rows, self.tokens))]

    def content(self) -> dict[str, Any]:
        """The head as JSON values."""
        rows = [list(row if row.first else row[:2]) for row in self.rows]
        return {"translator": self.translator, "rows": rows, "parts": list(map(list, self.parts))}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """The inverse of `content`."""
        rows, parts = (tuple(kind(*each) for each in content[name]) for name, kind in (("rows", Row), ("parts", PartHead)))
        head = cls(**content | {"rows": rows, "parts": parts})
        texts = [head.translator, *(part.name for part in head.parts)]
        counts = [(row.tokens, 0, _MOST_TOKENS) for row in head.rows] + [(row.first, 0, row.tokens) for row in head.rows]
        counts += [(part.rows, 1, _MOST_BYTES) for part in head.parts]
        if not all(isinstance(text, str) and 0 < len(text) <= _LONGEST_TEXT for text in texts):
            raise ValueError("a name of no or too many characters")
        if not all(type(count) is int and least <= count <= most for count, least, most in counts):
            raise ValueError("a count out of its range")
        if not head.rows or not all(_ROW_DIGEST.fullmatch(row.digest) for row in head.rows):
            raise ValueError("no rows, or a digest that is none")
        if len(set(texts[1:])) < len(head.parts) or len(head.parts) > MOST_LAYERS:
            raise ValueError("parts of equal names, or too many")
        return head


class Part(NamedTuple):
    """The codes of some layers: packed, (bytes of a token, tokens), uint8."""

    name: str
    codes: Tensor


def message_of(head: CodesHead, parts: Iterable[Part]) -> Iterator[bytes]:
    """The bytes of codes: the head, then part by part as they are computed."""
    writer = MessageWriter(head)
    yield writer.begin()
    for expected, part in zip(head.parts, parts, strict=True):
        assert part.name == expected.name
        yield b"".join(writer.add({"codes": part.codes}))


class SemanticCodes:
    """All codes of one or more prompts, in memory.

    Args:
        head: What they are.
        parts: As the head says, in its order.
    """

    def __init__(self, head: CodesHead, parts: Iterable[Part]) -> None:
        self.head, self.parts = head, tuple(parts)
        shapes = [(part.name, tuple(part.codes.shape)) for part in self.parts]
        assert shapes == [(part.name, (part.rows, head.tokens)) for part in head.parts], f"{head.parts}, got {shapes}"

    @property
    def nbytes(self) -> int:
        """The length of `to_bytes()`."""
        return self.head.nbytes

    def chunks(self) -> Iterator[bytes]:
        """The bytes to send: the head, then part by part."""
        return message_of(self.head, self.parts)

    def to_bytes(self) -> bytes:
        """All bytes at once."""
        return b"".join(self.chunks())

    @staticmethod
    def from_bytes(data: Bytes) -> SemanticCodes:
        """The inverse of `to_bytes`; bytes of anything but one whole message are an `ArtifactError`."""
        if not isinstance(data, Bytes):
            raise ConfigError.of("data", "bytes", type(data).__name__)
        return ArrivingCodes([data]).collect()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file in a folder that exists, whole or not at all."""
        write_atomically(path, [self.to_bytes()])

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SemanticCodes:
        """Read a file that `save` wrote."""
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
    """Semantic codes that are read while they arrive: iterate over the parts in their order. Parts that arrived are kept.

    Args:
        source: The bytes of one message and no more, in pieces of any size, or a function that returns between 1 and the given number
            of bytes, and none at the end. Such a function is asked for no byte beyond the message.
        ending: What an error says where bytes end too early.
    """

    def __init__(self, source: Iterable[Bytes] | Callable[[int], Bytes], ending: str = "") -> None:
        self._message = MessageReader(source, CodesHead, ending)
        self.head = self._message.head
        self._parts: list[Part] = []

    @property
    def nbytes(self) -> int:
        """Of the whole message."""
        return self.head.nbytes

    def collect(self) -> SemanticCodes:
        """Wait for all parts."""
        return SemanticCodes(self.head, self)

    def __iter__(self) -> Iterator[Part]:
        for number, part in enumerate(self.head.parts):
            if number == len(self._parts):
                self._parts.append(Part(part.name, next(self._message)["codes"]))
            yield self._parts[number]
        next(self._message, None)  # nothing may follow

    def __repr__(self) -> str:
        return f"ArrivingCodes({len(self._parts)} of {len(self.head.parts)} parts arrived)"
