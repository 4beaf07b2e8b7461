"""The signatures of a store's segments, one index a scope."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from hf_kvcaches.errors import require
from hf_kvcaches.segments.records import Record
from hf_kvcaches.stores.signatures import SignatureIndex

# The similarity from which segments are likely to be found to resemble each other.
NEAR = 0.5
# Seconds that a server of signatures may take.
_TIMEOUT = 2


class Similar:
    """Indices of signatures, opened when they are first asked: in Redis where the store is there, so that all processes share them.

    Args:
        location: Of the store.
    """

    def __init__(self, location: str) -> None:
        self._url: str | None = None
        self._prefix = "hf_kvcaches"
        self.errors: tuple[type[Exception], ...] = (OSError,)
        if location.startswith(("redis://", "rediss://")):
            self.errors = (OSError, require("redis", "distributed", "A store in Redis").RedisError)
            parts = urlsplit(location)
            options = dict(parse_qsl(parts.query))
            self._prefix = options.pop("prefix", self._prefix)
            options |= {"socket_timeout": str(_TIMEOUT), "socket_connect_timeout": str(_TIMEOUT)}
            self._url = urlunsplit(parts._replace(query=urlencode(options)))
        self._indices: dict[str, SignatureIndex] = {}

    def of(self, scope: str, records: Mapping[str, Record]) -> SignatureIndex:
        """The index of a scope.

        Args:
            scope: See `Record`.
            records: All that is known of the scope; what an index in this process starts with.
        """
        found = self._indices.get(scope)
        if found is None:
            found = self._open(scope)
            if self._url is None:
                for key, record in records.items():
                    if record.signature is not None:
                        found.add(key, record.signature)
        return found

    def add(self, key: str, record: Record) -> None:
        """Puts a segment that has become known into an index in this process, if that is open.

        Args:
            key: Its id.
            record: What is known of it.
        """
        if self._url is None and record.scope in self._indices and record.signature is not None:
            self._indices[record.scope].add(key, record.signature)

    def publish(self, key: str, record: Record) -> None:
        """Puts a segment that this process has written into the index that all processes share.

        Args:
            key: Its id.
            record: What is known of it.
        """
        if self._url is not None and record.signature is not None:
            self._open(record.scope).add(key, record.signature)

    def remove(self, scope: str, key: str) -> None:
        """Takes out a segment that is gone. In Redis a key that stays where this fails is ignored by all who find it.

        Args:
            scope: See `Record`.
            key: Its id.
        """
        if scope in self._indices:
            try:
                self._indices[scope].remove(key)
            except self.errors:
                return

    def _open(self, scope: str) -> SignatureIndex:
        if scope not in self._indices:
            self._indices[scope] = SignatureIndex(NEAR, redis_url=self._url, name=f"{self._prefix}:similar:{scope}")
        return self._indices[scope]
