"""Runs the command in this process."""

from typing import Any, NamedTuple

import pytest

from hf_kvcaches.cli import main
from tests.scripts.running import unchanged_process
from tests.testbed import FOLDER

BASE = FOLDER / "base"


class Done(NamedTuple):
    """What came of it."""

    code: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *options: Any) -> Done:
    """Runs `hf-kvcaches` with options."""
    capsys.readouterr()
    with unchanged_process():
        code = main([str(option) for option in options])
    return Done(code, *capsys.readouterr())
