"""Redis servers, and a place for blobs of each kind."""

from tests.helpers.stores import location, proxy, redis_location, server, shared, shared_server

__all__ = ["location", "proxy", "redis_location", "server", "shared", "shared_server"]
