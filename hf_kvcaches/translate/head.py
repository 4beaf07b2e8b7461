"""What is known of semantic codes before their numbers come: between which models, of which prompts, and what parts follow."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.core.wire.messages import DIGEST, BodyTensor, head_of, json_of, message_bytes
from hf_kvcaches.errors import ConfigError

CODE_DTYPES = ("float32", "float16", "int8", "int4")
PART_KINDS = ("reuse", "patch", "cross_layer")
# Codes that are sent as they are: the name of their type in a body.
PLAIN = {"float32": "F32", "float16": "F16"}
# What a head says is also said in errors.
_LONGEST_TEXT = 1000
_MOST_TOKENS, _MOST_RANK = 1 << 40, 1 << 31
# Each code of a part has names and shapes to be worked out, however short the head is.
_MOST_CODES = 8
_CODE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_ROW_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Row:
    """A prompt that was coded, known by its tokens.

    Args:
        tokens: How many, padding not counted.
        digest: Of their ids, as `Row.of` makes it.
    """

    tokens: int
    digest: str

    def __post_init__(self) -> None:
        _check_count("tokens", self.tokens, 0, _MOST_TOKENS)
        if not isinstance(self.digest, str) or not _ROW_DIGEST.fullmatch(self.digest):
            raise ConfigError.of("digest", "32 hexadecimal digits in small letters", self.digest, "Take Row.of(ids).")

    @classmethod
    def of(cls, ids: Sequence[int] | np.ndarray[Any, Any] | Tensor) -> Self:
        """The row of these tokens.

        Args:
            ids: A row of token ids without padding.
        """
        try:
            row = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError.of("ids", "a row of token ids", str(error)) from error
        if row.ndim != 1 or (row.size and (row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= 1 << 32)):
            raise ConfigError.of("ids", "a row of token ids from 0 to 2**32 - 1", f"{row.dtype} {row.shape}", "Give one row, not a batch.")
        return cls(len(row), _digest(row))

    def begins(self, ids: np.ndarray[Any, Any]) -> bool:
        """Whether a text begins with this row.

        Args:
            ids: A row of token ids without padding.
        """
        return len(ids) >= self.tokens and _digest(ids[: self.tokens]) == self.digest


def _digest(ids: np.ndarray[Any, Any]) -> str:
    return hashlib.blake2b(ids.astype("<u4").tobytes(), digest_size=DIGEST).hexdigest()


@dataclass(frozen=True)
class PartHead:
    """What a part holds.

    Args:
        name: Such as `layer.3` or `all`.
        kind: `reuse`, `patch` or `cross_layer`.
        layers: The consumer's layers that are rebuilt from it, ascending.
        ranks: The width of each of its codes by name, such as `{"kv": 32}`.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    ranks: dict[str, int]

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        if self.kind not in PART_KINDS:
            raise ConfigError.of("kind", f"one of {', '.join(PART_KINDS)}", self.kind)
        if not isinstance(self.layers, tuple) or not self.layers:
            raise ConfigError.of("layers", "a tuple of at least one layer", self.layers)
        for layer in self.layers:
            _check_count("layers", layer, 0, MOST_LAYERS - 1)
        if any(one >= other for one, other in pairwise(self.layers)):
            raise ConfigError.of("layers", "different layers in ascending order", self.layers)
        if not isinstance(self.ranks, dict) or not 0 < len(self.ranks) <= _MOST_CODES:
            raise ConfigError.of("ranks", f"a dict from the names of 1 to {_MOST_CODES} codes to their widths", self.ranks)
        for name, rank in self.ranks.items():
            if not isinstance(name, str) or not _CODE_NAME.fullmatch(name):
                raise ConfigError.of("ranks", "names of letters, digits and underscores", name)
            _check_count(f"ranks[{name!r}]", rank, 1, _MOST_RANK)


