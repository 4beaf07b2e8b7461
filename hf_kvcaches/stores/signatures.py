"""MinHash signatures of sets, and an index that finds near-duplicates by them.

A signature has one number for each of several permutations: the smallest that a member of the set is sent to. Two sets agree at a place
with a probability that is their Jaccard similarity, members in common over members in all. The index puts signatures into buckets, a few
places at a time, and hands out what shares a bucket: near-duplicates nearly always, others now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_kvcaches.errors import ConfigError, require

Hashes = NDArray[np.uint32]

# Hashes times permutations that are worked on at a time: small enough to stay in a core's cache.
_AT_ONCE = 1 << 18
_EMPTY = np.uint32(0xFFFFFFFF)


class MinHasher:
    """Signatures of sets of 32-bit hashes, many sets at once.

    They are those of `datasketch.MinHash(permutations, seed, scheme="affine32")` when its hash function gives these hashes.

    Args:
        permutations: Numbers in a signature. The similarity is told to within about 1 / (2 * sqrt(permutations)).
        seed: Of the permutations. Signatures of different seeds don't compare.
    """

    def __init__(self, permutations: int = 64, seed: int = 1) -> None:
        self.permutations = _whole("permutations", permutations, 1)
        self.seed = _whole("seed", seed, 0)
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
    """Near-duplicates by their signatures, in datasketch's locality-sensitive hashing.

    Any thread may call any method. With Redis, all processes that name the same index share it, and one opened later finds what is
    there; each change is one transaction, so that a key is in all of its buckets or in none. Errors of the connection pass through.

    Args:
        threshold: The similarity at which finding becomes more likely than not.
        permutations: Numbers in a signature.
        redis_url: Where the index is kept, such as redis://localhost:6379/0. None: in this process.
        name: Of the index in Redis.
    """

    def __init__(self, threshold: float = 0.5, permutations: int = 64, redis_url: str | None = None, name: str = "signatures") -> None:
        self.permutations = _whole("permutations", permutations, 2)
        if not isinstance(threshold, int | float) or not 0 < threshold < 1:
            raise ConfigError.of("threshold", "a similarity between 0 and 1", threshold)
        if not isinstance(name, str) or not name:
            raise ConfigError.of("name", "a name for the index", name)
        datasketch = require("datasketch", "retrieval", "An index of near-duplicates")
        try:
            self._bands: list[tuple[int, int]] = datasketch.MinHashLSH(threshold, permutations).hashranges
        except ValueError as error:
            hint = "Take more permutations or a lower threshold."
            raise ConfigError.of("threshold", f"one that {permutations} permutations can tell", threshold, hint) from error
        layout = (len(self._bands), self._bands[0][1])
        self._redis: Any = None
        self._lock = threading.Lock()
        storage: dict[str, Any] = {"type": "dict"}
        if redis_url is not None:
            self._redis = _connected(redis_url)
            # Indexes cut up in different ways would misread each other's buckets.
            base = f"hf_kvcaches:{name}:{permutations}:{layout[0]}x{layout[1]}"
            storage = {"type": "redis", "basename": base.encode(), "redis": {"connection_pool": self._redis.connection_pool}}
        # Keys go in as bytes: datasketch would pickle them otherwise, and unpickling what others wrote can run any code.
        self._lsh = datasketch.MinHashLSH(num_perm=permutations, params=layout, storage_config=storage, prepickle=False)

    def add(self, key: str, signature: Hashes) -> None:
        """Puts a key in, or moves it to another signature if it is there.

        Args:
            key: Any string.
            signature: `(permutations,)`.
        """
        inner, checked = _inner(key), self._checked(signature)
        if self._redis is not None:
            self._move(inner, self._buckets(checked))
            return
        with self._lock:
            self._remove(inner)
            self._lsh.insert(inner, checked, check_duplication=False)

    def remove(self, key: str) -> None:
        """Takes a key out. Nothing happens if it isn't there, or if another process is quicker."""
        if self._redis is not None:
            self._move(_inner(key), [])
            return
        with self._lock:
            self._remove(_inner(key))

    def near(self, signature: Hashes) -> list[str]:
        """The keys whose signatures share a bucket with this one, in no order.

        Args:
            signature: `(permutations,)`.
        """
        checked = self._checked(signature)
        if self._redis is None:
            with self._lock:
                return [key[1:].decode() for key in self._lsh.query(checked)]
        # In one round trip, where datasketch takes one for each band.
        pipe = self._redis.pipeline(transaction=False)
        for bucket, table in zip(self._buckets(checked), self._lsh.hashtables, strict=True):
            pipe.smembers(table.redis_key(bucket))
        return [key[1:].decode() for key in set().union(*pipe.execute())]

    def __contains__(self, key: str) -> bool:
        return _inner(key) in self._lsh

    def __len__(self) -> int:
        return len(self._lsh.keys)

    def _remove(self, key: bytes) -> None:
        if key in self._lsh:
            self._lsh.remove(key)

    def _buckets(self, signature: _Signature) -> list[bytes]:
        """The bucket in each band, as datasketch calls it."""
        return [signature.hashvalues[start:stop].byteswap().tobytes() for start, stop in self._bands]

    def _move(self, key: bytes, buckets: list[bytes]) -> None:
        """Puts a key into these buckets in Redis, or takes it out if there are none, and out of those where it is.

        What is stored is what datasketch stores. It would take two round trips for each band, with room for other processes in between.
        """
        keys, tables = self._lsh.keys, self._lsh.hashtables
        before: list[bytes] = []

        def change(pipe: Any) -> None:
            before[:] = pipe.lrange(keys.redis_key(key), 0, -1)
            pipe.multi()
            for bucket, table in zip(before, tables, strict=False):
                pipe.srem(table.redis_key(bucket), key)
            # A table's own name is that of nothing in it: there it lists what it holds.
            pipe.delete(keys.redis_key(key))
            pipe.hdel(keys.redis_key(b""), key)
            if buckets:
                pipe.hset(keys.redis_key(b""), key, keys.redis_key(key))
                pipe.rpush(keys.redis_key(key), *buckets)
            for bucket, table in zip(buckets, tables, strict=False):
                pipe.hset(table.redis_key(b""), bucket, table.redis_key(bucket))
                pipe.sadd(table.redis_key(bucket), key)
            for bucket, table in zip(before, tables, strict=False):
                pipe.exists(table.redis_key(bucket))

        # Tried again when another process changes the key meanwhile.
        left = self._redis.transaction(change, keys.redis_key(key))
        empty = [place for place, there in enumerate(left[len(left) - len(before) :]) if not there]
        if empty:
            pipe = self._redis.pipeline(transaction=False)
            for place in empty:
                pipe.hdel(tables[place].redis_key(b""), before[place])
            pipe.execute()

    def _checked(self, signature: Hashes) -> _Signature:
        if not isinstance(signature, np.ndarray) or signature.dtype != np.uint32 or signature.shape != (self.permutations,):
            got = (getattr(signature, "shape", type(signature).__name__), getattr(signature, "dtype", None))
            raise ConfigError.of("signature", f"an array of {self.permutations} uint32", got, "Make it with MinHasher.signatures.")
        return _Signature(np.ascontiguousarray(signature))


