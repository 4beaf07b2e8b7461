"""Semantic codes: what a producer sends instead of its keys and values, and consumers rebuild theirs from.

The tokens of a batch are concatenated without padding. Codes come in parts, each of one or more layers, behind a head that says what they
are. On the wire the head is a message without a body, and each part a message of its own, whose head has the digest of all that came
before it; `codec/wire/messages.py` describes the bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor

from hf_kvcaches.codec.wire.messages import AGAIN, DIGEST, BodyTensor, MessageReader, MessageWriter, json_of, message_bytes
from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs_format import as_bytes
from hf_kvcaches.stores.files import Bytes, opened, reader_of, write_atomically

# Texts of a head are repeated in errors.
_LONGEST_TEXT = 1000
_MOST_TOKENS, _MOST_BYTES = 1 << 40, 1 << 40
_HEX_DIGEST = re.compile(r"[0-9a-f]{32}")

TokenIds = Tensor | Sequence[int] | np.ndarray[Any, Any]


class Prompt(NamedTuple):
    """A coded prompt, identified by the digest of its token ids.

    Args:
        tokens: How many, without padding.
        digest: Of their ids, as from `Prompt.of`.
        first: The first token with codes; those before it are in the cache already, or are run by the consumer.
    """

    tokens: int
    digest: str
    first: int = 0

    @classmethod
    def of(cls, ids: TokenIds, first: int = 0) -> Self:
        """The prompt of some token ids, without padding."""
        return cls(len(ids), _digest_of(np.asarray(ids).astype("<u4").tobytes()), first)

    @property
    def coded(self) -> int:
        """How many tokens have codes."""
        return self.tokens - self.first

    def begins(self, ids: TokenIds) -> bool:
        """Whether a text begins with this prompt."""
        return len(ids) >= self.tokens and Prompt.of(ids[: self.tokens]).digest == self.digest


def _digest_of(*pieces: bytes | memoryview) -> str:
    hasher = hashlib.blake2b(digest_size=DIGEST)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


@dataclass(frozen=True)
class CodesHead:
    """What a consumer is told before the codes.

    Args:
        translator: The translator's digest.
        prompts: In the order of their tokens.
        names: Of the parts, such as `layer.3` or `layers.1-3`, as they are sent; none where all is rebuilt from the token ids.
    """

    kind: ClassVar[str] = "semantic codes"
    finite: ClassVar[bool] = True
    parts: ClassVar[tuple[Any, ...]] = ()  # bodies in the head's own message

    translator: str
    prompts: tuple[Prompt, ...]
    names: tuple[str, ...]

    @cached_property
    def tokens(self) -> int:
        """Tokens with codes, of all prompts."""
        return sum(prompt.coded for prompt in self.prompts)

    def tensors_of(self, part: Any) -> list[BodyTensor]:
        """There are none."""
        return []

    def content(self) -> dict[str, Any]:
        """The head as JSON values."""
        prompts = [list(prompt if prompt.first else prompt[:2]) for prompt in self.prompts]
        return {"translator": self.translator, "prompts": prompts, "names": list(self.names)}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """The inverse of `content`."""
        head = cls(**content | {"prompts": tuple(Prompt(*each) for each in content["prompts"]), "names": tuple(content["names"])})
        counts = [(prompt.tokens, _MOST_TOKENS) for prompt in head.prompts] + [(prompt.first, prompt.tokens) for prompt in head.prompts]
        _require_names(head.translator, *head.names)
        if not all(type(count) is int and 0 <= count <= most for count, most in counts):
            raise ValueError("a count out of its range")
        if not head.prompts or not all(_HEX_DIGEST.fullmatch(prompt.digest) for prompt in head.prompts):
            raise ValueError("no prompts, or a digest that is none")
        if len(set(head.names)) < len(head.names) or len(head.names) > MOST_LAYERS:
            raise ValueError("parts of equal names, or too many")
        return head


@dataclass(frozen=True)
class PartHead:
    """What a part is; the message that it is the head of has one body.

    Args:
        after: The digest of all that comes before.
        bytes: Of its codes.
    """

    kind: ClassVar[str] = "a part of semantic codes"
    finite: ClassVar[bool] = True

    name: str
    after: str
    bytes: int

    @property
    def parts(self) -> tuple[PartHead]:
        """Itself, as the head of its one body."""
        return (self,)

    def tensors_of(self, part: Any) -> list[BodyTensor]:
        """The codes."""
        return [BodyTensor("codes", "U8", (self.bytes,))]

    def content(self) -> dict[str, Any]:
        """The head as JSON values."""
        return {"name": self.name, "after": self.after, "bytes": self.bytes}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """The inverse of `content`."""
        head = cls(**content)
        _require_names(head.name)
        if not _HEX_DIGEST.fullmatch(head.after) or type(head.bytes) is not int or not 0 <= head.bytes <= _MOST_BYTES:
            raise ValueError("a digest that is none, or a count out of its range")
        return head


def _require_names(*names: Any) -> None:
    if not all(isinstance(name, str) and 0 < len(name) <= _LONGEST_TEXT for name in names):
        raise ValueError("a name of no or too many characters")


class Part(NamedTuple):
    """The codes of some layers, (bytes,), uint8."""

    name: str
    codes: Tensor


def message_of(head: CodesHead, parts: Iterable[Part]) -> Iterator[bytes]:
    """The bytes of codes: the head, then part by part as they are computed."""
    yield MessageWriter(head).begin()
    before = _digest_of(json_of(head))
    for name, part in zip(head.names, parts, strict=True):
        assert part.name == name, f"the head says {name}, got {part.name}"
        codes = part.codes.detach().cpu()
        writer = MessageWriter(PartHead(name, before, codes.numel()))
        yield b"".join([writer.begin(), *writer.add({"codes": codes})])
        before = _digest_of(before.encode(), as_bytes(codes))


class SemanticCodes:
    """All codes of one or more prompts, in memory.

    Args:
        head: What they are.
        parts: As the head says, in its order.
    """

    def __init__(self, head: CodesHead, parts: Iterable[Part]) -> None:
        self.head, self.parts = head, tuple(parts)
        assert tuple(part.name for part in self.parts) == head.names, f"the head says {head.names}, got {self.parts}"

    @property
    def nbytes(self) -> int:
        """The length of `to_bytes()`."""
        return _bytes_of(self.head, self.parts)

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
        return f"SemanticCodes({len(head.prompts)} prompts of {head.tokens} tokens in all, {len(self.parts)} parts, {self.nbytes:,} bytes)"


class ArrivingCodes:
    """Semantic codes that are read while they arrive: iterate over the parts in their order. Parts that arrived are kept.

    Args:
        source: The bytes of one message and no more, in pieces of any size, or a function that returns between 1 and the given number
            of bytes, and none at the end. Such a function is asked for no byte beyond the message.
        ending: What an error says where bytes end too early.
    """

    def __init__(self, source: Iterable[Bytes] | Callable[[int], Bytes], ending: str = "Semantic codes end") -> None:
        self._read, self._whole, self._ending = reader_of(source), not callable(source), ending
        self.head = MessageReader(self._read, CodesHead, ending).head
        self._before, self._failure, self._finished = _digest_of(json_of(self.head)), "", False
        self._parts: list[Part] = []

    @property
    def nbytes(self) -> int:
        """Of what has arrived."""
        return _bytes_of(self.head, self._parts)

    def collect(self) -> SemanticCodes:
        """Wait for all parts."""
        return SemanticCodes(self.head, self)

    def __iter__(self) -> Iterator[Part]:
        for number, name in enumerate(self.head.names):
            if number == len(self._parts):
                self._parts.append(self._once(partial(self._receive, name)))
            yield self._parts[number]
        if not self._finished:
            self._once(self._end)

    def _once(self, step: Callable[[], Any]) -> Any:
        """Take a step, unless one has failed: bytes may be gone, and who asks again must not be given what follows them."""
        if self._failure:
            raise ArtifactError(self._failure)
        try:
            return step()
        except BaseException as error:
            self._failure = str(error) if isinstance(error, ArtifactError) else f"Reading semantic codes was broken off: {error!r}. {AGAIN}"
            raise

    def _receive(self, name: str) -> Part:
        number = f"{len(self._parts) + 1} of {len(self.head.names)}"
        message = MessageReader(self._read, PartHead, f"{self._ending} in part {name!r} ({number})")
        head = message.head
        if (head.name, head.after) != (name, self._before):
            raise ArtifactError(f"Part {head.name!r} came where part {name!r} ({number}) of these semantic codes was next. {AGAIN}")
        codes = next(message)["codes"]
        self._before = _digest_of(self._before.encode(), as_bytes(codes))
        return Part(name, codes)

    def _end(self) -> None:
        if self._whole and self._read(1):
            raise ArtifactError(f"Bytes follow semantic codes that end after {self.nbytes} bytes. Give the bytes of one message only.")
        self._finished = True

    def __repr__(self) -> str:
        return f"ArrivingCodes({len(self._parts)} of {len(self.head.names)} parts arrived)"


def _bytes_of(head: CodesHead, parts: Iterable[Part]) -> int:
    """The length of a message."""
    return message_bytes(head) + sum(message_bytes(PartHead(part.name, "0" * 2 * DIGEST, part.codes.numel())) for part in parts)
