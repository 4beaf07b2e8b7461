"""The kernel of `splice_triton.py` runs under Triton's interpreter (on a GPU where there is one), and compiles ahead of time."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton")

from tests.kernels.triton_process import SHARED_MEMORY, STRIDES, assert_compiles, assert_passes, compile_all

pytestmark = pytest.mark.full


def test_the_kernel_writes_what_the_slow_way_writes() -> None:
    assert_passes("splice_on_triton.py")


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_the_kernel_compiles_ahead_of_time_and_fits(capability: int) -> None:
    assert_compiles("test_splice_triton.py", capability)


def variants():
    """Signatures of `splice_kernel`: strings are types, everything else is known when it is compiled."""
    stored = {8: ("i8", "bf16", "fp16"), 4: ("u8", "fp32", "fp32"), 0: ("bf16", None, None)}
    for bits, dtype, turned in (
        (8, "bf16", True),
        (8, "fp16", False),
        (4, "fp32", True),
        (4, "bf16", False),
        (0, "bf16", False),
        (0, "fp32", True),
    ):
        data, scale, zero = ((f"*{kind}", *STRIDES) if kind else None for kind in stored[bits])
        yield {
            "data": data,
            "scale": scale,
            "zero": zero,
            "out": (f"*{dtype}", *STRIDES),
            "slots": ("*i64", "i64"),
            "tables": ("*fp64", "*fp64") if bits == 4 and turned else ("*fp32", "*fp32") if turned else None,
            "layer": "i32",
            "tokens": "i32",
            "capacity": "i32",
            "DIM": 120,
            "PAIRS": 64,
            "BITS": bits,
            "GROUP": 120 if bits == 8 else 32,
            "HALF": 30 if turned else 0,
            "INTERLEAVED": bits == 4,
            "ALIGNED": 1 if bits == 4 else 2,
            "BLOCK": 8,
        }


def wanted():
    """The kernel in all its variants."""
    from hf_kvcaches.kernels import splice_triton as kernels

    return ((kernels.splice_kernel, chosen, {}) for chosen in variants())


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), wanted())
