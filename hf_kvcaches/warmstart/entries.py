"""Prompts with what is stored of them, found by their tokens or by likeness, shared by threads and processes."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_kvcaches.errors import ConfigError, require, whole_number
from hf_kvcaches.stores.blobs import TIMEOUT, BlobStore, Stored, StoreUnavailable, open_blobs
from hf_kvcaches.stores.reading import not_finite
from hf_kvcaches.stores.vectors import VectorIndex
from hf_kvcaches.stores.worth import Worth, evict
from hf_kvcaches.warmstart.entry import Embedding, Entry, EntryHead, EntryReport

_KIND = "warm-start entry, version 1"
_IDS = "ids"
# The fields of a blob's head and their types. Others may be added without a new version.
_FIELDS = {"kind": str, "scope": str, "text": str, "length": int, "created": float, "provenance": dict, "sizes": dict, "embedding": str}


class EntryStore:
    """Entries of one scope, in memory, in a folder or in Redis.

    Any thread may call any method, and processes may share a place. What others did is known after `refresh`, or after this one's own
    changes. Where the place fails, or what it holds is damaged, that is a miss, and is said once as a `RuntimeWarning`.

    Args:
        location: `memory`, `disk:FOLDER` or `redis://host:port/db` (see `open_blobs`).
        scope: All that has to be the same for an entry to be of use: the model, the tokenizer, the encoder, the format. Entries of
            other scopes may lie in the same place; they count for the cap, and otherwise are left alone.
        max_bytes: What all entries may take, but for pinned ones. Beyond, those go that saved the fewest tokens a byte, and not lately.
        timeout: Seconds that all look-ups of a request may wait for Redis together; see `open_blobs`.
    """

    def __init__(self, location: str, scope: str, max_bytes: int | None = None, timeout: float = TIMEOUT) -> None:
        if not isinstance(scope, str) or not scope:
            raise ConfigError.of("scope", "a string that names the model and all else that entries depend on", scope)
        if max_bytes is not None:
            max_bytes = whole_number("max_bytes", max_bytes, 1, "a number of bytes, at least 1, or None")
        # Entries are put into an index as soon as there are any.
        require("faiss", "retrieval", "A store of prompts")
        self.scope, self.max_bytes = scope, max_bytes
        self._blobs: BlobStore = open_blobs(location, timeout)
        # Under the first one nobody waits for a server; under the second, changes are asked for and taken over in their order.
        self._lock, self._following = threading.RLock(), threading.RLock()
        self._heads: dict[str, EntryHead] = {}
        self._news: tuple[list[str], list[str]] = [], []
        self._index: VectorIndex | None = None
        self._worth = Worth()
        self._said: set[str] = set()
        self._counts = dict.fromkeys(("hits", "saved_tokens", "loads", "written", "evicted", "failures"), 0)
        self.refresh()

    def put(self, entry: Entry) -> str | None:
        """Stores an entry and returns its id; one of the same tokens that is there already is kept. None where it didn't stay.

        Args:
            entry: Its tensors are copied.
        """
        ids = _as_ids(entry.ids)
        embedding = self._checked(entry.embedding)
        if _IDS in entry.tensors:
            raise ConfigError.of("entry.tensors", f"names other than {_IDS!r}, which is taken", sorted(entry.tensors))
        key = self._key(ids)
        dense = {name: tensor for name, tensor in entry.tensors.items() if isinstance(tensor, Tensor)}
        if (name := not_finite({name: tensor.cpu() for name, tensor in dense.items()})) is not None:
            raise ConfigError.of(f"entry.tensors[{name!r}]", "finite numbers", "infinities or NaN", "Look for them in the model.")
        sizes = {name: tensor.nbytes for name, tensor in dense.items()}
        if self.max_bytes is not None and sum(sizes.values()) + ids.nbytes > self.max_bytes:
            self._say(
                "large", f"A prompt of {len(ids)} tokens takes more than all of the {self.max_bytes} bytes allowed; it is not stored."
            )
            return None
        head = {
            "kind": _KIND,
            "scope": self.scope,
            "text": entry.text,
            "length": len(ids),
            # Whole seconds: with more digits, prompts of one size would take a few bytes more or less, and be worth more or less.
            "created": float(int(time.time())),
            "provenance": dict(entry.provenance),
            "sizes": sizes,
            # In the head, so that who opens the store need not read the tensors of all entries.
            "embedding": base64.b64encode(embedding.astype("<f4").tobytes()).decode(),
        }
        self._blobs.begin()
        try:
            if key not in self:
                size = self._blobs.put(key, head, {_IDS: torch.from_numpy(ids), **entry.tensors})
                self._count("written", size > 0)
        except StoreUnavailable as error:
            self._failed(error)
            return None
        # Who looks last sees what all have written, so processes stay within the cap together.
        self.refresh()
        return key if key in self else None

    def get(self, key: str) -> Entry | None:
        """An entry, or None where there is none of that id and scope, or none any more, or a damaged one.

        Args:
            key: Its id.
        """
        head = self.head(key)
        if head is None:
            return None
        try:
            found = self._blobs.tensors(key)
        except StoreUnavailable as error:
            self._failed(error)
            return None
        self._count("loads")
        embedding = None if self._index is None else self._index.get(key)
        if found is not None and (fault := _fault(found, head.length)):
            self._blobs.discard(key, fault)
            found = None
        if found is None or embedding is None:
            self._follow()
            return None
        ids = found.pop(_IDS)
        return Entry(head.text, ids.tolist(), embedding, found, head.provenance)

    def all(self) -> Iterator[Entry]:
        """All entries, each read as a request of its own."""
        for key in self.ids():
            self._blobs.begin()
            if (entry := self.get(key)) is not None:
                yield entry

    def head(self, key: str) -> EntryHead | None:
        """What is known of an entry without reading it, or None.

        Args:
            key: Its id.
        """
        with self._lock:
            return self._heads.get(key)

    def exact(self, ids: Sequence[int]) -> str | None:
        """The id of the entry with exactly these tokens, or None.

        Args:
            ids: Tokens.
        """
        key = self._key(_as_ids(ids))
        return key if key in self else None

    def near(self, embedding: npt.ArrayLike, k: int = 1) -> list[tuple[str, float]]:
        """The ids of the most similar entries with their cosines, the most similar first.

        Args:
            embedding: `(dim,)`, of length 1.
            k: How many.
        """
        index = self._index
        return [] if index is None else index.search(embedding, k)[0]

    def ids(self) -> list[str]:
        """Of all entries."""
        with self._lock:
            return list(self._heads)

    def news(self) -> tuple[list[str], list[str]]:
        """The ids of entries that came and of those that went since the last call; one that went and came again is in both."""
        with self._lock:
            news, self._news = self._news, ([], [])
        return news

    def used(self, key: str, tokens: int | None = None) -> None:
        """Counts the work that an entry saved.

        Args:
            key: Its id.
            tokens: That were not computed; None: as many as it has.
        """
        with self._lock:
            head = self._heads.get(key)
            if head is not None:
                saved = head.length if tokens is None else tokens
                self._worth.used(key, saved)
                self._counts["hits"] += 1
                self._counts["saved_tokens"] += saved

    def pin(self, key: str) -> None:
        """Keeps an entry from eviction, by any process.

        Args:
            key: Its id.
        """
        self._blobs.begin()
        self._blobs.pin(key)

    def unpin(self, key: str) -> None:
        """Lets an entry go again.

        Args:
            key: Its id.
        """
        self._blobs.begin()
        self._blobs.pin(key, False)

    def delete(self, key: str) -> bool:
        """Deletes an entry of this scope, and returns whether it was there.

        Args:
            key: Its id.
        """
        self._blobs.begin()
        gone = key in self and self._blobs.delete(key)
        self._follow()
        return gone

    def refresh(self) -> None:
        """Begins a request: learns what other processes did, and evicts what is too much."""
        self._blobs.begin()
        self._follow()
        evict(self._leaving, self._evict, self._follow)

    def report(self) -> EntryReport:
        """What the store holds now."""
        self.refresh()
        pinned = self._pinned()
        with self._lock:
            return EntryReport(
                location=self._blobs.place,
                entries=len(self._heads),
                foreign=len(self._worth.sizes) - len(self._heads),
                bytes=self._worth.total,
                max_bytes=self.max_bytes,
                pinned=len(pinned & self._heads.keys()),
                damaged=self._blobs.damaged,
                **self._counts,
            )

    def close(self) -> None:
        """Lets go of connections. What is stored stays, unless it is in memory."""
        self._blobs.close()

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, key: object) -> bool:
        return key in self._heads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> EntryStore:
        # A copied cache goes on with the same store.
        return self

    def __repr__(self) -> str:
        return f"EntryStore({self._blobs.place!r}, {len(self)} entries)"

    def _key(self, ids: npt.NDArray[np.int32]) -> str:
        hasher = hashlib.blake2b(_KIND.encode() + b"|" + self.scope.encode() + b"|", digest_size=16)
        hasher.update(ids.astype("<i4").tobytes())
        return hasher.hexdigest()

    def _checked(self, embedding: Embedding) -> Embedding:
        vector = np.asarray(embedding, np.float32)
        dim = vector.shape[0] if self._index is None and vector.ndim == 1 else getattr(self._index, "dim", 0)
        if vector.shape != (dim,) or not dim or not abs(float(np.linalg.norm(vector)) - 1) <= 1e-3:
            got = f"{vector.shape} of length {np.linalg.norm(vector):.4g}"
            raise ConfigError.of("entry.embedding", f"a vector of {dim or 'some'} elements and of length 1", got, "Take an Encoder's.")
        return vector

    def _follow(self) -> None:
        """Learns what came and went, by this process too: what the back-end tells is all that is known."""
        try:
            with self._following:
                changes = self._blobs.changes()
                with self._lock:
                    for key in changes.removed:
                        self._worth.remove(key)
                        if self._heads.pop(key, None) is not None:
                            self._news[1].append(key)
                    if self._index is not None:
                        self._index.remove(changes.removed)
                    self._learn(changes.added)
        except StoreUnavailable as error:
            self._failed(error)
        if self._blobs.damaged:
            self._say("damaged", f"A damaged entry is made anew. {self._blobs.complaints[0]}")
        for sentence in list(self._blobs.unreadable.values())[:1]:
            self._say("unusable", sentence)

    def _learn(self, added: Sequence[Stored]) -> None:
        vectors: dict[str, Embedding] = {}
        for key, data, size in added:
            if any(type(data.get(name)) is not kind for name, kind in _FIELDS.items()) or data["kind"] != _KIND:
                self._say(
                    "unreadable", f"{self._blobs.place} holds something that is no entry, or one of another version; it is left alone."
                )
                continue
            self._worth.add(key, size, data["length"])
            if data["scope"] != self.scope:
                self._say(
                    "foreign", f"{self._blobs.place} also holds entries of another model, tokenizer or encoder; they are of no use here."
                )
                continue
            try:
                vector = self._checked(np.frombuffer(base64.b64decode(data["embedding"], validate=True), "<f4"))
            except ValueError:
                self._say("unreadable", f"{self._blobs.place} holds an entry with an embedding of another kind; it is left alone.")
                continue
            if self._index is None:
                self._index = VectorIndex(len(vector))
            vectors[key] = vector
            self._news[0].append(key)
            self._heads[key] = EntryHead(data["text"], data["length"], data["provenance"], data["created"], data["sizes"], size)
        # At once: many one by one would take longer.
        if vectors and self._index is not None:
            self._index.add(list(vectors), np.stack(list(vectors.values())))

    def _pinned(self) -> frozenset[str]:
        try:
            return self._blobs.pinned()
        except StoreUnavailable as error:
            self._failed(error)
            return frozenset()

    def _leaving(self, stuck: Collection[str]) -> list[str]:
        if self.max_bytes is None or self._worth.total <= self.max_bytes:
            return []
        try:
            pinned = self._blobs.pinned()
        except StoreUnavailable as error:
            # Without its pins nothing may go.
            self._failed(error)
            return []
        with self._lock:
            return self._worth.least(self._worth.total - self.max_bytes, keep=pinned.union(stuck))

    def _evict(self, key: str) -> bool:
        try:
            gone = self._blobs.delete(key)
        except StoreUnavailable as error:
            self._failed(error)
            return False
        self._count("evicted", gone)
        return gone

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    def _failed(self, error: Exception) -> None:
        self._count("failures")
        self._say("unavailable", f"{self._blobs.place}: {error} Prompts are computed instead, until it can be used.")

    def _say(self, kind: str, sentence: str) -> None:
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def _fault(tensors: Mapping[str, Tensor], length: int) -> str | None:
    """What is wrong with the tensors of an entry that has so many tokens, or None."""
    ids = tensors.get(_IDS)
    if ids is None or ids.dtype != torch.int32 or ids.shape != (length,):
        return "it does not hold its tokens"
    name = not_finite(tensors)
    return None if name is None else f"its tensor {name!r} has infinities or NaN"


def _as_ids(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= 1 << 31:
        raise ConfigError.of("ids", "a row of token ids, at least one", f"{tokens.dtype} {tokens.shape}")
    return tokens.astype(np.int32)
