"""A prompt with what is stored of it, what is known of it without reading that, and what a store of them reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.stores.blobs_format import array_of_text

Embedding = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Entry:
    """A prompt and what is stored of it.

    Args:
        embedding: `(dim,)`, of length 1.
        tensors: By name, other than `ids`. Those of a stored entry must not be written to.
        provenance: How it came about, as JSON can hold it.
    """

    text: str
    ids: Sequence[int]
    embedding: Embedding
    tensors: Mapping[str, Tensor]
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What a library keeps of an entry outside of its tensors.

    Args:
        stored: What `codec` needs to read its keys and values, or None where it has none.
    """

    ids: Ids
    stored: Mapping[str, Any] | None

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> Self | None:
        """Those in an entry's provenance, or None where no library has put them there."""
        try:
            return cls(array_of_text(provenance["ids"], "<u4"), provenance["stored"])
        except (LookupError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class EntryHead:
    """What is known of a stored entry without reading its tensors.

    Args:
        created: When, in seconds since 1970.
        sizes: The bytes of each of its tensors.
        bytes: What all of it takes in the store.
        facts: What a library put into its provenance, or None.
    """

    text: str
    length: int
    provenance: dict[str, Any]
    created: float
    sizes: dict[str, int]
    bytes: int
    facts: Facts | None


@dataclass(frozen=True)
class EntryReport:
    """What a store holds, and what this process did with it.

    Args:
        location: Without passwords.
        entries: Of this scope.
        foreign: Of other scopes.
        bytes: That all of them take.
        max_bytes: The cap, or None.
        pinned: Entries of this scope that are never evicted.
        hits: How often `used` was called.
        saved_tokens: That `used` was told of.
        loads: How often tensors were read.
        written: Entries that this process stored.
        evicted: That it evicted.
        damaged: That it found damaged, and deleted.
        failures: How often the back-end failed it.
    """

    location: str
    entries: int
    foreign: int
    bytes: int
    max_bytes: int | None
    pinned: int
    hits: int
    saved_tokens: int
    loads: int
    written: int
    evicted: int
    damaged: int
    failures: int
