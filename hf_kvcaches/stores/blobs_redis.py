"""Blobs in a Redis server.

Under a prefix lie `PREFIX:body:KEY`, a blob as bytes; `PREFIX:index`, a hash of all keys with the versions of their blobs;
`PREFIX:headers`, a hash with the first bytes of each blob, so that heads are listed without their tensors; `PREFIX:state`, a random string
that is another one after each put and gone after a deletion; and `PREFIX:pins`, a set.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import secrets
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError, require
from hf_kvcaches.stores.blobs import BlobStore, Stored, StoreUnavailable
from hf_kvcaches.stores.blobs_format import DIGEST, KEY, checked_key, decode, encode, read_header

_PREFIX = "hf_kvcaches"
_PAUSE = 5.0  # seconds after a failure in which the server is not asked again
_HEADS = 200  # that are fetched at a time


class RedisBlobs(BlobStore):
    """Blobs in a Redis server. A blob, its header and its version are written in one transaction.

    An answer may take `timeout` seconds, and so may all calls of a request together: further ones fail at once. A server that can't be
    reached is left alone for 5 s.
    """

    def __init__(self, location: str, timeout: float) -> None:
        try:
            parts = urlsplit(location)
            options = dict(parse_qsl(parts.query, keep_blank_values=True))
            prefix, database = options.pop("prefix", _PREFIX), parts.path.strip("/") or "0"
            # No passwords in messages.
            super().__init__(f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}/{database}?prefix={prefix}")
            well_formed = parts.hostname and database.isdecimal() and re.fullmatch(r"[\w.:-]+", prefix, re.ASCII)
            if not well_formed or "decode_responses" in options:
                raise ValueError(self.place)
        except ValueError as error:
            hint = "Write redis://host:port/db, or with ?prefix=NAME (letters, digits, _.:-) where several stores share a database."
            raise ConfigError.of("location", "the address of a Redis server", str(error), hint) from error
        self._redis: Any = require("redis", "distributed", "A store of blobs in Redis")
        # Each retry would wait as long again.
        retry = self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0)
        url = urlunsplit(parts._replace(query=urlencode(options)))
        try:
            self._client: Any = self._redis.Redis.from_url(url, retry=retry, socket_timeout=timeout, socket_connect_timeout=timeout)
            self._client.ping()
        except (self._redis.RedisError, OSError, TypeError, ValueError) as error:
            expected = f"a Redis server that answers at {self.place}"
            raise ConfigError.of("location", expected, str(error), "Start it, or name another.") from error
        names = ("index", "headers", "state", "pins", "body:")
        self._index, self._headers, self._state, self._pin_set, self._bodies = (f"{prefix}:{name}" for name in names)
        # Per thread: the seconds that its request has waited. A thread that has begun none has no limit.
        self._request, self._timeout, self._pause_until = threading.local(), timeout, 0.0

    def begin(self) -> None:
        self._request.waited = 0.0

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        body = self._bodies + checked_key(key)
        with self._pipeline() as pipeline:
            *listed, size = pipeline.hexists(self._index, key).hexists(self._headers, key).strlen(body).execute()
        # A server short of memory may have evicted any of them.
        if all(listed) and size:
            return int(size)
        pieces = encode(key, head, tensors)
        header = bytes(pieces[0])
        with self._pipeline(transaction=True) as pipeline:
            pipeline.set(body, b"".join(pieces)).hset(self._headers, key, header).hset(self._index, key, header[:DIGEST])
            pipeline.set(self._state, secrets.token_hex(8)).execute()
        return sum(map(len, pieces))

    def read(self, key: str) -> dict[str, Tensor] | None:
        with self._pipeline() as pipeline:
            listed, content = pipeline.hexists(self._index, key).get(self._bodies + key).execute()
        if content is None:
            if listed:
                self.delete(key)
            return None
        tensors = decode(key, content, verify=self._verified.get(key) != content[:DIGEST])
        self._verified[key] = content[:DIGEST]
        return tensors

    def delete(self, key: str) -> bool:
        # No transaction: a full server takes none, and deleting is what helps it.
        with self._pipeline() as pipeline:
            pipeline.delete(self._bodies + checked_key(key)).hdel(self._index, key).hdel(self._headers, key).delete(self._state)
            return any(pipeline.execute()[:2])

    def pin(self, key: str, pinned: bool = True) -> None:
        with self._pipeline() as pipeline:
            (pipeline.sadd if pinned else pipeline.srem)(self._pin_set, checked_key(key)).execute()

    def pinned(self) -> frozenset[str]:
        with self._pipeline() as pipeline:
            (keys,) = pipeline.smembers(self._pin_set).execute()
        return frozenset(key.decode("latin-1") for key in keys)

    def versions(self) -> dict[str, Hashable]:
        with self._pipeline() as pipeline:
            (index,) = pipeline.hgetall(self._index).execute()
        plain = ((key.decode("latin-1"), version) for key, version in index.items())
        return {key: version for key, version in plain if KEY.fullmatch(key)}

    def heads(self, keys: list[str]) -> Iterator[Stored]:
        for start in range(0, len(keys), _HEADS):
            batch = keys[start : start + _HEADS]
            with self._pipeline() as pipeline:
                pipeline.hmget(self._headers, batch)
                for key in batch:
                    pipeline.strlen(self._bodies + key)
                headers, *sizes = pipeline.execute()
            for key, header, size in zip(batch, headers, sizes, strict=True):
                try:
                    if header and size:
                        yield Stored(key, read_header(key, size, io.BytesIO(header).read).head, size)
                    else:
                        self.delete(key)
                except ArtifactError as error:
                    self.discard(key, error)

    def state(self) -> Hashable:
        with self._pipeline() as pipeline:
            return pipeline.get(self._state).execute()[0]

    def clear(self) -> None:
        with self._pipeline() as pipeline:
            pipeline.delete(self._index, self._headers, self._state, self._pin_set).execute()
            for body in self._client.scan_iter(f"{self._bodies}*", count=1000):
                self._client.delete(body)

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def _pipeline(self, transaction: bool = False) -> Iterator[Any]:
        """Commands of one round trip. What the client raises is a `StoreUnavailable`, and the request has waited for it."""
        start, waited = time.monotonic(), getattr(self._request, "waited", -math.inf)
        if start < self._pause_until:
            raise StoreUnavailable(f"{self.place} could not be reached a moment ago.")
        if waited >= self._timeout:
            raise StoreUnavailable(f"{self.place} has kept this request waiting for {self._timeout:g} s.")
        try:
            with self._client.pipeline(transaction) as pipeline:
                yield pipeline
        except (self._redis.ConnectionError, self._redis.TimeoutError, OSError) as error:
            self._pause_until = time.monotonic() + _PAUSE
            raise StoreUnavailable(f"{self.place} can't be reached: {error}") from error
        except self._redis.RedisError as error:
            # It answers, if only that it is full: it may grant the next command.
            raise StoreUnavailable(f"{self.place} refuses: {error}") from error
        finally:
            self._request.waited = waited + time.monotonic() - start
