"""MinHash signatures of sets, and an index that finds near-duplicates by them.

A signature has one number for each of several permutations: the smallest that a member of the set is sent to. Two sets agree at a place
with a probability that is their Jaccard similarity, members in common over members in all. The index puts signatures into buckets, a few
places at a time, and hands out what shares a bucket: near-duplicates nearly always, others now and then (Leskovec, Rajaraman, Ullman:
Mining of Massive Datasets, 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_kvcaches.errors import ConfigError, whole_number

Hashes = NDArray[np.uint32]

# Hashes that are permuted at a time: small enough for the result to stay in a core's cache.
_AT_ONCE = 1 << 12
_EMPTY = np.uint32(0xFFFFFFFF)
_MOST = (1 << 32) - 1


class MinHasher:
    """Signatures of sets of 32-bit hashes, many sets at once.

    They are those of `datasketch.MinHash(permutations, seed, scheme="affine32")` when its hash function gives these hashes.

    Args:
        permutations: Numbers in a signature. The similarity is told to within about 1 / (2 * sqrt(permutations)).
        seed: Of the permutations. Signatures of different seeds don't compare.
    """

    def __init__(self, permutations: int = 64, seed: int = 1) -> None:
        self.permutations = whole_number("permutations", permutations, 1, "a whole number of at least 1", most=_MOST)
        self.seed = whole_number("seed", seed, 0, "a whole number of at least 0", most=_MOST)
        random = np.random.RandomState(self.seed)
        # Odd factors, so that no two hashes are sent to the same number.
        self._factors = random.randint(0, 1 << 31, permutations, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
        self._offsets = random.randint(0, 1 << 32, permutations, dtype=np.uint32)

    def signatures(self, sets: Sequence[Hashes]) -> Hashes:
        """One signature for each set: `(sets, permutations)`. An empty set's is the largest number everywhere.

        Args:
            sets: Arrays of uint32, of one dimension. What comes twice counts once.
        """
        for hashes in sets:
            if not isinstance(hashes, np.ndarray) or hashes.dtype != np.uint32 or hashes.ndim != 1:
                raise ConfigError.of("sets", "arrays of uint32 with one dimension", getattr(hashes, "dtype", type(hashes).__name__))
        return np.stack([self._signature(hashes) for hashes in sets]) if sets else np.zeros((0, self.permutations), np.uint32)

    def _signature(self, hashes: Hashes) -> Hashes:
        smallest = np.full(self.permutations, _EMPTY)
        mixed = _mixed(hashes)
        for start in range(0, len(mixed), _AT_ONCE):
            permuted = np.multiply.outer(self._factors, mixed[start : start + _AT_ONCE])
            permuted += self._offsets[:, None]
            np.minimum(smallest, permuted.min(axis=1), out=smallest)
        return smallest

    @staticmethod
    def jaccard(a: Hashes, b: Hashes) -> NDArray[np.float64]:
        """The similarity of the sets, 0 to 1, as signatures tell it: the share of places where they agree.

        Args:
            a: Signatures `(..., permutations)`.
            b: Signatures of shapes that broadcast with `a`'s. Two single signatures give a single number.
        """
        if np.shape(a)[-1:] != np.shape(b)[-1:]:
            raise ConfigError.of("b", f"signatures of {np.shape(a)[-1:]} numbers, as in `a`", np.shape(b)[-1:])
        similar: NDArray[np.float64] = np.mean(np.equal(a, b), axis=-1)
        return similar


class SignatureIndex:
    """Near-duplicates by their signatures: locality-sensitive hashing, in memory. The caller locks it.

    Args:
        bands: Buckets that a signature is put into. Sets of similarity s share one of b bands of r numbers with a probability of
            1 - (1 - s^r)^b, which is steepest near s = (1 / b)^(1 / r).
        width: Numbers of a signature that name a bucket.
    """

    def __init__(self, bands: int, width: int) -> None:
        self._bands: list[dict[bytes, set[str]]] = [{} for _ in range(bands)]
        self._width = width
        self._buckets: dict[str, list[bytes]] = {}

    def add(self, key: str, signature: Hashes) -> None:
        """Adds a key, or moves it to another signature.

        Args:
            signature: `(permutations,)`.
        """
        self.remove(key)
        self._buckets[key] = self._cut(signature)
        for band, bucket in zip(self._bands, self._buckets[key], strict=True):
            band.setdefault(bucket, set()).add(key)

    def remove(self, key: str) -> None:
        """Removes a key; an unknown one is ignored."""
        for band, bucket in zip(self._bands, self._buckets.pop(key, ()), strict=False):
            band[bucket].discard(key)
            if not band[bucket]:
                del band[bucket]

    def near(self, signature: Hashes) -> list[str]:
        """The keys whose signatures share a bucket with this one, in no order.

        Args:
            signature: `(permutations,)`.
        """
        return list(set().union(*(band.get(bucket, ()) for band, bucket in zip(self._bands, self._cut(signature), strict=True))))

    def __len__(self) -> int:
        return len(self._buckets)

    def _cut(self, signature: Hashes) -> list[bytes]:
        content, step = signature.tobytes(), self._width * signature.itemsize
        return [content[band * step : (band + 1) * step] for band in range(len(self._bands))]


def _mixed(hashes: Hashes) -> Hashes:
    """The last step of MurmurHash3, which spreads hashes that lie close to each other. No two are sent to the same number."""
    hashes = hashes ^ (hashes >> np.uint32(16))
    hashes = hashes * np.uint32(0x85EBCA6B)
    hashes = hashes ^ (hashes >> np.uint32(13))
    hashes = hashes * np.uint32(0xC2B2AE35)
    return hashes ^ (hashes >> np.uint32(16))
