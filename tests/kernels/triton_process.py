"""What the tests of all Triton kernels share: processes of their own, where tensors go, and compiling for GPUs that are not there."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Tests of several back-ends run once more in a process of their own, where this says so.
BACKEND = os.environ.get("KERNEL_BACKEND", "torch")
IN_TRITON = BACKEND == "triton"
DEVICE = "cuda" if IN_TRITON and torch.cuda.is_available() else "cpu"
HALF_TYPES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALF_TYPES] if IN_TRITON else [torch.float32, *HALF_TYPES, torch.float64]
of_triton = pytest.mark.skipif(not IN_TRITON, reason="of the Triton back-end alone")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def run(*arguments: str, interpret: bool, **variables: str) -> str:
    """Runs Python in a process of its own: whether kernels are interpreted is settled when Triton is imported."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"} | variables
    env |= {"PYTHONPATH": str(ROOT), **({"TRITON_INTERPRET": "1"} if interpret else {})}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_passes(tests: str) -> None:
    """All tests of a file in this folder pass: under Triton's interpreter, or on a GPU where there is one."""
    said = run(
        "-m", "pytest", "-p", "no:cacheprovider", str(HERE / tests), interpret=not torch.cuda.is_available(), KERNEL_BACKEND="triton"
    )
    assert " passed" in said
    assert "skipped" not in said


def moved(value: Any) -> Any:
    """All tensors within a value, on the device that kernels run on."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, tuple):
        parts = [moved(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return {name: moved(part) for name, part in value.items()}
    return value