class _Signature:
    """As much of a `datasketch.MinHash` as its index looks at, without making permutations anew."""

    def __init__(self, hashvalues: Hashes) -> None:
        self.hashvalues = hashvalues

    def __len__(self) -> int:
        return len(self.hashvalues)


def _inner(key: str) -> bytes:
    # With something in front, because datasketch keeps a hash where an empty key would go.
    return b":" + key.encode()


def _connected(url: str) -> Any:
    redis = require("redis", "distributed", "An index in Redis")
    try:
        return redis.Redis(connection_pool=redis.ConnectionPool.from_url(url))
    except (ValueError, AttributeError) as error:
        raise ConfigError.of("redis_url", "a URL such as redis://localhost:6379/0", url, str(error)) from error


def _mixed(hashes: Hashes) -> Hashes:
    """The last step of MurmurHash3, which spreads hashes that lie close to each other. No two are sent to the same number."""
    hashes = hashes ^ (hashes >> np.uint32(16))
    hashes = hashes * np.uint32(0x85EBCA6B)
    hashes = hashes ^ (hashes >> np.uint32(13))
    hashes = hashes * np.uint32(0xC2B2AE35)
    return hashes ^ (hashes >> np.uint32(16))


def _whole(argument: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 32:
        raise ConfigError.of(argument, f"a whole number of at least {least}", value)
    return value
