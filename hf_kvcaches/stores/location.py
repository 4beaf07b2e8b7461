"""Open the store of blobs at a location."""

from __future__ import annotations

import math
from pathlib import Path

from hf_kvcaches.errors import ConfigError, is_number
from hf_kvcaches.stores.blobs import BlobStore, MemoryBlobs
from hf_kvcaches.stores.blobs_disk import DiskBlobs
from hf_kvcaches.stores.blobs_redis import RedisBlobs

TIMEOUT = 1.0  # seconds: a server in the same building answers within milliseconds, and a hit saves a second or two


def open_blobs(location: str | BlobStore, timeout: float = TIMEOUT) -> BlobStore:
    """Open a store of blobs, or create it.

    Args:
        location: `memory` (of this object alone), `disk:FOLDER`, or `redis://host:port/db` or `rediss://...`, both with `?prefix=NAME` if
            several stores share a database; or a `BlobStore` that serves no other store.
        timeout: Seconds that one answer of Redis may take, and all calls of a request together.
    """
    if not is_number(timeout) or not 0 < timeout < math.inf:
        raise ConfigError.of("timeout", "a number of seconds above 0", timeout, f"{TIMEOUT:g} is the default.")
    if isinstance(location, BlobStore):
        if location.in_use:
            raise ConfigError.of("location", "a BlobStore that serves no other store", location.place, "Make another object of it.")
        location.in_use = True
        return location
    kind, _, rest = location.partition(":") if isinstance(location, str) else ("", "", "")
    if location == "memory":
        return MemoryBlobs()
    if kind == "disk" and rest:
        return DiskBlobs(Path(rest).expanduser())
    if kind in ("redis", "rediss"):
        return RedisBlobs(location, float(timeout))
    expected = "'memory', 'disk:FOLDER', 'redis://host:port/db' or an object of a BlobStore of your own"
    raise ConfigError.of("location", expected, f"{kind}:..." if "@" in rest else location, "For a folder write disk: before it.")
