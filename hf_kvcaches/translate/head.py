"""What is known of semantic codes before they come: by which translator, of which prompts, and what parts follow."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.core.wire.messages import DIGEST, BodyTensor, message_bytes
from hf_kvcaches.errors import ConfigError, whole_number

# What a head says is also said in errors.
_LONGEST_TEXT = 1000
_MOST_TOKENS, _MOST_BYTES = 1 << 40, 1 << 31
_ROW_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Row:
    """A prompt that was coded, known by its tokens.

    Args:
        tokens: How many, padding not counted.
        digest: Of their ids, as `Row.of` makes it.
        first: The first token with codes; those before it are expected in the cache.
    """

    tokens: int
    digest: str
    first: int = 0

    def __post_init__(self) -> None:
        whole_number("tokens", self.tokens, 0, most=_MOST_TOKENS)
        whole_number("first", self.first, 0, f"a token of the {self.tokens}", most=self.tokens)
        if not isinstance(self.digest, str) or not _ROW_DIGEST.fullmatch(self.digest):
            raise ConfigError.of("digest", "32 hexadecimal digits in small letters", self.digest, "Take Row.of(ids).")

    @classmethod
    def of(cls, ids: Sequence[int] | np.ndarray[Any, Any] | Tensor, first: int = 0) -> Self:
        """The row of these tokens.

        Args:
            ids: A row of token ids without padding.
            first: The first token with codes.
        """
        try:
            row = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError.of("ids", "a row of token ids", str(error)) from error
        if row.ndim != 1 or (row.size and (row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= 1 << 32)):
            raise ConfigError.of("ids", "a row of token ids from 0 to 2**32 - 1", f"{row.dtype} {row.shape}", "Give one row, not a batch.")
        return cls(len(row), _digest(row), first)

    @property
    def coded(self) -> int:
        """How many tokens have codes."""
        return self.tokens - self.first

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
    """What a part holds: the packed codes of all tokens.

    Args:
        name: Such as `layer.3` or `all`.
        rows: Bytes of a token.
    """

    name: str
    rows: int

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        whole_number("rows", self.rows, 1, most=_MOST_BYTES)


@dataclass(frozen=True)
class CodesHead:
    """All that is known of codes before they come.

    Args:
        translator: Digest of the translator: of its maps, and of the models that it is for.
        rows: The prompts, in the order of their tokens in each code.
        parts: In the order in which they are sent. None: the consumer rebuilds all from the tokens.
    """

    kind: ClassVar[str] = "semantic codes"
    finite: ClassVar[bool] = True

    translator: str
    rows: tuple[Row, ...]
    parts: tuple[PartHead, ...]

    def __post_init__(self) -> None:
        _check_text("translator", self.translator)
        for name, kind in (("rows", Row), ("parts", PartHead)):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
                raise ConfigError.of(name, f"a tuple of {kind.__name__}s", values)
        if not self.rows:
            raise ConfigError.of("rows", "at least one row", self.rows)
        names = {part.name for part in self.parts}
        if len(names) < len(self.parts) or len(names) > MOST_LAYERS:
            raise ConfigError.of("parts", f"at most {MOST_LAYERS} parts of different names", [part.name for part in self.parts])

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
        """What is sent of it, for JSON."""
        rows = [[row.tokens, row.digest, *([row.first] if row.first else [])] for row in self.rows]
        return {"translator": self.translator, "rows": rows, "parts": [[part.name, part.rows] for part in self.parts]}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """The inverse of `content`."""
        rows, parts = tuple(Row(*row) for row in content["rows"]), tuple(PartHead(*part) for part in content["parts"])
        return cls(**content | {"rows": rows, "parts": parts})


def _check_text(argument: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_TEXT:
        raise ConfigError.of(argument, f"a string of 1 to {_LONGEST_TEXT} characters", value)
