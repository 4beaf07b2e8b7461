"""Imports and runs the examples as their reader does."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BASE = ROOT / "tests" / "testbed" / "base"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def import_example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names of their annotations
    spec.loader.exec_module(module)
    return module


def start_example(name: str, *options: Any, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process that runs an example."""
    command = [sys.executable, *before, str(EXAMPLES / f"{name}.py"), *map(str, options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT)


def output_of(process: subprocess.Popen[str]) -> str:
    """What a process printed, once it ended well."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out
