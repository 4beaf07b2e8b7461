"""Nearest unit vectors by their cosines, on FAISS."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_kvcaches.errors import ConfigError, require, whole_number

Vectors = npt.NDArray[np.float32]

_TOLERANCE = 1e-3  # of the length of a vector
_VECTORS_PER_CENTROID, _CENTROIDS = 39, 256  # that FAISS trains with; centroids of product quantizers


class VectorIndex:
    """Unit vectors of `dim` elements by name, in an index of any kind that `faiss.index_factory` takes. Any thread may call any method.

    A flat index compares all vectors: a look-up among 20,000 of 384 elements takes 1.3 ms on one thread. Others may miss the nearest. An
    index that needs training (`"IVF..."`, `"...PQ..."`) starts flat, and is trained once there are 39 vectors for each centroid, at least
    9,984. Vectors are also kept outside of the index: cosines are exact, and an index of any kind is rebuilt without removed vectors.
    """

    def __init__(self, dim: int, factory: str = "Flat") -> None:
        self.dim, self.factory = whole_number("dim", dim, 1, "a number of elements of at least 1"), factory
        self._faiss: Any = require("faiss", "retrieval", "An index of vectors")
        self._lock = threading.RLock()
        # FAISS numbers vectors in the order of `add`: the name and the vector of each number, and the latest number of each name.
        self._rows: list[tuple[str, Vectors]] = []
        self._numbers: dict[str, int] = {}
        try:
            index = self._empty_index(self.factory)
            lists = getattr(self._faiss.try_extract_index_ivf(index), "nlist", 0)
            self._training_size = 0 if index.is_trained else _VECTORS_PER_CENTROID * max(_CENTROIDS, lists)
            # Some kinds take no more vectors after the first `add`.
            for _ in range(2 if index.is_trained else 0):
                index.add(np.eye(1, self.dim, dtype=np.float32))
        except (RuntimeError, TypeError) as error:
            expected = f"a string of faiss.index_factory for {self.dim} elements, of an index that grows"
            raise ConfigError.of("index", expected, self.factory, "Such as 'Flat', 'HNSW32' or 'IVF256,Flat'.") from error
        self._build()

    def _empty_index(self, factory: str) -> Any:
        return self._faiss.index_factory(self.dim, factory, self._faiss.METRIC_INNER_PRODUCT)

    def _build(self) -> None:
        """Build the index of all vectors, flat if there are too few to train another kind."""
        self._kind = self.factory if len(self) >= self._training_size else "Flat"
        self._index = self._empty_index(self._kind)
        vectors = {name: self._rows[number][1] for name, number in self._numbers.items()}
        self._rows, self._numbers = [], {}
        if vectors:
            matrix = np.stack(list(vectors.values()))
            self._index.train(matrix)
            self.add(list(vectors), matrix)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def add(self, ids: Sequence[str], vectors: npt.ArrayLike) -> None:
        """Add vectors of length 1, `(len(ids), dim)`, under different ids. An id that has a vector gets the new one."""
        rows = self._unit_rows(vectors)
        if len(rows) != len(ids):
            raise ConfigError.of("vectors", f"{len(ids)} vectors, one for each id", len(rows))
        with self._lock:
            self._numbers.update(zip(ids, range(len(self._rows), len(self._rows) + len(ids)), strict=True))
            self._rows += zip(ids, rows.copy(), strict=True)
            if len(ids):
                self._index.add(rows)

    def remove(self, ids: Sequence[str]) -> int:
        """Remove vectors, and return how many there were."""
        with self._lock:
            return sum(self._numbers.pop(name, None) is not None for name in ids)

    def search(self, vectors: npt.ArrayLike, k: int = 1) -> list[list[tuple[str, float]]]:
        """Return the nearest ids of each vector with their cosines, the nearest first; fewer than `k` if the index finds fewer."""
        queries = self._unit_rows(vectors)
        with self._lock:
            # Removed vectors stay in the index until there are many.
            if len(self._rows) - len(self) > max(64, len(self) // 8) or (self._kind != self.factory and len(self) >= self._training_size):
                self._build()
            if not len(self) or not len(queries):
                return [[] for _ in queries]
            _, numbers = self._index.search(queries, min(k + len(self._rows) - len(self), len(self._rows)))
            return [self._nearest(query, row, k) for query, row in zip(queries, numbers.tolist(), strict=True)]

    def _nearest(self, query: Vectors, numbers: list[int], k: int) -> list[tuple[str, float]]:
        # FAISS returns -1 if it finds fewer.
        rows = [self._rows[number] for number in numbers if number >= 0 and self._numbers.get(self._rows[number][0]) == number]
        return sorted(((name, float(vector @ query)) for name, vector in rows[:k]), key=lambda item: -item[1])

    def get(self, name: str) -> Vectors | None:
        """Return the vector of an id, `(dim,)`, or None."""
        with self._lock:
            return self._rows[self._numbers[name]][1].copy() if name in self._numbers else None

    def _unit_rows(self, vectors: npt.ArrayLike) -> Vectors:
        try:
            rows = np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1, self.dim)
        except (TypeError, ValueError) as error:
            raise ConfigError.of("vectors", f"vectors of {self.dim} elements", str(error)) from error
        for length in np.linalg.norm(rows, axis=1).tolist():
            if not abs(length - 1) <= _TOLERANCE:  # or NaN
                raise ConfigError.of("vectors", "vectors of length 1", length, "Divide each by its length.")
        return rows
