"""Fixtures of the stores' tests: real Redis servers, and a place for blobs of each kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.blob_helpers import Proxy, Server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Redis server for all tests that leave it running."""
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Redis server of the test's own, to be stopped or filled."""
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A door to the test's own server that may stop answering."""
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def redis_location(shared_server: Server) -> str:
    """An empty place in the shared server."""
    return f"{shared_server.location}?prefix=test{next(_numbers)}"


@pytest.fixture(params=["memory", "disk", "redis"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    if request.param == "redis":
        return str(request.getfixturevalue("redis_location"))
    return f"disk:{tmp_path / 'blobs'}" if request.param == "disk" else "memory"
