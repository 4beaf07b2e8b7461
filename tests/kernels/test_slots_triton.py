"""The kernels of `_slots_triton.py` run under Triton's interpreter (on a GPU where there is one), and compile ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent.parent
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
STRIDES = ("i64", "i64", "i64")


def run(*arguments: str, interpret: bool) -> str:
    """Runs Python in a process of its own: whether kernels are interpreted is settled when Triton is imported."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(ROOT), **({"TRITON_INTERPRET": "1"} if interpret else {})}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_kernel_equals_the_reference() -> None:
    said = run("-m", "pytest", "-p", "no:cacheprovider", str(HERE.parent / "slots_on_triton.py"), interpret=not torch.cuda.is_available())
    assert " passed" in said
    assert "skipped" not in said


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_compiles_ahead_of_time_and_fits(capability: int) -> None:
    assert run(str(HERE), str(capability), interpret=False).split()[-1] == "compiled"


def attend_variants():
    """Signatures of `attend_kernel`: strings are types, everything else is known when it is compiled."""
    for dtype, group, rich in (("fp32", 3, 2), ("bf16", 1, 1), ("bf16", 3, 0)):
        tensor = f"*{dtype}"
        mask = ("*u8", *STRIDES)
        yield {
            **dict.fromkeys(("query", "far_query", "output"), tensor),
            **dict.fromkeys(("keys", "values"), (tensor, *STRIDES)),
            **dict.fromkeys(("parts", "stats"), "*fp32" if rich == 2 else None),
            **dict.fromkeys(("raw", "weights"), "*fp32" if rich else None),
            "tables": ("*i32", "i64") if rich == 1 else None,
            "valid": mask if rich else None,
            "far": (None, ("i32",), mask)[rich],
            "turn": ((("*i64", *STRIDES), ("*fp32", "*fp32"))) if rich == 2 else None,
            "scaling": "fp32",
            "softcap": "fp32" if rich == 2 else None,
            "slots": "i32",
            "chunk": "i32",
            "KV_HEADS": 4,
            "GROUP": group,
            "HEADS": 1 if group == 1 else 16,
            "DIM": 60,
            "DIM_PAD": 64,
            "VALUE_DIM": 128,
            "VALUE_PAD": 128,
            "HALF": 20 if rich == 2 else 0,
            "INTERLEAVED": rich == 2,
            "PAGE": 16 if rich == 1 else 0,
            "SPLITS": 4 if rich == 2 else 1,
            "BLOCK": 32 if rich == 2 else 64,
        }


def combine_variants():
    tensors = {"parts": "*fp32", "stats": "*fp32", "output": "*bf16", "slots": "i32"}
    for scratch in ("*fp32", None):
        yield {
            **tensors,
            "raw": scratch,
            "weights": scratch,
            "GROUP": 3,
            "HEADS": 16,
            "VALUE_DIM": 60,
            "VALUE_PAD": 64,
            "SPLITS": 4,
            "BLOCK": 64,
        }


def write_variants():
    for dtype, paged, turned in (("fp32", False, True), ("bf16", True, False)):
        yield {
            **dict.fromkeys(("keys", "values", "new_keys", "new_values"), (f"*{dtype}", *STRIDES)),
            "tables": ("*i32", "i64") if paged else None,
            "slots": ("*i64", *STRIDES),
            "turn": (STRIDES, ("*fp32", "*fp32")) if turned else None,
            "tokens": "i32",
            "KV_HEADS": 4,
            "DIM": 60,
            "DIM_PAD": 64,
            "VALUE_DIM": 64,
            "VALUE_PAD": 64,
            "HALF": 30 if turned else 0,
            "INTERLEAVED": False,
            "PAGE": 16 if paged else 0,
            "BLOCK": 4,
        }


def compile_all(capability: int) -> None:
    """Compiles every kernel in all its variants for a GPU that needs not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_kvcaches.kernels import _slots_triton as kernels

    variants = {
        kernels.attend_kernel: attend_variants(),
        kernels.combine_kernel: combine_variants(),
        kernels.write_kernel: write_variants(),
    }
    for kernel, wanted in variants.items():
        for chosen in wanted:
            types = {name: chosen[name] if isinstance(chosen[name], str | tuple) else "constexpr" for name in kernel.arg_names}
            known = {(i,): chosen[name] for i, name in enumerate(kernel.arg_names) if types[name] == "constexpr"}
            target = GPUTarget("cuda", capability, 32)
            done = triton.compile(ASTSource(kernel, types, known), target=target, options={"num_stages": 2})
            assert done.asm["cubin"]
            assert done.metadata.shared <= SHARED_MEMORY[capability], (kernel, chosen, done.metadata.shared)
    print("compiled")


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
