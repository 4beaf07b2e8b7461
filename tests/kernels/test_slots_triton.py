"""The kernels of `slots_triton.py` run under Triton's interpreter (on a GPU where there is one), and compile ahead of time."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton")

from tests.kernels.triton_process import SHARED_MEMORY, STRIDES, assert_compiles, assert_passes, compile_all

pytestmark = pytest.mark.full


def test_every_kernel_equals_the_reference() -> None:
    assert_passes("slots_on_triton.py")


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_compiles_ahead_of_time_and_fits(capability: int) -> None:
    assert_compiles("test_slots_triton.py", capability)


def attend_variants():
    """Signatures of `attend_kernel`: strings are types, everything else is known when it is compiled."""
    for dtype, group, rich in (("fp32", 3, 2), ("bf16", 1, 1), ("bf16", 3, 0)):
        tensor = f"*{dtype}"
        mask = ("*u8", *STRIDES)
        yield {
            "query": tensor,
            "sinks": tensor if rich else None,
            **dict.fromkeys(("keys", "values"), (tensor, *STRIDES)),
            **dict.fromkeys(("parts", "stats"), "*fp32"),
            "raw": "*fp32" if rich else None,
            "tables": ("*i32", "i64") if rich == 1 else None,
            "valid": mask if rich else None,
            "rotation": ((("*i64", *STRIDES), ("*fp32", "*fp32"))) if rich == 2 else None,
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
            "BLOCK": 32 if rich == 2 else 64,
        }


def write_variants():
    for dtype, paged in (("fp32", False), ("bf16", True)):
        yield {
            **dict.fromkeys(("keys", "values", "new_keys", "new_values"), (f"*{dtype}", *STRIDES)),
            "tables": ("*i32", "i64") if paged else None,
            "slots": ("*i64", *STRIDES),
            "tokens": "i32",
            "KV_HEADS": 4,
            "DIM": 60,
            "DIM_PAD": 64,
            "VALUE_DIM": 64,
            "VALUE_PAD": 64,
            "PAGE": 16 if paged else 0,
            "BLOCK": 4,
        }


def wanted():
    """Every kernel in all its variants."""
    from hf_kvcaches.kernels import slots_triton as kernels

    variants = {
        kernels.attend_kernel: attend_variants(),
        kernels.write_kernel: write_variants(),
    }
    return ((kernel, chosen, {}) for kernel, some in variants.items() for chosen in some)


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), wanted())
