"""Blobs in a Redis server.

Under a prefix lie `PREFIX:body:KEY`, a blob as bytes; `PREFIX:index`, a hash of all keys with the first digits of their headers' checksums;
`PREFIX:state`, a random string that is another one after each put and gone after a deletion; and `PREFIX:pins`, a set.
"""

from __future__ import annotations

import contextlib
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
from hf_kvcaches.stores.blobs import BlobStore, Stored, StoreUnavailable
from hf_kvcaches.stores.blobs_format import FIRST_BYTES, KEY, checked_key, complete_header, decode, encode

_PREFIX = "hf_kvcaches"
# Seconds after a failure in which the server is not asked again.
_PAUSE = 5.0
# Headers that are fetched at a time.
_HEADS = 200


class RedisBlobs(BlobStore):
    """Blobs in a Redis server. A blob and its key in the index are written in one transaction.

    A server that can't be reached is left alone for 5 s: until then each method fails at once. So do all calls of a request
    that have taken more than their time together.

    Args:
        timeout: Seconds for the calls of a request.
    """

    def __init__(self, client: Any, prefix: str, place: str, timeout: float) -> None:
        super().__init__(place)
        self._timeout = timeout
        # Per thread: the seconds that its request has waited.
        self._request = threading.local()
        self._redis = require("redis", "distributed", "A store of blobs in Redis")
        self._client = client
        self._index, self._state_key, self._pins = f"{prefix}:index", f"{prefix}:state", f"{prefix}:pins"
        self._bodies = f"{prefix}:body:"
        # Heads by key and version that were fetched by a listing for which a request had too little time. The next one continues it.
        self._fetched: dict[tuple[str, Hashable], Stored | None] = {}
        self._pause_until = 0.0

    def begin(self) -> None:
        self._request.waited = 0.0

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        body = self._bodies + checked_key(key)
        with self._reaching(), self._client.pipeline(transaction=False) as pipeline:
            listed, size = pipeline.hexists(self._index, key).strlen(body).execute()
        # A server short of memory may have evicted either.
        if listed and size:
            return int(size)
        blob = encode(key, head, tensors)
        with self._reaching(), self._client.pipeline() as pipeline:
            pipeline.set(body, b"".join((blob.header, *blob.body))).hset(self._index, key, blob.check[:16])
            pipeline.set(self._state_key, secrets.token_hex(8)).execute()
        return blob.size

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        with self._reaching(), self._client.pipeline(transaction=False) as pipeline:
            listed, content = pipeline.hexists(self._index, checked_key(key)).get(self._bodies + key).execute()
        if content is None:
            if listed:
                self._remove(key)
            return None
        try:
            # A copy, since torch takes only what can be written to.
            return decode(key, bytearray(content))
        except ArtifactError as error:
            self.discard(key, error)
            return None

    def pin(self, key: str, pinned: bool = True) -> None:
        with self._reaching():
            (self._client.sadd if pinned else self._client.srem)(self._pins, checked_key(key))

    def pinned(self) -> frozenset[str]:
        with self._reaching():
            return frozenset(key.decode("latin-1") for key in self._client.smembers(self._pins))

    def clear(self) -> None:
        with self._reaching():
            self._client.delete(self._index, self._state_key, self._pins)
            for body in self._client.scan_iter(f"{self._bodies}*", count=1000):
                self._client.delete(body)

    def close(self) -> None:
        self._client.close()

    def _state(self) -> Hashable:
        with self._reaching():
            state: bytes | None = self._client.get(self._state_key)
        return state

    def _versions(self) -> dict[str, Hashable]:
        with self._reaching():
            index = self._client.hgetall(self._index)
        plain = ((key.decode("latin-1"), check.decode("latin-1")) for key, check in index.items())
        return {key: check for key, check in plain if KEY.fullmatch(key)}

    def _read_heads(self, versions: Mapping[str, Hashable]) -> list[Stored]:
        missing = [item for item in versions.items() if item not in self._fetched]
        for start in range(0, len(missing), _HEADS):
            batch = missing[start : start + _HEADS]
            with self._reaching(), self._client.pipeline(transaction=False) as pipeline:
                for key, _ in batch:
                    pipeline.strlen(self._bodies + key).getrange(self._bodies + key, 0, FIRST_BYTES - 1)
                answers = pipeline.execute()
            for item, size, first in zip(batch, answers[::2], answers[1::2], strict=True):
                self._fetched[item] = self._read_head(item[0], size, first)
        blobs = [self._fetched[item] for item in versions.items()]
        self._fetched = {}
        return [blob for blob in blobs if blob is not None]

    def _read_head(self, key: str, size: int, first: bytes) -> Stored | None:
        if not size:
            self._remove(key)
            return None
        try:
            header = complete_header(key, first, size, partial(self._read_start, key))
            return Stored(key, header.head, header.size)
        except ArtifactError as error:
            self.discard(key, error)
            return None

    def _read_start(self, key: str, length: int) -> bytes:
        with self._reaching():
            start: bytes = self._client.getrange(self._bodies + key, 0, length - 1)
            return start

    def _remove(self, key: str) -> bool:
        # No transaction: a full server takes none, and deleting is what helps it.
        with self._reaching(), self._client.pipeline(transaction=False) as pipeline:
            pipeline.delete(self._bodies + key).hdel(self._index, key).delete(self._state_key)
            return any(pipeline.execute()[:2])

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


def open_redis(location: str, timeout: float) -> RedisBlobs:
    """Connects to a server.

    Args:
        location: `redis://` or `rediss://`, as redis-py takes them, and `?prefix=NAME`.
        timeout: Seconds for one answer, and for all calls of a request.
    """
    hint = "Write redis://host:port/db, or with ?prefix=NAME where several stores share a database."
    try:
        parts = urlsplit(location)
        host, port, database = parts.hostname, parts.port or 6379, parts.path.strip("/") or "0"
    except ValueError as error:
        raise ConfigError.of("location", "the address of a Redis server", str(error), hint) from error
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix = options.pop("prefix", _PREFIX)
    # No passwords in messages.
    place = f"{parts.scheme}://{host}:{port}/{database}?prefix={prefix}"
    if not host or not database.isdecimal() or not re.fullmatch(r"[\w.:-]+", prefix, re.ASCII) or "decode_responses" in options:
        raise ConfigError.of("location", "the address of a Redis server, and a prefix of letters, digits and any of _.:-", place, hint)
    redis = require("redis", "distributed", "A store of blobs in Redis")
    try:
        client = redis.Redis.from_url(
            urlunsplit(parts._replace(query=urlencode(options))),
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            # Each retry would wait as long again.
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
        client.ping()
    except (redis.RedisError, OSError, TypeError, ValueError) as error:
        raise ConfigError.of("location", f"a Redis server that answers at {place}", str(error), "Start it, or name another.") from error
    return RedisBlobs(client, prefix, place, timeout)
