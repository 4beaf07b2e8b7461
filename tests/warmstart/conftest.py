"""Fixtures of the tests of warm starts: places for a store."""

from __future__ import annotations

from tests.stores.conftest import location, redis_location, server, shared_server

__all__ = ["location", "redis_location", "server", "shared_server"]
