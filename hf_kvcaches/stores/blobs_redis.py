"""Blobs in a Redis server.

Its keys are `PREFIX:body:KEY`, the bytes of a blob; the hashes `PREFIX:index` of versions and `PREFIX:headers` of the bytes before the
tensors, to list heads; `PREFIX:state`, a random string that each put replaces and each deletion deletes; and the set `PREFIX:pins`.
"""

from __future__ import annotations

import contextlib
import io
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
from hf_kvcaches.stores.blobs import BlobHead, BlobStore, Loaded, NewBlob, StoreUnavailable
from hf_kvcaches.stores.blobs_format import DIGEST, KEY, checked_key, decode, encode, read_header

_PAUSE = 5.0  # seconds after a failure for which no command is sent
_HEADS = 200  # heads per round trip
_ANSWER, _CHUNK = 2**23, 2**20  # bytes per round trip and per answer: a whole blob as one answer takes three times as long
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
        self._sizes: dict[str, int] = {}  # bytes of blobs, as far as heads told
        # Per thread, the seconds that its request has waited. Without a request there is no limit.
        self._request, self._timeout, self._pause_until = threading.local(), timeout, 0.0

    def begin(self) -> None:
        self._request.waited = 0.0

    def put(self, key: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        return self._put([NewBlob(key, head, tensors)])[0]

    def put_many(self, blobs: Sequence[NewBlob]) -> None:
        self._put(blobs)

    def _put(self, blobs: Sequence[NewBlob]) -> list[int]:
        """Store blobs, after one round trip to see which are there; return the bytes of each."""
        looks = [
            command
            for key, _, _ in blobs
            for command in (
                ("HEXISTS", self._index, checked_key(key)),
                ("HEXISTS", self._headers, key),
                ("STRLEN", self._bodies + key),
            )
        ]
        answers = self._run(*looks)
        sizes = []
        for number, (key, head, tensors) in enumerate(blobs):
            found = answers[3 * number : 3 * number + 3]
            # A server short of memory may have evicted any of them.
            self._sizes[key] = int(found[2]) if all(found) else self._write(key, encode(key, head, tensors))
            sizes.append(self._sizes[key])
        return sizes

    def _write(self, key: str, pieces: list[bytes | memoryview]) -> int:
        content, header = b"".join(pieces), bytes(pieces[0])
        writes = ("SET", self._bodies + key, content), ("HSET", self._headers, key, header), ("HSET", self._index, key, header[:DIGEST])
        self._run(*writes, ("SET", self._state, secrets.token_hex(8)), transaction=True, body=len(content))
        return len(content)

    def read(self, key: str) -> dict[str, Tensor] | None:
        blobs, error = self.get_many([key])
        if error is not None:
            raise error
        return blobs.get(key)

    def get_many(self, keys: Sequence[str]) -> Loaded:
        blobs: dict[str, dict[str, Tensor]] = {}
        try:
            sizes = {key: self._sizes.get(checked_key(key), -1) for key in keys}
            unknown = [key for key, size in sizes.items() if size < 0]
            sizes |= zip(unknown, self._run(*(("STRLEN", self._bodies + key) for key in unknown)) if unknown else (), strict=True)
            stale: dict[str, int] = {}
            for group in _groups(sizes):
                stale |= self._read(group, blobs)
            for group in _groups(stale):
                self._read(group, blobs)
        except StoreUnavailable as error:
            return Loaded(blobs, error)
        return Loaded(blobs)

    def _read(self, group_sizes: Mapping[str, int], blobs: dict[str, dict[str, Tensor]]) -> dict[str, int]:
        """Read blobs of so many bytes in one round trip, or a large one in several, into `blobs`; return the sizes of those with others."""
        keys, sizes = list(group_sizes), list(group_sizes.values())
        contents = [np.empty(size, np.uint8).data for size in sizes]
        ranges = [(number, start) for number, size in enumerate(sizes) for start in range(0, max(size, 1), _CHUNK)]
        whole = [True] * len(keys)
        # Behind the chunks, what tells whether another blob took the place of this one meanwhile.
        last = [
            command
            for key in keys
            for command in (
                ("GETRANGE", self._bodies + key, 0, DIGEST - 1),
                ("STRLEN", self._bodies + key),
                ("EXISTS", self._bodies + key),
                ("HEXISTS", self._index, key),
            )
        ]
        state: list[Any] = []
        stale: dict[str, int] = {}
        # Several blobs fit into one answer.
        most = len(ranges) if len(keys) > 1 else _ANSWER // _CHUNK
        for first in range(0, len(ranges), most):
            group = ranges[first : first + most]
            ends = last if first + len(group) == len(ranges) else []
            chunks = (("GETRANGE", self._bodies + keys[number], start, start + _CHUNK - 1) for number, start in group)
            answers = self._run(*chunks, *ends, body=sum(min(_CHUNK, sizes[number] - start) for number, start in group))
            for (number, start), chunk in zip(group, answers, strict=False):
                fits = len(chunk) == min(_CHUNK, sizes[number] - start)
                whole[number] &= fits
                if fits:
                    contents[number][start : start + len(chunk)] = chunk
            state = answers[len(group) :]
        for number, (key, content) in enumerate(zip(keys, contents, strict=True)):
            digest, size, exists, listed = state[4 * number : 4 * number + 4]
            if not exists and listed:
                self.delete(key)
            if not exists or size != len(content) or not whole[number] or bytes(content[:DIGEST]) != digest:
                self._sizes.pop(key, None)  # missing, or deleted and put again since
                stale |= {key: size} if exists and size != len(content) else {}
                continue
            try:
                blobs[key] = decode(key, content, verify=self._verified.get(key) != digest)
                self._verified[key], self._sizes[key] = digest, size
            except ArtifactError as error:
                self.discard(key, error)
        return stale

    def delete(self, key: str) -> bool:
        # No transaction: a full server refuses transactions, and deletions free its memory.
        self._sizes.pop(key, None)
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
            # The index is read before and behind: where a blob is replaced meanwhile, header and body are not of one blob.
            index = ("HMGET", self._index, *batch)
            lengths = (("STRLEN", self._bodies + key) for key in batch)
            before, headers, *sizes, after = self._run(index, ("HMGET", self._headers, *batch), *lengths, index)
            for key, header, size, *versions in zip(batch, headers, sizes, before, after, strict=True):
                if versions[0] != versions[1]:
                    continue
                if not header or not size:
                    self.delete(key)
                    continue
                try:
                    yield BlobHead(key, read_header(key, size, io.BytesIO(header).read).head, size)
                    self._sizes[key] = size
                except ArtifactError as error:
                    self.discard(key, error)

    def state(self) -> Hashable:
        return self._run(("GET", self._state))[0]

    def clear(self) -> None:
        with self._request_budget():
            self._client.delete(self._index, self._headers, self._state, self._pin_set)
            for body in self._client.scan_iter(f"{self._bodies}*", count=1000):
                self._client.delete(body)

    def close(self) -> None:
        self._client.close()

    def _run(self, *commands: tuple[Any, ...], transaction: bool = False, body: int = 0) -> list[Any]:
        """Send commands in one round trip, and return their answers.

        Args:
            body: Bytes of blobs that are sent or received.
        """
        with self._request_budget(body), self._client.pipeline(transaction) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute())

    @contextlib.contextmanager
    def _request_budget(self, body: int = 0) -> Iterator[None]:
        """Count the time towards that of the request, and raise errors of the client as `StoreUnavailable`.

        The time in which `body` bytes arrive on a slow network does not count: a hit of gigabytes may take longer than one answer.
        """
        start, waited = time.monotonic(), getattr(self._request, "waited", -math.inf)
        if start < self._pause_until:
            raise StoreUnavailable(f"{self.place} could not be reached a moment ago.")
        if waited >= self._timeout:
            raise StoreUnavailable(f"{self.place} has kept this request waiting for {self._timeout:g} s.")
        try:
            yield
        except (self._redis.ConnectionError, self._redis.TimeoutError, OSError) as error:
            self._pause_until = time.monotonic() + _PAUSE
            raise StoreUnavailable(f"{self.place} can't be reached: {error}") from error
        except self._redis.RedisError as error:
            # The server answers, if only that it is full: the next command may succeed.
            raise StoreUnavailable(f"{self.place} refuses: {error}") from error
        finally:
            self._request.waited = waited + max(0.0, time.monotonic() - start - body / _SLOWEST)


def _groups(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Group blobs, by their bytes, that are read in one round trip; a large one is alone."""
    group: dict[str, int] = {}
    for key, size in sizes.items():
        if group and sum(group.values()) + size > _ANSWER:
            yield group
            group = {}
        group[key] = size
    if group:
        yield group
