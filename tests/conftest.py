"""What all tests share."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

# How many examples a property is tried on, by tier: pytest's --hypothesis-profile names one. Where nobody is there to look at a rare
# example, a run is to say of a change what the run before said. Elsewhere examples are drawn anew.
for name, examples in (("fast", 20), ("full", 200)):
    settings.register_profile(name, max_examples=examples, deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("fast")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, spread the families over all processes: they are the longest file, and share nothing."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadFileOrFamily(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith("tests/families/") else super()._split_scope(nodeid)

    return LoadFileOrFamily(config, log)
