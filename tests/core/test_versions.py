"""Which versions of transformers are supported, and what is said where a newer one is installed."""

import re
import subprocess
import sys

import pytest

from hf_kvcaches import version as versions
from tests.scripts.running import ROOT


def test_the_newest_tested_version_is_that_of_the_constraints():
    assert f"\ntransformers=={versions.NEWEST_TESTED}\n" in (ROOT / "constraints.txt").read_text()


def test_the_oldest_tested_version_is_the_floor_of_the_package_and_of_make():
    assert f'"transformers>={versions.OLDEST_TESTED.removesuffix(".0")},<6"' in (ROOT / "pyproject.toml").read_text()
    assert f"FLOOR_TRANSFORMERS := {versions.OLDEST_TESTED}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(("version", "warnings"), [(versions.NEWEST_TESTED, 0), ("6.0.0", 1)])
def test_a_newer_transformers_is_warned_of_once_a_process(version, warnings):
    program = f"""
import transformers
transformers.__version__ = {version!r}
from hf_kvcaches import GrowingCache
from transformers import LlamaConfig
for _ in range(3):
    GrowingCache(LlamaConfig(num_hidden_layers=1))
"""
    command = [sys.executable, "-W", "always::UserWarning", "-c", program]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    assert len(re.findall(r"tested with transformers .* is newer\. .*verify.*pip install", told)) == warnings
