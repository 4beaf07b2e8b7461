"""The folder in which a reader tries the documents."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.documents.reader import furnish
from tests.helpers.stores import redis_location, shared_server

__all__ = ["redis_location", "shared_server"]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder but for what the documents name."""
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    gradients = torch.is_grad_enabled()
    yield tmp_path
    torch.set_grad_enabled(gradients)


@pytest.fixture
def redis_url(redis_location: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real server, as a reader's environment names it."""
    monkeypatch.setenv("REDIS_URL", redis_location)
    return redis_location
