"""MinHash signatures of sets, and an index that finds near-duplicates by them, on datasketch.

A signature has one number for each of several permutations: the smallest that a member of the set is sent to. Two sets agree in a number
with a probability that is their Jaccard similarity, members in common over members in all. The index puts signatures into buckets, a few
numbers at a time, and gives what shares a bucket (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_kvcaches.errors import require, whole_number

Hashes = NDArray[np.uint32]


class MinHasher:
    """Signatures of sets of 32-bit hashes.

    Args:
        permutations: Numbers in a signature. The similarity is told to within about 1 / (2 * sqrt(permutations)).
    """

    def __init__(self, permutations: int = 64, seed: int = 1) -> None:
        permutations = whole_number("permutations", permutations, 1)
        self._empty: Any = _datasketch().MinHash(permutations, seed, hashfunc=lambda value: value, scheme="affine32")

    def signatures(self, sets: Sequence[Hashes]) -> Hashes:
        """One signature for each set: `(sets, permutations)`. An empty set's is the largest number everywhere."""
        signatures = np.zeros((len(sets), len(self._empty)), np.uint32)
        for row, hashes in zip(signatures, sets, strict=True):
            signature = self._empty.copy()
            signature.update_batch(hashes)
            row[:] = signature.hashvalues
        return signatures


def jaccard(a: Hashes, b: Hashes) -> float:
    """The similarity of two sets, 0 to 1, as their signatures tell it."""
    return float(np.mean(a == b))


def signature_index(permutations: int, bands: int, width: int) -> Any:
    """An empty `datasketch.MinHashLSH`, to be used with `as_minhash`.

    Args:
        permutations: Numbers in a signature.
        bands: Buckets that a signature is put into. Sets of similarity s share one of b bands of r numbers with a probability of
            1 - (1 - s^r)^b, which is steepest near s = (1 / b)^(1 / r).
        width: Numbers of a signature that name a bucket.
    """
    return _datasketch().MinHashLSH(num_perm=permutations, params=(bands, width))


def as_minhash(signature: Hashes) -> Any:
    """A signature as datasketch takes it."""
    return _datasketch().MinHash(hashvalues=signature, scheme="affine32")


def _datasketch() -> Any:
    return require("datasketch", "retrieval", "Looking for near-identical segments")
