"""The record of a stored segment, which has everything but its tensors; and chains, the names of token sequences."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hf_kvcaches.reuse.plan import COMPUTED
from hf_kvcaches.reuse.tokens import Ids, array_as_text, array_of_text
from hf_kvcaches.segments.signatures import Signature

# How many tokens before a segment are stored with it: the most equal tokens that a guard can require, short of all.
CONTEXT = 512

_KINDS = {"scope": str, "left": str, "right": str, "start": int, "origin": str, "fresh": bool, "stored": dict}


class Chain:
    """The name of all tokens of a row up to an index. Equal names mean equal tokens, however the row was cut into segments."""

    def __init__(self) -> None:
        self._hasher = hashlib.blake2b(digest_size=16)

    def extend(self, ids: Ids) -> Chain:
        """Return the chain with more tokens; this one does not change."""
        longer = Chain.__new__(Chain)
        longer._hasher = self._hasher.copy()
        longer._hasher.update(np.ascontiguousarray(ids, dtype="<u4").data)
        return longer

    @property
    def name(self) -> str:
        """The digest in hex."""
        return self._hasher.hexdigest()


@dataclass(frozen=True, eq=False)
class Record:
    """One stored segment.

    Args:
        scope: The model, adapters, tokenizer and format of its tensors; only caches of the same scope reuse it.
        ids: Its token ids, (tokens,).
        left: The `Chain` name of all tokens before it.
        right: The `Chain` name of these and its own tokens.
        start: The index of its first token in the row where it was computed.
        context: Up to `CONTEXT` tokens before it, (n,).
        origin: Its tier: "exact" if neither it nor anything before it was an approximation.
        fresh: Whether all of it was computed at its index. Only such segments are reused behind other texts, so drift does not add up.
        stored: What `layout` needs to read the tensors.
        signature: MinHash of its canonical text, or None.
    """

    scope: str
    ids: Ids
    left: str
    right: str
    start: int
    context: Ids
    origin: str
    fresh: bool
    stored: dict[str, Any] = field(default_factory=dict)
    signature: Signature | None = None

    @property
    def key(self) -> str:
        """The segment's id: equal for equal tokens behind equal tokens, in one scope and tier."""
        hasher = hashlib.blake2b(digest_size=16)
        for part in (self.scope, self.left, self.right, self.origin):
            hasher.update(part.encode() + b"|")
        return hasher.hexdigest()

    def __len__(self) -> int:
        return len(self.ids)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        arrays = {"ids": self.ids, "context": self.context, "signature": self.signature}
        plain = {name: getattr(self, name) for name in _KINDS}
        return plain | {name: None if value is None else array_as_text(value, "<u4") for name, value in arrays.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Restore what `to_dict` returned; raise a `LookupError`, `TypeError` or `ValueError` if a field is missing or wrong."""
        arrays = {name: None if data[name] is None else array_of_text(data[name], "<u4") for name in ("ids", "context", "signature")}
        plain = {name: data[name] for name in _KINDS}
        for name, kind in _KINDS.items():
            if type(plain[name]) is not kind:
                raise TypeError(f"{name}: expected {kind.__name__}, got {type(plain[name]).__name__}")
        if not plain["origin"] or plain["origin"] == COMPUTED or plain["start"] < 0:
            raise ValueError(f"no segment has the origin {plain['origin']!r} and the start {plain['start']!r}")
        if arrays["ids"] is None or not len(arrays["ids"]) or arrays["context"] is None:
            raise ValueError("a segment without tokens, or without those to the left of it")
        return cls(**plain, **arrays)  # type: ignore[arg-type]
