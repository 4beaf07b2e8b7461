"""The kernel of `rans_triton.py` runs under Triton's interpreter (on a GPU where there is one), and compiles ahead of time."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton")

from tests.kernels.triton_process import SHARED_MEMORY, assert_compiles, assert_passes, compile_all

pytestmark = pytest.mark.full


def test_the_kernel_decodes_what_operations_decode() -> None:
    assert_passes("rans_on_triton.py")


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_the_kernel_compiles_ahead_of_time_and_fits(capability: int) -> None:
    assert_compiles("test_rans_triton.py", capability)


def wanted():
    """The kernel: strings are types, all else is known when it is compiled."""
    from hf_kvcaches.kernels import rans_triton as kernels

    pointers = {
        "*i32": ("lanes", "states", "counts", "symbols", "slots"),
        "*i16": ("words", "escaped"),
        "*i64": ("ends", "places"),
        "*fp32": ("values", "digits"),
        "*i8": ("valid",),
    }
    chosen = {name: kind for kind, names in pointers.items() for name in names} | {"tables": "i32"}
    return [(kernels.rans_kernel, chosen | {"LANES": 32, "PRECISION": 12, "LOWEST": 1 << 15, "LEVELS": 16}, {"num_warps": 1})]


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), wanted())
