"""Stored prompts with their states, looked up by tokens or by similarity, shared by threads and processes."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError, require
from hf_kvcaches.reuse.report import CatalogReport
from hf_kvcaches.reuse.tokens import Ids, array_as_text, array_of_text, as_ids, common_prefix
from hf_kvcaches.stores.blobs import BlobStore, Stored
from hf_kvcaches.stores.blobs_format import not_finite
from hf_kvcaches.stores.catalog import Catalog
from hf_kvcaches.stores.location import TIMEOUT
from hf_kvcaches.stores.vectors import VectorIndex

Embedding = npt.NDArray[np.float32]

_KIND = "warm-start entry, version 2"
# The fields of a blob's head and their types. Others may be added without a new version.
_FIELDS = {"kind": str, "scope": str, "text": str, "ids": str, "length": int, "created": float, "sizes": dict, "embedding": str}
_FIELDS |= {"provenance": dict, "stored": dict}


@dataclass(frozen=True, eq=False)
class Entry:
    """A prompt and its stored states.

    Args:
        embedding: `(dim,)`, of length 1.
        tensors: Tensors by name. Those of a stored entry are read-only.
        provenance: Where it is from, as JSON values.
        stored: What `layout` needs to read its keys and values; empty if it has none.
    """

    text: str
    ids: Sequence[int]
    embedding: Embedding
    tensors: Mapping[str, Tensor]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class EntryHead:
    """A stored entry without its tensors, with the bytes of each tensor and of the whole blob."""

    text: str
    ids: Ids
    provenance: dict[str, Any]
    stored: dict[str, Any]
    created: float  # seconds since 1970
    sizes: dict[str, int]
    bytes: int


@dataclass(frozen=True)
class EntryReport(CatalogReport):
    """What an entry store holds, and what this process did with it.

    Args:
        entries: The entries of this scope.
        foreign: The entries of other scopes.
        hits: How often an entry was reused.
        saved_tokens: Tokens that were not computed.
    """

    entries: int
    foreign: int
    hits: int
    saved_tokens: int


class EntryContents:
    """Entries of one scope by their tokens and their embeddings, as the `Contents` of a catalog."""

    def __init__(self, scope: str, index: str = "Flat", dim: int | None = None) -> None:
        self.scope, self.index = scope, index
        self.heads: dict[str, EntryHead] = {}
        self.vectors: VectorIndex | None = None if dim is None else VectorIndex(dim, index)
        # Tokens and id of each entry, sorted.
        self._order: list[tuple[bytes, str]] = []

    def add(self, blobs: Sequence[Stored]) -> dict[str, int]:
        tokens: dict[str, int] = {}
        vectors: dict[str, Embedding] = {}
        for key, data, size in blobs:
            if any(type(data.get(name)) is not kind for name, kind in _FIELDS.items()) or data["kind"] != _KIND:
                continue
            if data["scope"] == self.scope:
                try:
                    ids, vector = array_of_text(data["ids"], "<u4"), self.checked(array_of_text(data["embedding"], "<f4"))
                except ValueError:
                    continue
                if self.vectors is None:
                    self.vectors = VectorIndex(len(vector), self.index)
                vectors[key] = vector
                fields = {name: data[name] for name in ("text", "provenance", "stored", "created", "sizes")}
                self.heads[key] = EntryHead(**fields, ids=ids, bytes=size)
                insort(self._order, (_sortable(ids), key))
            tokens[key] = data["length"]
        # All at once: one by one takes longer.
        if vectors and self.vectors is not None:
            self.vectors.add(list(vectors), np.stack(list(vectors.values())))
        return tokens

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            head = self.heads.pop(key, None)
            if head is not None:
                del self._order[bisect_left(self._order, (_sortable(head.ids), key))]
        if self.vectors is not None:
            self.vectors.remove(keys)

    def expired(self) -> Sequence[str]:
        return ()

    def beginning(self, ids: Ids) -> tuple[str | None, int]:
        """Return the entry that shares the longest prefix with a prompt, and how many tokens that is."""
        index = bisect_left(self._order, (_sortable(ids), ""))
        best, longest = None, 0
        # The entry is one of the two neighbours in the order.
        for _, key in self._order[max(0, index - 1) : index + 1]:
            shared = common_prefix(self.heads[key].ids, ids)
            if shared > longest:
                best, longest = key, shared
        return best, longest

    def checked(self, embedding: Embedding) -> Embedding:
        """Return an embedding as float32 if it has length 1 and the dimension of the others."""
        vector = np.asarray(embedding, np.float32)
        dim = vector.shape[0] if self.vectors is None and vector.ndim == 1 else getattr(self.vectors, "dim", 0)
        if vector.shape != (dim,) or not dim or not abs(float(np.linalg.norm(vector)) - 1) <= 1e-3:
            got = f"{vector.shape} of length {np.linalg.norm(vector):.4g}"
            raise ConfigError.of("entry.embedding", f"a vector of {dim or 'some'} elements and of length 1", got, "Take an Encoder's.")
        return vector


class EntryStore:
    """Entries of one scope, in memory, in a folder or in Redis.

    Any thread may call any method, and processes may share a location. Changes of other processes are applied by `refresh`, and with every
    change of this one. A failed or damaged read is a miss and warns once. The scope names the model, the tokenizer, the encoder and the
    format; entries of other scopes in the same location count for the cap, and otherwise are left alone.
    """

    def __init__(
        self,
        location: str | BlobStore,
        scope: str,
        max_bytes: int | str | None = None,
        timeout: float = TIMEOUT,
        *,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        index: str = "Flat",
        dim: int | None = None,
    ) -> None:
        if not isinstance(scope, str) or not scope:
            raise ConfigError.of("scope", "a string that names the model and all else that entries depend on", scope)
        require("faiss", "retrieval", "A store of prompts")  # the index is made with the first entry
        self.scope, self.contents = scope, EntryContents(scope, index, dim)
        limits: dict[str, Any] = {"max_bytes": max_bytes, "hot_bytes": hot_bytes, "time_to_live": time_to_live}
        self.catalog = Catalog(location, self.contents, "entry", timeout=timeout, **limits)
        self._hits = self._saved_tokens = 0
        self.refresh()

    def put(self, entry: Entry) -> str | None:
        """Store an entry, unless one has the same tokens, and return its id; None if it is too large, was evicted, or the store failed."""
        ids, embedding = _checked_ids(entry.ids), self.contents.checked(entry.embedding)
        key = self._key(ids)
        dense = {name: tensor for name, tensor in entry.tensors.items() if isinstance(tensor, Tensor)}
        if (name := not_finite({name: tensor.cpu() for name, tensor in dense.items()})) is not None:
            raise ConfigError.of(f"entry.tensors[{name!r}]", "finite numbers", "infinities or NaN", "Look for them in the model.")
        sizes = {name: tensor.nbytes for name, tensor in dense.items()}
        cap = self.catalog.max_bytes
        if cap is not None and sum(sizes.values()) + ids.nbytes > cap:
            sentence = f"A prompt of {len(ids)} tokens takes more than all of the {cap} bytes allowed; it is not stored."
            self.catalog.warn_once("large", sentence)
            return None
        # Ids and embedding are in the head so that look-ups read no tensors.
        head = {"kind": _KIND, "scope": self.scope, "text": entry.text, "ids": array_as_text(ids, "<u4"), "length": len(ids)}
        head |= {"provenance": dict(entry.provenance), "stored": dict(entry.stored), "sizes": sizes}
        head |= {"embedding": array_as_text(embedding, "<f4")}
        if key not in self and not self.catalog.put(key, head, entry.tensors):
            return None
        # Each process refreshes after its last write and sees all entries, so processes keep the cap together.
        self.refresh()
        return key if key in self else None

    def get(self, key: str, check: Callable[[Mapping[str, Tensor]], object] = lambda tensors: None, kind: str = "") -> Entry | None:
        """Return an entry; None if it is missing or damaged, or if `check` raises an `ArtifactError`.

        Args:
            kind: The name of the check, which is called once for each entry and kind.
        """
        head = self.head(key)
        if head is None:
            return None

        def check_all(tensors: Mapping[str, Tensor]) -> None:
            if (name := not_finite(tensors)) is not None:
                raise ArtifactError(f"its tensor {name!r} has infinities or NaN")
            check(tensors)

        tensors = self.catalog.read(key, check_all, kind=kind)
        embedding = None if self.contents.vectors is None else self.contents.vectors.get(key)
        if tensors is None or embedding is None:
            return None
        return Entry(head.text, head.ids.tolist(), embedding, tensors, head.provenance, head.stored)

    def head(self, key: str) -> EntryHead | None:
        """Return an entry without its tensors, or None."""
        with self.catalog.lock:
            return self.contents.heads.get(key)

    def exact(self, ids: Sequence[int]) -> str | None:
        """Return the id of the entry with exactly these tokens, or None."""
        key = self._key(_checked_ids(ids))
        return key if key in self else None

    def beginning(self, ids: Ids) -> tuple[str | None, int]:
        """Return the id of the entry that shares the longest prefix with a prompt, and how many tokens that is."""
        with self.catalog.lock:
            return self.contents.beginning(ids)

    def near(self, embedding: npt.ArrayLike, k: int = 1) -> list[tuple[str, float]]:
        """Return the ids of the entries most similar to an embedding with their cosines, the most similar first."""
        vectors = self.contents.vectors
        return [] if vectors is None else vectors.search(embedding, k)[0]

    def ids(self) -> list[str]:
        """Return the ids of all entries."""
        with self.catalog.lock:
            return list(self.contents.heads)

    def used(self, key: str, tokens: int | None = None) -> None:
        """Count the tokens that an entry saved; None for all its tokens."""
        head = self.head(key)
        if head is not None:
            saved = len(head.ids) if tokens is None else tokens
            with self.catalog.lock:
                self.catalog.used(key, saved)
                self._hits += 1
                self._saved_tokens += saved

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keep an entry from eviction, by any process."""
        self.catalog.pin(key, pinned)

    def delete(self, key: str) -> bool:
        """Delete an entry of this scope, and return whether it was there."""
        return key in self and self.catalog.delete(key)

    def refresh(self) -> None:
        """Begin a request: apply changes of other processes, and evict entries above the cap."""
        self.catalog.refresh()
        if len(self.catalog.entries) > len(self):
            sentence = f"{self.catalog.blobs.place} also holds entries of another model, tokenizer or encoder; they are of no use here."
            self.catalog.warn_once("foreign", sentence)

    def report(self) -> EntryReport:
        """Report what the store holds now."""
        self.refresh()
        keys = self.ids()
        foreign = len(self.catalog.entries) - len(keys)
        counts = self.catalog.summary(keys)
        return EntryReport(entries=len(keys), foreign=foreign, hits=self._hits, saved_tokens=self._saved_tokens, **counts)

    def close(self) -> None:
        """Close connections. Entries stay, unless they are in memory."""
        self.catalog.blobs.close()

    def __len__(self) -> int:
        return len(self.contents.heads)

    def __contains__(self, key: object) -> bool:
        return key in self.contents.heads

    def __deepcopy__(self, memo: dict[int, Any]) -> EntryStore:
        return self  # a copied cache shares the store

    def _key(self, ids: Ids) -> str:
        return hashlib.blake2b(f"{_KIND}|{self.scope}|".encode() + ids.astype("<u4").tobytes(), digest_size=16).hexdigest()


def _sortable(ids: Ids) -> bytes:
    # With the highest byte first, bytes have the order of the numbers.
    return ids.astype(">u4").tobytes()


def _checked_ids(ids: Sequence[int]) -> Ids:
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= 1 << 31:
        raise ConfigError.of("ids", "a row of token ids, at least one", f"{tokens.dtype} {tokens.shape}")
    return as_ids(tokens)