@dataclass(frozen=True)
class CodesHead:
    """All that is known of codes before their numbers come.

    Args:
        producer: Digest of the fingerprint of the model that was run.
        consumer: Digest of the fingerprint of the model that they are for.
        dtype: `float32`, `float16`, `int8` or `int4`.
        rows: The prompts, in the order of their tokens in each code.
        parts: In the order in which they are sent. None: the consumer rebuilds all from the tokens.
        group: How many tokens of a channel share a scale; None: all. Codes of the first two types have no scales.
    """

    kind: ClassVar[str] = "semantic codes"
    finite: ClassVar[bool] = True

    translator: str
    producer: str
    consumer: str
    method: str
    dtype: str
    rows: tuple[Row, ...]
    parts: tuple[PartHead, ...]
    group: int | None = None

    def __post_init__(self) -> None:
        for name in ("translator", "producer", "consumer", "method"):
            _check_text(name, getattr(self, name))
        check_dtype(self.dtype)
        if self.group is not None:
            _check_count("group", self.group, 1, _MOST_TOKENS)
        if not isinstance(self.rows, tuple) or not self.rows or not all(isinstance(row, Row) for row in self.rows):
            raise ConfigError.of("rows", "a tuple of at least one Row", self.rows)
        if not isinstance(self.parts, tuple) or not all(isinstance(part, PartHead) for part in self.parts):
            raise ConfigError.of("parts", "a tuple of PartHeads", self.parts)
        if len(self.parts) > MOST_LAYERS:
            raise ConfigError.of("parts", f"at most {MOST_LAYERS} parts, one for each layer", len(self.parts))
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ConfigError.of("parts", "parts of different names", names)

    @cached_property
    def tokens(self) -> int:
        """Of all rows: the length of each code."""
        return sum(row.tokens for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Of the whole message."""
        return message_bytes(self)

    def tensors_of(self, part: PartHead) -> list[BodyTensor]:
        """What the body of a part holds, in its order."""
        tokens = self.tokens
        if self.dtype in PLAIN:
            return [BodyTensor(name, PLAIN[self.dtype], (tokens, rank)) for name, rank in part.ranks.items()]
        groups = -(-tokens // (self.group or max(tokens, 1)))
        data, length = ("I8", tokens) if self.dtype == "int8" else ("U8", -(-tokens // 2))
        found = []
        for name, rank in part.ranks.items():
            found += [BodyTensor(f"{name}.scale", "BF16", (rank, groups)), BodyTensor(f"{name}.zero", "F16", (rank, groups))]
        # The widest first: so each begins at a multiple of its elements' size.
        return found + [BodyTensor(f"{name}.data", data, (rank, length)) for name, rank in part.ranks.items()]

    def meta_of(self, rank: int) -> dict[str, Any]:
        """What a quantised code has beside its tensors, as `Quantized` takes and gives it."""
        bits = 8 if self.dtype == "int8" else 4
        return {"shape": [self.tokens, rank], "dtype": "float16", "bits": bits, "group": self.group, "axis": 0}

    def content(self) -> dict[str, Any]:
        """What is sent of it, for JSON."""
        parts = [[part.name, part.kind, part.layers, part.ranks] for part in self.parts]
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return content | {"rows": [[row.tokens, row.digest] for row in self.rows], "parts": parts}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """The inverse of `content`."""
        rows = tuple(Row(*row) for row in content["rows"])
        parts = tuple(PartHead(name, kind, tuple(layers), ranks) for name, kind, layers, ranks in content["parts"])
        return cls(**content | {"rows": rows, "parts": parts})

    def to_json(self) -> bytes:
        """As it is sent: for each head there are exactly these bytes."""
        return json_of(self)

    @classmethod
    def from_json(cls, text: bytes | bytearray) -> Self:
        """The inverse of `to_json`; an `ArtifactError` for any other bytes."""
        return head_of(cls, text)


def _check_text(argument: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_TEXT:
        raise ConfigError.of(argument, f"a string of 1 to {_LONGEST_TEXT} characters", value)


def _check_count(argument: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError.of(argument, f"a whole number from {least} to {most}", value)


def check_dtype(value: object) -> None:
    if value not in CODE_DTYPES:
        raise ConfigError.of("dtype", f"one of {', '.join(CODE_DTYPES)}", value)
