"""The nearest of many unit vectors by their cosine, on FAISS."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_kvcaches.errors import ConfigError, require, whole_number

Vectors = npt.NDArray[np.float32]

# How far from 1 a vector's length may be.
_UNIT = 1e-3
# FAISS asks for so many vectors for each centroid that is trained; product quantizers have 256.
_FOR_EACH, _CENTROIDS = 39, 256
# Removed vectors that stay in the FAISS index until it is built anew: so many, and a share of the others.
_REMOVED, _SHARE = 64, 8


class VectorIndex:
    """Unit vectors by name. Any thread may call any method.

    A flat index compares all: 1.3 ms for a look-up among 20,000 vectors of 384 elements on one thread. Others may miss the nearest. One
    that has to be trained (`"IVF..."`, `"...PQ..."`) starts flat; it is trained and built once there are 39 vectors for each centroid, at
    least 9,984. Vectors are kept beside it: an index of any kind forgets what was removed when it is built anew, and cosines are exact.

    Args:
        dim: Elements of a vector.
        factory: Of the index, as `faiss.index_factory` takes it: `"Flat"`, `"HNSW32"`, `"IVF256,Flat"`.
    """

    def __init__(self, dim: int, factory: str = "Flat") -> None:
        self.dim, self.factory = whole_number("dim", dim, 1, "a number of elements of at least 1"), factory
        self._faiss: Any = require("faiss", "retrieval", "An index of vectors")
        self._needed = self._to_train()
        self._lock = threading.RLock()
        self._vectors: dict[str, Vectors] = {}
        # FAISS numbers vectors as they come: the name of each, None where it was removed or replaced, and the number of each name.
        self._names: list[str | None] = []
        self._numbers: dict[str, int] = {}
        self._kind = "Flat" if self._needed else factory
        self._index = self._empty_index(self._kind)

    def _empty_index(self, factory: str) -> Any:
        return self._faiss.index_factory(self.dim, factory, self._faiss.METRIC_INNER_PRODUCT)

    def _to_train(self) -> int:
        """How many vectors the index is trained with, 0 if it needs no training; a `ConfigError` if it can't be used."""
        lists, probe = 0, np.eye(1, self.dim, dtype=np.float32)
        try:
            index = self._empty_index(self.factory)
            with contextlib.suppress(RuntimeError):  # it has no inverted lists
                lists = self._faiss.extract_index_ivf(index).nlist
            if not index.is_trained:
                return _FOR_EACH * max(_CENTROIDS, lists)
            # Some take no vectors later than the first ones.
            index.add(probe)
            index.add(probe)
            return 0
        except (RuntimeError, TypeError) as error:
            expected = f"a string of faiss.index_factory for {self.dim} elements, of an index that grows"
            raise ConfigError.of("index", expected, self.factory, "Such as 'Flat', 'HNSW32' or 'IVF256,Flat'.") from error

    def __len__(self) -> int:
        return len(self._vectors)

    def __contains__(self, name: object) -> bool:
        return name in self._vectors

    def add(self, ids: Sequence[str], vectors: npt.ArrayLike) -> None:
        """Adds vectors of length 1, `(len(ids), dim)`, under strings that are all different. An id that is there gets its new vector."""
        names, rows = list(ids), self._checked("vectors", vectors)
        if len(rows) != len(names):
            raise ConfigError.of("vectors", f"{len(names)} vectors, one for each id", len(rows))
        with self._lock:
            self.remove(names)
            self._vectors.update(zip(names, rows.copy(), strict=True))
            self._append(names, rows)

    def _append(self, names: list[str], rows: Vectors) -> None:
        self._numbers.update(zip(names, range(len(self._names), len(self._names) + len(names)), strict=True))
        self._names += names
        if names:
            self._index.add(rows)

    def remove(self, ids: Sequence[str]) -> int:
        """Removes vectors, and returns how many there were."""
        with self._lock:
            names = [name for name in dict.fromkeys(ids) if self._vectors.pop(name, None) is not None]
            for name in names:
                self._names[self._numbers.pop(name)] = None
            return len(names)

    def search(self, vectors: npt.ArrayLike, k: int = 1) -> list[list[tuple[str, float]]]:
        """The nearest ids with their cosines, the nearest first: a list for each vector, shorter than `k` where fewer are found."""
        queries = self._checked("vectors", vectors)
        with self._lock:
            if not self._vectors or not len(queries):
                return [[] for _ in queries]
            self._rebuild_if_due()
            removed = len(self._names) - len(self._vectors)
            _, numbers = self._index.search(queries, min(k + removed, len(self._names)))
            return [self._nearest(query, row, k) for query, row in zip(queries, numbers.tolist(), strict=True)]

    def _nearest(self, query: Vectors, numbers: list[int], k: int) -> list[tuple[str, float]]:
        # FAISS gives -1 where it has found fewer.
        names = [name for number in numbers if number >= 0 and (name := self._names[number]) is not None]
        cosines = [(name, float(self._vectors[name] @ query)) for name in names[:k]]
        return sorted(cosines, key=lambda item: -item[1])

    def _rebuild_if_due(self) -> None:
        """Builds the index anew where many vectors were removed, or enough have come to train the kind that was asked for."""
        kind = self.factory if len(self) >= self._needed else "Flat"
        removed = len(self._names) - len(self)
        if kind in (self._kind, "Flat") and removed <= max(_REMOVED, len(self) // _SHARE):
            return
        rows = np.stack(list(self._vectors.values()))
        self._index, self._kind = self._empty_index(kind), kind
        if not self._index.is_trained:
            self._index.train(rows)
        self._names, self._numbers = [], {}
        self._append(list(self._vectors), rows)

    def get(self, name: str) -> Vectors | None:
        """The vector of an id, `(dim,)`, or None."""
        vector = self._vectors.get(name)
        return None if vector is None else vector.copy()

    def __repr__(self) -> str:
        return f"VectorIndex({len(self)} vectors of {self.dim}, {self.factory!r})"

    def _checked(self, argument: str, vectors: npt.ArrayLike) -> Vectors:
        try:
            rows = np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1, self.dim)
        except (TypeError, ValueError) as error:
            raise ConfigError.of(argument, f"vectors of {self.dim} elements", str(error)) from error
        for length in np.linalg.norm(rows, axis=1).tolist():
            if not abs(length - 1) <= _UNIT:  # nor if it is no number
                raise ConfigError.of(argument, "vectors of length 1", length, "Divide each by its length.")
        return rows
