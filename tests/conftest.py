"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from hf_kvcaches.cli.arguments import REAL_MODELS

# How many examples a property is tried on, by tier: pytest's --hypothesis-profile names one. Where nobody is there to look at a rare
# example, a run is to say of a change what the run before said. Elsewhere examples are drawn anew.
for name, examples in (("fast", 20), ("full", 200)):
    settings.register_profile(name, max_examples=examples, deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("fast")


REAL = Path(__file__).parent / "real"


@pytest.fixture(autouse=True)
def _gradients_as_before() -> Iterator[None]:
    """A test that left gradients switched off would change what the tests after it see."""
    enabled = torch.is_grad_enabled()
    yield
    left, _ = torch.is_grad_enabled(), torch.set_grad_enabled(enabled)
    assert left == enabled, "gradients are left switched on or off"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests of real models, which have to be made first, to those who name their folder."""
    named = (Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args)
    return True if collection_path == REAL and not any(path == REAL or REAL in path.parents for path in named) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, spread the families over all processes, which share nothing, and keep apart what needs another real model."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadFileOrFamily(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/real/"):
                model = next((name for name in REAL_MODELS if name in nodeid), "")
                return f"{super()._split_scope(nodeid)} {model}"
            return nodeid if nodeid.startswith("tests/families/") else super()._split_scope(nodeid)

    return LoadFileOrFamily(config, log)
