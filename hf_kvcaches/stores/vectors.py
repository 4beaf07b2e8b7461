"""The nearest of many unit vectors by their cosine, on FAISS."""

from __future__ import annotations

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


class VectorIndex:
    """Unit vectors of `dim` elements by name, in an index of any kind that `faiss.index_factory` takes. Any thread may call any method.

    A flat index compares all: 1.3 ms for a look-up among 20,000 vectors of 384 elements on one thread. Others may miss the nearest. One
    that has to be trained (`"IVF..."`, `"...PQ..."`) starts flat; it is trained and built once there are 39 vectors for each centroid, at
    least 9,984. Vectors are kept beside it: an index of any kind forgets removed ones when it is built anew, and cosines are exact.
    """

    def __init__(self, dim: int, factory: str = "Flat") -> None:
        self.dim, self.factory = whole_number("dim", dim, 1, "a number of elements of at least 1"), factory
        self._faiss: Any = require("faiss", "retrieval", "An index of vectors")
        self._lock = threading.RLock()
        self._vectors: dict[str, Vectors] = {}
        try:
            index = self._empty_index(self.factory)
            lists = getattr(self._faiss.try_extract_index_ivf(index), "nlist", 0)
            # How many vectors the index is trained with.
            self._needed = 0 if index.is_trained else _FOR_EACH * max(_CENTROIDS, lists)
            # Some take no vectors later than the first ones.
            for _ in range(2 if index.is_trained else 0):
                index.add(np.eye(1, self.dim, dtype=np.float32))
        except (RuntimeError, TypeError) as error:
            expected = f"a string of faiss.index_factory for {self.dim} elements, of an index that grows"
            raise ConfigError.of("index", expected, self.factory, "Such as 'Flat', 'HNSW32' or 'IVF256,Flat'.") from error
        self._build()

    def _empty_index(self, factory: str) -> Any:
        return self._faiss.index_factory(self.dim, factory, self._faiss.METRIC_INNER_PRODUCT)

    def _build(self) -> None:
        """Builds the index of all vectors, of the kind that was asked for if there are enough to train it."""
        self._kind = self.factory if len(self) >= self._needed else "Flat"
        self._index = self._empty_index(self._kind)
        # FAISS numbers vectors as they come: the name of each number, and the latest number of each name.
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        if self._vectors:
            rows = np.stack(list(self._vectors.values()))
            self._index.train(rows)
            self.add(list(self._vectors), rows)

    def __len__(self) -> int:
        return len(self._vectors)

    def __contains__(self, name: object) -> bool:
        return name in self._vectors

    def add(self, ids: Sequence[str], vectors: npt.ArrayLike) -> None:
        """Adds vectors of length 1, `(len(ids), dim)`, under strings that are all different. An id that is there gets its new vector."""
        rows = self._checked(vectors)
        if len(rows) != len(ids):
            raise ConfigError.of("vectors", f"{len(ids)} vectors, one for each id", len(rows))
        with self._lock:
            self._numbers.update(zip(ids, range(len(self._names), len(self._names) + len(ids)), strict=True))
            self._names += ids
            self._vectors.update(zip(ids, rows.copy(), strict=True))
            if len(ids):
                self._index.add(rows)

    def remove(self, ids: Sequence[str]) -> int:
        """Removes vectors, and returns how many there were."""
        with self._lock:
            names = self._vectors.keys() & ids
            for name in names:
                del self._vectors[name], self._numbers[name]
            return len(names)

    def search(self, vectors: npt.ArrayLike, k: int = 1) -> list[list[tuple[str, float]]]:
        """The nearest ids with their cosines, the nearest first: a list for each vector, shorter than `k` where fewer are found."""
        queries = self._checked(vectors)
        with self._lock:
            # Removed vectors stay in the index until they are many.
            if len(self._names) - len(self) > max(64, len(self) // 8) or (self._kind != self.factory and len(self) >= self._needed):
                self._build()
            if not len(self) or not len(queries):
                return [[] for _ in queries]
            _, numbers = self._index.search(queries, min(k + len(self._names) - len(self), len(self._names)))
            return [self._nearest(query, row, k) for query, row in zip(queries, numbers.tolist(), strict=True)]

    def _nearest(self, query: Vectors, numbers: list[int], k: int) -> list[tuple[str, float]]:
        # FAISS returns -1 where it has found fewer.
        names = [self._names[number] for number in numbers if number >= 0 and self._numbers.get(self._names[number]) == number]
        return sorted(((name, float(self._vectors[name] @ query)) for name in names[:k]), key=lambda item: -item[1])

    def get(self, name: str) -> Vectors | None:
        """The vector of an id, `(dim,)`, or None."""
        with self._lock:
            return self._vectors[name].copy() if name in self._vectors else None

    def _checked(self, vectors: npt.ArrayLike) -> Vectors:
        try:
            rows = np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1, self.dim)
        except (TypeError, ValueError) as error:
            raise ConfigError.of("vectors", f"vectors of {self.dim} elements", str(error)) from error
        for length in np.linalg.norm(rows, axis=1).tolist():
            if not abs(length - 1) <= _UNIT:  # nor if it is no number
                raise ConfigError.of("vectors", "vectors of length 1", length, "Divide each by its length.")
        return rows
