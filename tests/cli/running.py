"""Runs the command in this process."""

import json
from typing import Any, NamedTuple

import pytest

from hf_kvcaches.cli import main
from tests.scripts.running import unchanged_process
from tests.testbed import FOLDER

BASE = FOLDER / "base"


class Done(NamedTuple):
    """What came of it."""

    code: Any
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document that was printed."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def run(capsys: pytest.CaptureFixture[str], *options: Any) -> Done:
    """Runs `hf-kvcaches` with options."""
    capsys.readouterr()
    with unchanged_process():
        try:
            code: Any = main([str(option) for option in options])
        except SystemExit as end:
            code = end.code
    return Done(code, *capsys.readouterr())


def succeed(capsys: pytest.CaptureFixture[str], *options: Any) -> Done:
    """Runs it, and it ends with 0."""
    done = run(capsys, *options)
    assert done.code == 0, done.err
    return done
