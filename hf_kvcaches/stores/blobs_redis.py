"""Blobs in a Redis server.

Its keys are `PREFIX:body:KEY`, the bytes of a blob; the hashes `PREFIX:index` of versions and `PREFIX:headers` of the bytes before the
tensors, to list heads; `PREFIX:state`, a random string that each put replaces and each deletion deletes; and the set `PREFIX:pins`.
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError, require
from hf_kvcaches.stores.blobs import BlobHead, BlobStore, Loaded, StoreUnavailable
from hf_kvcaches.stores.blobs_format import DIGEST, KEY, checked_key, decode, encode, read_header
from hf_kvcaches.stores.files import reader_of

_PAUSE = 5.0  # seconds after a failure for which no command is sent
_HEADS = 200  # heads per round trip
_CHUNK, _CHUNKS = 2**20, 8  # bytes per answer, and answers per round trip: a large blob as one answer takes three times as long
_SLOWEST = 2**25  # bytes per second, below which a transfer counts towards the time of a request


class RedisBlobs(BlobStore):
    """Blobs in a Redis server. A blob, its header and its version are written in one transaction.

    An answer may take `timeout` seconds, and so may all calls of a request together, the transfer of bodies aside.
    After a failure no command is sent for 5 s.
    """

    def __init__(self, location: str, timeout: float) -> None:
        try:
            parts = urlsplit(location)
            options = dict(parse_qsl(parts.query, keep_blank_values=True))
            prefix, database = options.pop("prefix", "hf_kvcaches"), parts.path.strip("/") or "0"
            # Without the password.
            super().__init__(f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}/{database}?prefix={prefix}")
            well_formed = parts.hostname and database.isdecimal() and re.fullmatch(r"[\w.:-]+", prefix, re.ASCII)
            if not well_formed or "decode_responses" in options:
                raise ValueError(self.place)
        except ValueError as error:
            hint = "Write redis://host:port/db, or with ?prefix=NAME (letters, digits, _.:-) where several stores share a database."
            raise ConfigError.of("location", "the address of a Redis server", str(error), hint) from error
        self._redis: Any = require("redis", "distributed", "A store of blobs in Redis")
        # A retry would wait for `timeout` again.
        retry = self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0)
        url = urlunsplit(parts._replace(query=urlencode(options)))
        try:
            self._client: Any = self._redis.Redis.from_url(url, retry=retry, socket_timeout=timeout, socket_connect_timeout=timeout)
            self._client.ping()
        except (self._redis.RedisError, OSError, TypeError, ValueError) as error:
            server = f"a Redis server that answers at {self.place}"
            raise ConfigError.of("location", server, str(error), "Start it, or name another.") from error
        names = ("index", "headers", "state", "pins", "body:")
        self._index, self._headers, self._state, self._pin_set, self._bodies = (f"{prefix}:{name}" for name in names)
        self._request, self._timeout, self._pause_until = threading.local(), timeout, 0.0

    def begin(self) -> None:
        self._request.waited = 0.0

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        body = self._bodies + checked_key(key)
        # A server short of memory may have evicted any of them.
        stored = self._run(("STRLEN", body), ("HEXISTS", self._index, key), ("HEXISTS", self._headers, key))
        if all(stored):
            return int(stored[0])
        pieces = encode(key, head, tensors)
        content, header = b"".join(pieces), bytes(pieces[0])
        writes = ("SET", body, content), ("HSET", self._headers, key, header), ("HSET", self._index, key, header[:DIGEST])
        self._run(*writes, ("SET", self._state, secrets.token_hex(8)), transaction=True)
        return len(content)

    def read(self, key: str) -> dict[str, Tensor] | None:
        blobs, error = self.get_many([key])
        if error is not None:
            raise error
        return blobs.get(key)

    def get_many(self, keys: Sequence[str]) -> Loaded:
        blobs = dict[str, dict[str, Tensor]]()
        try:
            contents = self._contents(keys)
        except StoreUnavailable as error:
            return Loaded(blobs, error)
        for key, content in contents.items():
            digest = bytes(content[:DIGEST])
            try:
                blobs[key] = decode(key, content, verify=self._verified.get(key) != digest)
                self._verified[key] = digest
            except ArtifactError as error:
                self.discard(key, error)
        return Loaded(blobs)

    def _contents(self, keys: Sequence[str]) -> dict[str, memoryview]:
        """Return the bytes of blobs, without those that are missing or were replaced meanwhile: small ones in one round trip for all."""
        looks: list[tuple[Any, ...]] = []
        for key in keys:
            body = self._bodies + checked_key(key)
            looks += ("HEXISTS", self._index, key), ("STRLEN", body), ("GETRANGE", body, 0, _CHUNK - 1)
        answers, contents = self._run(*looks), dict[str, memoryview]()
        for key, listed, size, chunk in zip(keys, answers[::3], answers[1::3], answers[2::3], strict=True):
            if size and len(chunk) == min(size, _CHUNK):
                content = np.empty(size, np.uint8).data
                content[: len(chunk)] = chunk
                if self._read_on(key, content):
                    contents[key] = content
            elif listed and not size:
                self.delete(key)  # the server has evicted it
        return contents

    def _read_on(self, key: str, content: memoryview) -> bool:
        """Read what follows the first chunk of a blob, and return whether it is still the same blob."""
        for first in range(_CHUNK, len(content), _CHUNK * _CHUNKS):
            starts = range(first, min(first + _CHUNK * _CHUNKS, len(content)), _CHUNK)
            # Another blob in its place begins with another digest.
            spans = [*((start, min(start + _CHUNK, len(content))) for start in starts), (0, DIGEST)]
            *chunks, digest = self._run(*(("GETRANGE", self._bodies + key, start, stop - 1) for start, stop in spans))
            if content[:DIGEST] != digest:
                return False
            for start, chunk in zip(starts, chunks, strict=True):
                content[start : start + len(chunk)] = chunk
        return True

    def delete(self, key: str) -> bool:
        # No transaction: a full server refuses transactions, and deletions free its memory.
        deletions = ("DEL", self._bodies + checked_key(key)), ("HDEL", self._index, key), ("HDEL", self._headers, key)
        return any(self._run(*deletions, ("DEL", self._state))[:2])

    def pin(self, key: str, pinned: bool = True) -> None:
        self._run(("SADD" if pinned else "SREM", self._pin_set, checked_key(key)))

    def pinned(self) -> frozenset[str]:
        (keys,) = self._run(("SMEMBERS", self._pin_set))
        return frozenset(key.decode("latin-1") for key in keys)

    def versions(self) -> dict[str, Hashable]:
        (index,) = self._run(("HGETALL", self._index))
        return {key: version for name, version in index.items() if KEY.fullmatch(key := name.decode("latin-1"))}

    def heads(self, keys: list[str]) -> Iterator[BlobHead]:
        for start in range(0, len(keys), _HEADS):
            batch = keys[start : start + _HEADS]
            headers, *sizes = self._run(("HMGET", self._headers, *batch), *(("STRLEN", self._bodies + key) for key in batch))
            for key, header, size in zip(batch, headers, sizes, strict=True):
                if not header or not size:
                    self.delete(key)
                    continue
                try:
                    yield BlobHead(key, read_header(key, size, reader_of(header))[0], size)
                except ArtifactError as error:
                    self.discard(key, error)

    def state(self) -> Hashable:
        return self._run(("GET", self._state))[0]

    def clear(self) -> None:
        # Each answer comes within `timeout`, though not all of them: to free many large bodies takes long.
        self._request.waited = -math.inf
        self._run(("DEL", self._index, self._headers, self._state, self._pin_set))
        cursor: Any = None
        while cursor != 0:
            ((cursor, bodies),) = self._run(("SCAN", cursor or 0, "MATCH", f"{self._bodies}*", "COUNT", 1000))
            for body in bodies:
                self._run(("DEL", body))

    def close(self) -> None:
        self._client.close()

    @property
    def _waited(self) -> float:
        """The seconds that the request of this thread has waited; without a request there is no limit."""
        return getattr(self._request, "waited", -math.inf)

    def _run(self, *commands: tuple[Any, ...], transaction: bool = False) -> list[Any]:
        """Send commands in one round trip, and return their answers; any error of the client is a `StoreUnavailable`."""
        start, answers = time.monotonic(), list[Any]()
        if not commands:
            return answers
        if start < self._pause_until:
            raise StoreUnavailable(f"{self.place} could not be reached a moment ago.")
        if self._waited >= self._timeout:
            raise StoreUnavailable(f"{self.place} has kept this request waiting for {self._timeout:g} s.")
        try:
            with self._client.pipeline(transaction) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers = list(pipeline.execute())
            return answers
        except (self._redis.ConnectionError, self._redis.TimeoutError, OSError) as error:
            self._pause_until = time.monotonic() + _PAUSE
            raise StoreUnavailable(f"{self.place} can't be reached: {error}") from error
        except self._redis.RedisError as error:
            # The server answers, if only that it is full: the next command may succeed.
            raise StoreUnavailable(f"{self.place} refuses: {error}") from error
        finally:
            # The time in which bodies arrive on a slow network does not count: a hit of gigabytes may take longer than one answer.
            parts = (*answers, *itertools.chain(*commands)) if answers else ()
            transferred = sum(len(part) for part in parts if isinstance(part, bytes))
            self._request.waited = self._waited + max(0.0, time.monotonic() - start - transferred / _SLOWEST)
