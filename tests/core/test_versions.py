"""Which versions of transformers are supported, and what is said where a newer one is installed."""

from __future__ import annotations

import re
import warnings

import pytest
import transformers

from hf_kvcaches import GrowingCache, compat
from tests import tiny
from tests.scripts.running import ROOT


def test_the_newest_tested_version_is_that_of_the_constraints():
    assert f"\ntransformers=={compat.NEWEST_TESTED}\n" in (ROOT / "constraints.txt").read_text()


def test_the_oldest_tested_version_is_the_floor_of_the_package_and_of_make():
    assert f'"transformers>={compat.OLDEST_TESTED.removesuffix(".0")},<6"' in (ROOT / "pyproject.toml").read_text()
    assert f"FLOOR_TRANSFORMERS := {compat.OLDEST_TESTED}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(("version", "warnings_given"), [("5.17.0", 0), (compat.NEWEST_TESTED, 0), ("5.24.1", 1), ("6.0.0", 1)])
def test_a_newer_transformers_is_warned_of_once(version, warnings_given, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    compat.warn_of_untested_version.cache_clear()
    model = tiny.llama()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            GrowingCache(model)
    compat.warn_of_untested_version.cache_clear()
    messages = [str(warning.message) for warning in caught if "tested with transformers" in str(warning.message)]
    assert len(messages) == warnings_given
    assert all(re.search(rf"{re.escape(version)} is newer.*verify.*pip install", message) for message in messages)
