"""A place for blobs of each kind."""

from pathlib import Path

import pytest

from tests.helpers.stores import proxy, redis_location, server, shared_server

__all__ = ["proxy", "redis_location", "server", "shared_server"]


@pytest.fixture(params=["memory", "disk", "redis"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    if request.param == "redis":
        return str(request.getfixturevalue("redis_location"))
    return f"disk:{tmp_path / 'blobs'}" if request.param == "disk" else "memory"
