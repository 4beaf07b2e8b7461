"""Runs a script as a user does, and reads what it wrote."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]


def import_script(name: str) -> Any:
    """A module of the scripts, for tests of what is in it.

    Args:
        name: Without folder and ending.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return importlib.import_module(name)


def run_script(name: str, *options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script as `__main__` of this process, which has imported already what takes seconds to import.

    Args:
        name: Without folder and ending.
        *options: Of its command line.
    """
    path = ROOT / "scripts" / f"{name}.py"
    command = [str(path), *map(str, options)]
    out, err = io.StringIO(), io.StringIO()
    with unchanged_process(), pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", command)
        patch.syspath_prepend(path.parent)
        try:
            runpy.run_path(str(path), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            err.write("" if end.code is None or isinstance(end.code, int) else f"{end.code}\n")
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore what scripts set for their whole process."""
    threads, verbosity, progress = torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)
        if progress:
            logging.enable_progress_bar()


def rows_of(path: Path) -> list[dict[str, str]]:
    """A CSV file's.

    Args:
        path: Of the file.
    """
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
