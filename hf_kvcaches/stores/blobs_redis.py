"""Blobs in a Redis server.

Under a prefix lie `PREFIX:body:KEY`, a blob as bytes; `PREFIX:index`, a hash of all keys with the versions of their blobs; `PREFIX:state`,
a random string that is another one after each put and gone after a deletion; and `PREFIX:pins`, a set.
"""

from __future__ import annotations

import contextlib
import io
import re
import secrets
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError, require
from hf_kvcaches.stores.blobs import BlobStore, Changes, Stored, StoreUnavailable
from hf_kvcaches.stores.blobs_format import KEY, checked_key, decode, encode, read_header, version_of

_PREFIX = "hf_kvcaches"
# Seconds after a failure in which the server is not asked again.
_PAUSE = 5.0
# Heads that are fetched at a time, and bytes to fetch at first for each: most are shorter.
_HEADS, _FIRST_BYTES = 200, 8 << 10


class RedisBlobs(BlobStore):
    """Blobs in a Redis server. A blob and its version in the index are written in one transaction.

    A server that can't be reached is left alone for 5 s: until then each method fails at once. So do all calls of a request
    that have taken more than their time together.

    Args:
        location: `redis://` or `rediss://`, as redis-py takes them, and `?prefix=NAME`.
        timeout: Seconds for one answer, and for all calls of a request.
    """

    def __init__(self, location: str, timeout: float) -> None:
        hint = "Write redis://host:port/db, or with ?prefix=NAME (letters, digits and any of _.:-) where several stores share a database."
        try:
            parts = urlsplit(location)
            options = dict(parse_qsl(parts.query, keep_blank_values=True))
            prefix, database = options.pop("prefix", _PREFIX), parts.path.strip("/") or "0"
            # No passwords in messages.
            super().__init__(f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}/{database}?prefix={prefix}")
        except ValueError as error:
            raise ConfigError.of("location", "the address of a Redis server", str(error), hint) from error
        if not (parts.hostname and database.isdecimal() and re.fullmatch(r"[\w.:-]+", prefix, re.ASCII)) or "decode_responses" in options:
            raise ConfigError.of("location", "the address of a Redis server", self.place, hint)
        self._redis: Any = require("redis", "distributed", "A store of blobs in Redis")
        # Each retry would wait as long again.
        once = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
        }
        try:
            self._client: Any = self._redis.Redis.from_url(urlunsplit(parts._replace(query=urlencode(options))), **once)
            self._client.ping()
        except (self._redis.RedisError, OSError, TypeError, ValueError) as error:
            raise ConfigError.of(
                "location", f"a Redis server that answers at {self.place}", str(error), "Start it, or name another."
            ) from error
        self._index, self._state_key, self._pin_set, self._bodies = (f"{prefix}:{part}" for part in ("index", "state", "pins", "body:"))
        # The version of each blob whose tensors were verified.
        self._verified: dict[str, str] = {}
        # Per thread: the seconds that its request has waited.
        self._request, self._timeout, self._pause_until = threading.local(), timeout, 0.0

    def begin(self) -> None:
        self._request.waited = 0.0

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        body = self._bodies + checked_key(key)
        with self._reaching(), self._client.pipeline(transaction=False) as pipeline:
            listed, size = pipeline.hexists(self._index, key).strlen(body).execute()
        # A server short of memory may have evicted either.
        if listed and size:
            return int(size)
        pieces = encode(key, head, tensors)
        with self._reaching(), self._client.pipeline() as pipeline:
            pipeline.set(body, b"".join(pieces)).hset(self._index, key, version_of(bytes(pieces[0])))
            pipeline.set(self._state_key, secrets.token_hex(8)).execute()
        return sum(map(len, pieces))

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        with self._reaching(), self._client.pipeline(transaction=False) as pipeline:
            listed, content = pipeline.hget(self._index, checked_key(key)).get(self._bodies + key).execute()
        if content is None:
            if listed:
                self.delete(key)
            return None
        known = self._verified.get(key, "")
        try:
            tensors, version = decode(key, content, known if listed == known.encode() else "")
        except ArtifactError as error:
            self.discard(key, error)
            return None
        self._verified[key] = version
        return tensors

    def delete(self, key: str) -> bool:
        self._verified.pop(checked_key(key), None)
        # No transaction: a full server takes none, and deleting is what helps it.
        with self._reaching(), self._client.pipeline(transaction=False) as pipeline:
            pipeline.delete(self._bodies + key).hdel(self._index, key).delete(self._state_key)
            return any(pipeline.execute()[:2])

    def changes(self) -> Changes:
        return self.listed(self._versions, self._heads, self._state)

    def pin(self, key: str, pinned: bool = True) -> None:
        with self._reaching():
            (self._client.sadd if pinned else self._client.srem)(self._pin_set, checked_key(key))

    def pinned(self) -> frozenset[str]:
        with self._reaching():
            return frozenset(key.decode("latin-1") for key in self._client.smembers(self._pin_set))

    def clear(self) -> None:
        with self._reaching():
            self._client.delete(self._index, self._state_key, self._pin_set)
            for body in self._client.scan_iter(f"{self._bodies}*", count=1000):
                self._client.delete(body)

    def close(self) -> None:
        self._client.close()

    def _state(self) -> Hashable:
        with self._reaching():
            return bytes(self._client.get(self._state_key) or b"") or None

    def _versions(self) -> dict[str, Hashable]:
        with self._reaching():
            index = self._client.hgetall(self._index)
        plain = ((key.decode("latin-1"), version) for key, version in index.items())
        return {key: version for key, version in plain if KEY.fullmatch(key)}

    def _heads(self, keys: list[str]) -> Iterator[Stored]:
        for start in range(0, len(keys), _HEADS):
            batch = keys[start : start + _HEADS]
            with self._reaching(), self._client.pipeline(transaction=False) as pipeline:
                for key in batch:
                    pipeline.strlen(self._bodies + key).getrange(self._bodies + key, 0, _FIRST_BYTES - 1)
                answers = pipeline.execute()
            for key, size, first in zip(batch, answers[::2], answers[1::2], strict=True):
                try:
                    if size:
                        yield Stored(key, read_header(key, size, partial(self._more, key, io.BytesIO(first))).head, size)
                    else:
                        self.delete(key)
                except ArtifactError as error:
                    self.discard(key, error)

    def _more(self, key: str, first: io.BytesIO, count: int) -> bytes:
        """The next bytes of a blob, of which the first are there."""
        start, content = first.tell(), first.read(count)
        if len(content) == count:
            return content
        with self._reaching():
            return bytes(self._client.getrange(self._bodies + key, start, start + count - 1))

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Around one round trip: what the client raises, as `StoreUnavailable`, and how long the request has waited."""
        start, waited = time.monotonic(), getattr(self._request, "waited", None)
        if start < self._pause_until:
            raise StoreUnavailable(f"{self.place} could not be reached a moment ago.")
        if waited is not None and waited >= self._timeout:
            raise StoreUnavailable(f"{self.place} has kept this request waiting for {self._timeout:g} s.")
        try:
            yield
        except (self._redis.ConnectionError, self._redis.TimeoutError, OSError) as error:
            self._pause_until = time.monotonic() + _PAUSE
            raise StoreUnavailable(f"{self.place} can't be reached: {error}") from error
        except self._redis.RedisError as error:
            # It answers, if only that it is full: the next may be granted.
            raise StoreUnavailable(f"{self.place} refuses: {error}") from error
        finally:
            if waited is not None:
                self._request.waited = waited + time.monotonic() - start
