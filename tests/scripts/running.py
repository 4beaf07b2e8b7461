"""Runs a script as a user does, and reads what it wrote."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_script(name: str, *options: Any, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, on one core.

    Args:
        name: Without folder and ending.
        *options: Of its command line.
        before: What Python is given first, such as a launcher.
    """
    return subprocess.run(
        [sys.executable, *before, str(ROOT / "scripts" / f"{name}.py"), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def quick_bench(name: str, folder: Path, file: str, *options: Any) -> subprocess.CompletedProcess[str]:
    """A benchmark in its smallest size, with its table and its picture.

    Args:
        name: Of the script.
        folder: Where these go.
        file: Their name, without ending.
        *options: More of its command line.
    """
    files = ("--csv", folder / f"{file}.csv", "--plot", folder / f"{file}.png")
    return run_script(name, "--device", "cpu", "--threads", "1", "--quick", *options, *files)


def rows_of(path: Path) -> list[dict[str, str]]:
    """A CSV file's.

    Args:
        path: Of the file.
    """
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
