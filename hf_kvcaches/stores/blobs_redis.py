"""Blobs in a Redis server.

Under a prefix lie `PREFIX:body:KEY`, a blob as bytes; `PREFIX:heads`, a hash of their headers, so that these can be listed without the
bodies; `PREFIX:changes`, a stream of keys that were put or deleted; and `PREFIX:pins`, a set.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError, require
from hf_kvcaches.stores.blobs import BlobStore, Stored, StoreUnavailable
from hf_kvcaches.stores.blobs_format import KEY, checked_key, decode, encode, read_header

_PREFIX = "hf_kvcaches"
# Seconds after a failure in which the server is not asked again.
_PAUSE = 5.0
# About how many changes the server remembers. Who is further behind lists all.
_REMEMBERED = 100_000
# A key that was damaged may be any bytes, and has to be found again by its name.
_ENCODING = "latin-1"
# Entries of the stream and headers that are fetched at a time.
_ENTRIES, _HEADS = 1000, 200
# With more changed keys than these, all are listed.
_MANY = 10_000


class _Listing:
    """All headers, as far as they have come. What the stream tells behind `read_to` is read when they are complete."""

    def __init__(self, read_to: bytes | None) -> None:
        self.read_to, self.cursor = read_to, 0
        self.headers: dict[str, bytes | None] = {}


class RedisBlobs(BlobStore):
    """Blobs in a Redis server. What is written together goes in one transaction, so it is there as a whole or not at all.

    A server that can't be reached is left alone for 5 s: until then each method fails at once. So do all calls of a request
    that have taken more than their time together.

    Args:
        timeout: Seconds for the calls of a request.
    """

    def __init__(self, client: Any, prefix: str, place: str, timeout: float) -> None:
        super().__init__(place)
        self._timeout = timeout
        # Of each thread: the seconds that its request has waited.
        self._request = threading.local()
        self._redis = require("redis", "distributed", "A store of blobs in Redis")
        self._client = client
        self._heads, self._pins, self._changes = f"{prefix}:heads", f"{prefix}:pins", f"{prefix}:changes"
        self._bodies = f"{prefix}:body:"
        # The last entry of the stream that was read. While the stream still has it, nothing behind it can have been trimmed.
        self._read_to: bytes | None = None
        self._listing: _Listing | None = None
        self._pause_until = 0.0

    def begin(self) -> None:
        self._request.waited = 0.0

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        body = self._bodies + checked_key(key)
        with self._reaching():
            with self._client.pipeline(transaction=False) as together:
                header_bytes, body_bytes = together.hstrlen(self._heads, key).strlen(body).execute()
            # A server short of memory may have thrown out one of them.
            if header_bytes and body_bytes:
                return int(header_bytes + body_bytes)
        blob = encode(key, head, tensors)
        content = b"".join((blob.header, *blob.body))
        with self._reaching(), self._client.pipeline() as together:
            together.set(body, content).hset(self._heads, key, blob.header)
            self._tell_of(together, key).execute()
        return len(blob.header) + len(content)

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        with self._reaching(), self._client.pipeline(transaction=False) as together:
            listed, content = together.hexists(self._heads, checked_key(key)).get(self._bodies + key).execute()
        if content is None:
            # A server short of memory may have thrown it out.
            if listed:
                self._remove(key)
            self._missed(key)
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
            return frozenset(_text(key) for key in self._client.smembers(self._pins))

    def clear(self) -> None:
        with self._reaching():
            # Without the stream, all who read it list anew.
            self._client.delete(self._heads, self._pins, self._changes)
            for body in self._client.scan_iter(f"{self._bodies}*", count=1000):
                self._client.delete(body)

    def close(self) -> None:
        self._client.close()

    def _look(self, touched: set[str]) -> dict[str, tuple[str, Stored] | None]:
        read_to, keys = (None, None) if self._listing is not None else self._read_stream()
        # What the stream tells from here on is read next time, so nothing is lost in between.
        if keys is None:
            read_to, headers = self._all_headers(read_to)
        else:
            headers = self._headers(sorted(keys | touched))
        found = {key: None if header is None else self._blob(key, header) for key, header in headers.items()}
        self._read_to = read_to
        return found

    def _remove(self, key: str) -> bool:
        name = key.encode(_ENCODING)
        # No transaction: a full server takes none, and deleting is what helps it.
        with self._reaching(), self._client.pipeline(transaction=False) as together:
            together.delete(self._bodies.encode() + name).hdel(self._heads, name)
            bodies, heads, told = self._tell_of(together, key).execute(raise_on_error=False)
            for answer in (bodies, heads):
                if isinstance(answer, Exception):
                    raise answer
        if isinstance(told, Exception):
            # The others find out when they read it.
            self._touch(key)
        return bool(bodies or heads)

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

    def _tell_of(self, together: Any, key: str) -> Any:
        return together.xadd(self._changes, {"key": key}, maxlen=_REMEMBERED, approximate=True)

    def _read_stream(self) -> tuple[bytes | None, set[str] | None]:
        """The last entry of the stream, and the keys of those not read before; None instead of them: list all."""
        read_to = self._read_to
        keys: set[str] = set()
        while read_to is not None:
            with self._reaching():
                entries = self._client.xrange(self._changes, min=read_to, count=_ENTRIES)
            # To list all is less work than to look at very many, and goes on where it was left.
            if not entries or entries[0][0] != read_to or len(keys) > _MANY:
                break
            named = (_text(fields.get(b"key", b"")) for _, fields in entries[1:])
            keys.update(key for key in named if KEY.fullmatch(key))
            read_to = entries[-1][0]
            if len(entries) < _ENTRIES:
                return read_to, keys
        with self._reaching():
            newest = self._client.xrevrange(self._changes, count=1)
        return (newest[0][0] if newest else None), None

    def _all_headers(self, read_to: bytes | None) -> tuple[bytes | None, dict[str, bytes | None]]:
        """Where the stream ended before, and the headers of all blobs; None for those that were told of and are gone.

        Where time runs out, the next call goes on with what there is.
        """
        listing = self._listing = self._listing or _Listing(read_to)
        while True:
            with self._reaching():
                listing.cursor, some = self._client.hscan(self._heads, listing.cursor, count=_HEADS)
            listing.headers.update((_text(key), header) for key, header in some.items())
            if not listing.cursor:
                self._listing = None
                return listing.read_to, dict.fromkeys(self._told) | listing.headers

    def _headers(self, keys: list[str]) -> dict[str, bytes | None]:
        headers: dict[str, bytes | None] = {}
        for start in range(0, len(keys), _HEADS):
            some = keys[start : start + _HEADS]
            with self._reaching():
                headers.update(zip(some, self._client.hmget(self._heads, some), strict=True))
        return headers

    def _blob(self, key: str, content: bytes) -> tuple[str, Stored] | None:
        """What distinguishes a blob, and the blob, from its header."""
        try:
            if not KEY.fullmatch(key):
                raise ArtifactError("its key is none")
            header = read_header(key, content)
        except ArtifactError as error:
            self.discard(key, error)
            return None
        return header.check, Stored(key, header.head, len(content) + header.size)


def _text(key: bytes) -> str:
    return key.decode(_ENCODING)


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
