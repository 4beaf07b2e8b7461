"""Fixtures of the tests of segments: a small model, and places for a store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.stores import location, proxy, redis_location, server, shared_server
from tests.segments.store_helpers import ask, opened, prompt, small

__all__ = ["location", "proxy", "redis_location", "server", "shared_server"]


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return small()


@pytest.fixture(scope="session")
def pristine(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the segments of prompt 0."""
    folder = tmp_path_factory.mktemp("pristine")
    with opened(folder) as store:
        ask(model, prompt(0), store)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "segments"))


@pytest.fixture(params=["disk", "redis"])
def shared_location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind that processes can share."""
    if request.param == "redis":
        return str(request.getfixturevalue("redis_location"))
    return f"disk:{tmp_path / 'segments'}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes in the caller's thread, as where several threads have models of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
