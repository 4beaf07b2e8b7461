"""What is known of a stored segment besides its keys and values, and how a text's tokens become names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hf_kvcaches.core.splicing.plan import COMPUTED
from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.segments.signatures import Signature
from hf_kvcaches.stores.blobs_format import array_as_text, array_of_text

# How many tokens to the left of a segment are stored with it: the longest window that depth guards can ask for, short of all.
CONTEXT = 512

_KINDS = {"scope": str, "left": str, "right": str, "start": int, "origin": str, "fresh": bool, "stored": dict}


class Chain:
    """The name of all tokens of a row up to a place. Equal names mean equal tokens, however the row was cut into segments."""

    def __init__(self) -> None:
        self._hasher = hashlib.blake2b(digest_size=16)

    def extend(self, ids: Ids) -> Chain:
        """The name after more tokens; this one stays as it is."""
        longer = Chain.__new__(Chain)
        longer._hasher = self._hasher.copy()
        longer._hasher.update(np.ascontiguousarray(ids, dtype="<u4").data)
        return longer

    @property
    def name(self) -> str:
        """In hex."""
        return self._hasher.hexdigest()


@dataclass(frozen=True, eq=False)
class Record:
    """One stored segment.

    Args:
        scope: Which model, adapters, tokenizer and format its tensors are for; only caches of the same scope see it.
        ids: Its tokens, (tokens,).
        left: The `Chain` name of all that stood left of it.
        context: Up to `CONTEXT` tokens that stood left of it, (n,).
        origin: The tier that it came about by: "exact" when nothing to the left of it, nor itself, was an approximation.
        fresh: Whether all of it was computed where it stood. Only such segments are spliced into other contexts, so that drift does
            not add up.
        stored: What `packing` needs to read the tensors.
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
        """The segment's id: the same for the same tokens behind the same tokens, for the same model."""
        hasher = hashlib.blake2b(digest_size=16)
        for part in (self.scope, self.left, self.right, self.origin):
            hasher.update(part.encode() + b"|")
        return hasher.hexdigest()

    def __len__(self) -> int:
        return len(self.ids)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        arrays = {"ids": self.ids, "context": self.context, "signature": self.signature}
        plain = {name: getattr(self, name) for name in _KINDS}
        return plain | {name: None if value is None else array_as_text(value, "<u4") for name, value in arrays.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Undoes `to_dict`; a `LookupError`, `TypeError` or `ValueError` where something is missing or of the wrong kind."""
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
