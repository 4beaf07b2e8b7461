"""Semantic codes: what a producer sends instead of its keys and values, and consumers rebuild theirs from.

The tokens of a batch are concatenated without padding. Codes come in parts, each of one or more layers, behind a head that says what they
are; `codec/wire/messages.py` describes the bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from hf_kvcaches.codec.wire.messages import MessageReader, message_chunks
from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.kernels.rebuild import RowSpan
from hf_kvcaches.stores.files import Bytes, opened, write_atomically

VERSION = 2
_LONGEST_NAME = 1000  # names are repeated in errors
_MOST_TOKENS = 1 << 40
_HEX_DIGEST = re.compile(r"[0-9a-f]{32}")

TokenIds = Tensor | Sequence[int] | np.ndarray[Any, Any]


class Prompt(NamedTuple):
    """A coded prompt, identified by the digest of its token ids."""

    tokens: int  # without padding
    digest: str  # of their ids
    first: int = 0  # the first token with codes; those before it are in the cache already, or are run by the consumer

    @classmethod
    def of(cls, ids: TokenIds, first: int = 0) -> Self:
        """The prompt of some token ids, without padding."""
        return cls(len(ids), hashlib.blake2b(np.asarray(ids).astype("<u4").tobytes(), digest_size=16).hexdigest(), first)

    @property
    def coded(self) -> int:
        return self.tokens - self.first

    def begins(self, ids: TokenIds) -> bool:
        """Whether a text begins with this prompt."""
        return len(ids) >= self.tokens and Prompt.of(ids[: self.tokens]).digest == self.digest


class Part(NamedTuple):
    """The codes of some layers, (bytes,), uint8."""

    name: str
    codes: Tensor


@dataclass(frozen=True)
class CodesHead:
    """What a consumer is told before the codes."""

    kind: ClassVar[str] = "semantic codes"

    translator: str  # the translator's digest
    prompts: tuple[Prompt, ...]  # in the order of their tokens
    names: tuple[str, ...]  # of the parts, such as `layer.3` or `layers.1-3`; none where all is rebuilt from the token ids

    @cached_property
    def tokens(self) -> int:
        """Tokens with codes, of all prompts."""
        return sum(prompt.coded for prompt in self.prompts)

    def content(self) -> dict[str, Any]:
        prompts = [list(prompt if prompt.first else prompt[:2]) for prompt in self.prompts]
        return {"version": VERSION, "translator": self.translator, "prompts": prompts, "names": list(self.names)}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        if (version := content.pop("version", 1)) != VERSION:
            found = f"Semantic codes have format version {str(version)[:20]}, this reads version {VERSION}."
            raise ArtifactError(f"{found} Use one version of hf-kvcaches on both sides.")
        head = cls(**content | {"prompts": tuple(Prompt(*each) for each in content["prompts"]), "names": tuple(content["names"])})
        for tokens, digest, first in head.prompts:
            if not (type(tokens) is type(first) is int and 0 <= first <= tokens <= _MOST_TOKENS and _HEX_DIGEST.fullmatch(digest)):
                raise ValueError("a count out of its range, or a digest that is none")
        if not all(isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME for name in (head.translator, *head.names)):
            raise ValueError("a name of no or too many characters")
        if not head.prompts or len(set(head.names)) < len(head.names) or len(head.names) > MOST_LAYERS:
            raise ValueError("no prompts, or parts of equal names, or too many")
        return head


class SemanticCodes:
    """All codes of one or more prompts, in memory.

    Args:
        head: What they are.
        parts: As the head says, in its order.
    """

    def __init__(self, head: CodesHead, parts: Iterable[Part]) -> None:
        self.head, self.parts = head, tuple(parts)
        assert tuple(part.name for part in self.parts) == head.names, f"the head says {head.names}, got {self.parts}"

    @cached_property
    def nbytes(self) -> int:
        """The length of `to_bytes()`."""
        return sum(map(len, self.chunks()))

    def chunks(self) -> Iterator[bytes]:
        """The bytes to send: the head, then part by part."""
        return message_chunks(self.head, (part.codes for part in self.parts))

    def to_bytes(self) -> bytes:
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
                return ArrivingCodes(iter(partial(file.read, 1 << 20), b"")).collect()  # a file by itself gives lines
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
        self._message, self._parts = MessageReader(source, CodesHead, ending), list[Part]()
        self.head = self._message.head

    @property
    def nbytes(self) -> int:
        """The bytes that have arrived."""
        return self._message.nbytes

    def collect(self) -> SemanticCodes:
        """Wait for all parts."""
        return SemanticCodes(self.head, self)

    def __iter__(self) -> Iterator[Part]:
        for number, name in enumerate(self.head.names):
            if number == len(self._parts):
                self._parts.append(Part(name, next(self._message)))
            yield self._parts[number]
        assert next(self._message, None) is None  # looks for bytes behind the last part


class CodedPrompt(NamedTuple):
    """Which codes the rows of a batch are rebuilt from."""

    spans: list[RowSpan]  # slots that are rebuilt
    indices: Tensor  # of their tokens in the codes, (tokens,)
    copies: dict[int, int]  # for each other row, such as a beam, the rebuilt one that has the same tokens in the same slots
    slots: int  # that are filled in all rows afterwards, with padding
    run: int  # how many of each row's first tokens have no codes, and are run

    def of_spans(self, rows: Tensor, first: int = 0) -> Tensor:
        """Return what belongs to the rebuilt slots, (tokens, ...), of (batch, slots from `first` on, ...)."""
        return torch.cat([rows[span.row, span.first - first :][: span.tokens] for span in self.spans])


def match_prompts(head: CodesHead, texts: Sequence[Tensor], padding: Sequence[int], most: int, seen: int = 0, run: int = 0) -> CodedPrompt:
    """Find each row of a batch, of which `seen` slots are filled and `most` may be, among the coded prompts.

    Args:
        texts: All tokens of each row, also those in the cache.
        run: How many first tokens of a new prompt are run.
    """
    numbers: list[int] = []  # of each row's prompt
    for before, ids in zip(padding, texts, strict=True):
        held = seen - before if seen > before else run
        matches = [(prompt.tokens, -number) for number, prompt in enumerate(head.prompts) if prompt.first <= held and prompt.begins(ids)]
        if not matches:
            theirs, lengths = (", ".join(map(str, counts)) for counts in ([each.tokens for each in head.prompts], map(len, texts)))
            raise ConfigError(
                f"codes: they are of another prompt (rows of {theirs} tokens) than the one that came (rows of {lengths}). Encode this "
                f"prompt, with the same tokens and chat template, and first=cache.seen ({seen}) or less, or use another cache for it. "
                "Neither the prompt nor its first chunk may be shorter than what was coded."
            )
        length, number = max(matches)
        most = min(most, before + length)
        numbers.append(-number)
    if most <= max(seen, *padding):
        raise ConfigError(
            "codes: left padding makes one row start at or after the slot where another row's codes end. Encode the whole batch, or "
            "use one cache for each row."
        )
    offsets, spans, ranges = [0, *accumulate(prompt.coded for prompt in head.prompts)], list[RowSpan](), list[Tensor]()
    copies, rebuilt = dict[int, int](), dict[tuple[int, int], int]()
    for row, (before, number) in enumerate(zip(padding, numbers, strict=True)):
        if (twin := rebuilt.setdefault((before, number), row)) != row:
            copies[row] = twin
            continue
        coded = before + head.prompts[number].first  # the slot of the first token with codes
        start = max(seen, coded)
        spans.append(RowSpan(row, start, max(0, most - start)))
        ranges.append(torch.arange(spans[-1].tokens) + offsets[number] + start - coded)
    runs = (head.prompts[number].first for before, number in zip(padding, numbers, strict=True) if seen <= before)
    return CodedPrompt(spans, torch.cat(ranges), copies, most, max(runs, default=0))
