"""MinHash signatures of sets, and an index that finds near-duplicates by them.

A signature has one number for each of several permutations: the smallest that a member of the set is sent to. Two sets agree at a place
with a probability that is their Jaccard similarity, members in common over members in all. The index puts signatures into buckets, a few
places at a time, and hands out what shares a bucket: near-duplicates nearly always, others now and then (Leskovec, Rajaraman, Ullman:
Mining of Massive Datasets, 3.4).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_kvcaches.errors import ConfigError, whole_number

Hashes = NDArray[np.uint32]

# Hashes times permutations that are worked on at a time: small enough to stay in a core's cache.
_AT_ONCE = 1 << 18
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
        """One signature for each set: `(sets, permutations)`. An empty set's is the largest number at all places.

        Args:
            sets: Arrays of uint32, of one dimension. What comes twice counts once.
        """
        for hashes in sets:
            if not isinstance(hashes, np.ndarray) or hashes.dtype != np.uint32 or hashes.ndim != 1:
                raise ConfigError.of("sets", "arrays of uint32 with one dimension", getattr(hashes, "dtype", type(hashes).__name__))
        out = np.full((len(sets), self.permutations), _EMPTY, dtype=np.uint32)
        some = [index for index, hashes in enumerate(sets) if len(hashes)]
        room = max(_AT_ONCE // self.permutations, 1)
        first = 0
        while first < len(some):
            last, total = first, 0
            while last < len(some) and (last == first or total + len(sets[some[last]]) <= room):
                total += len(sets[some[last]])
                last += 1
            out[some[first:last]] = self._smallest([sets[index] for index in some[first:last]])
            first = last
        return out

    def _smallest(self, sets: list[Hashes]) -> Hashes:
        starts = np.cumsum([0, *(len(hashes) for hashes in sets[:-1])])
        mixed = _mixed(np.concatenate(sets) if len(sets) > 1 else sets[0])
        sent = np.multiply.outer(self._factors, mixed)
        sent += self._offsets[:, None]
        return np.minimum.reduceat(sent, starts, axis=1).T

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
    """Near-duplicates by their signatures, in this process: locality-sensitive hashing. Any thread may call any method.

    Args:
        threshold: The similarity at which finding becomes more likely than not.
    """

    def __init__(self, threshold: float = 0.5, permutations: int = 64) -> None:
        self.permutations = whole_number("permutations", permutations, 2, "a whole number of at least 2", most=_MOST)
        if not isinstance(threshold, int | float) or not 0 < threshold < 1:
            raise ConfigError.of("threshold", "a similarity between 0 and 1", threshold)
        bands, self._width = _layout(float(threshold), permutations)
        if bands < 2:
            hint = "Take more permutations or a lower threshold."
            raise ConfigError.of("threshold", f"one that {permutations} permutations can tell", threshold, hint)
        # For each band the keys by their numbers in it.
        self._bands: list[dict[bytes, set[str]]] = [{} for _ in range(bands)]
        self._buckets: dict[str, list[bytes]] = {}
        self._lock = threading.Lock()

    def add(self, key: str, signature: Hashes) -> None:
        """Puts a key in, or moves it to another signature if it is there.

        Args:
            signature: `(permutations,)`.
        """
        buckets = self._cut(signature)
        with self._lock:
            self._remove(key)
            self._buckets[key] = buckets
            for band, bucket in zip(self._bands, buckets, strict=True):
                band.setdefault(bucket, set()).add(key)

    def remove(self, key: str) -> None:
        """Takes a key out. Nothing happens if it isn't there."""
        with self._lock:
            self._remove(key)

    def near(self, signature: Hashes) -> list[str]:
        """The keys whose signatures share a bucket with this one, in no order.

        Args:
            signature: `(permutations,)`.
        """
        buckets = self._cut(signature)
        with self._lock:
            return list(set().union(*(band.get(bucket, ()) for band, bucket in zip(self._bands, buckets, strict=True))))

    def __contains__(self, key: str) -> bool:
        return key in self._buckets

    def __len__(self) -> int:
        return len(self._buckets)

    def _remove(self, key: str) -> None:
        for band, bucket in zip(self._bands, self._buckets.pop(key, ()), strict=False):
            band[bucket].discard(key)
            if not band[bucket]:
                del band[bucket]

    def _cut(self, signature: Hashes) -> list[bytes]:
        """The bucket in each band: so many of the numbers."""
        if not isinstance(signature, np.ndarray) or signature.dtype != np.uint32 or signature.shape != (self.permutations,):
            got = (getattr(signature, "shape", type(signature).__name__), getattr(signature, "dtype", None))
            raise ConfigError.of("signature", f"an array of {self.permutations} uint32", got, "Make it with MinHasher.signatures.")
        content, step = signature.tobytes(), self._width * signature.itemsize
        return [content[band * step : (band + 1) * step] for band in range(len(self._bands))]


@functools.cache
def _layout(threshold: float, permutations: int) -> tuple[int, int]:
    """Bands and numbers in each, for which the chances to find the unlike and to miss the like add up to least.

    Sets of similarity s share one of b bands of r numbers with a probability of 1 - (1 - s^r)^b.
    """
    similarity = (np.arange(1000) + 0.5) / 1000
    below = similarity < threshold
    costs = {}
    for bands in range(1, permutations + 1):
        for width in range(1, permutations // bands + 1):
            missed = (1 - similarity**width) ** bands
            costs[bands, width] = float(np.where(below, 1 - missed, missed).sum())
    return min(costs, key=lambda layout: costs[layout])


def _mixed(hashes: Hashes) -> Hashes:
    """The last step of MurmurHash3, which spreads hashes that lie close to each other. No two are sent to the same number."""
    hashes = hashes ^ (hashes >> np.uint32(16))
    hashes = hashes * np.uint32(0x85EBCA6B)
    hashes = hashes ^ (hashes >> np.uint32(13))
    hashes = hashes * np.uint32(0xC2B2AE35)
    return hashes ^ (hashes >> np.uint32(16))
