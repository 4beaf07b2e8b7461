"""Fixtures of the tests of warm starts: places for a store."""

from __future__ import annotations

import pytest

from hf_kvcaches.warmstart import cache
from tests.helpers.stores import location, proxy, redis_location, server, shared_server

__all__ = ["location", "proxy", "redis_location", "server", "shared_server"]


@pytest.fixture(autouse=True)
def few_tokens_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most prompts here are short."""
    monkeypatch.setattr(cache, "WORTH", 2)
    monkeypatch.setattr(cache, "SHARE", 10**6)
