"""The kernel of `rebuild_triton.py` runs under Triton's interpreter (on a GPU where there is one), and compiles ahead of time."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton")

from tests.kernels.triton_process import SHARED_MEMORY, STRIDES, assert_compiles, assert_passes, compile_all

pytestmark = pytest.mark.full


def test_the_kernel_writes_what_the_slow_way_writes() -> None:
    assert_passes("rebuild_on_triton.py")


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_the_kernel_compiles_ahead_of_time_and_fits(capability: int) -> None:
    assert_compiles("test_rebuild_triton.py", capability)


def variants():
    """Signatures of `rebuild_kernel`: strings are types, everything else is known when it is compiled."""
    flat = ("i64", "i64")
    for dtype, given, turned, pairs in (
        ("bf16", "bf16", True, 64),
        ("fp32", "fp32", True, 256),
        ("fp16", "fp32", False, 32),
        ("bf16", "fp32", True, 16),
        ("fp16", "fp16", True, 128),
        ("bf16", None, False, 64),
    ):
        weights = (f"*{given or 'bf16'}", *flat)
        yield {
            "side": (f"*{given}", *flat) if given else None,
            "side_weights": weights if given else None,
            "codes": ("*bf16", *flat),
            "code_weights": weights,
            "bias": (weights[0], "i64") if turned else None,
            "key_out": (f"*{dtype}", *STRIDES),
            "value_out": (f"*{dtype}", *STRIDES),
            "slots": ("*i64", "*i64"),
            "tables": ("*fp32", "*fp32") if turned else None,
            "tokens": "i32",
            "width": "i32",
            "rank": "i32",
            "KV_HEADS": 3,
            "KEY_DIM": 2 * pairs - 8,
            "VALUE_DIM": pairs,
            "PAIRS": pairs,
            "HALF": pairs - 10 if turned else 0,
            "INTERLEAVED": pairs < 64,
            "ALIGNED": 2 if pairs > 64 else 1,
            "BLOCK": max(16, min(64, 4096 // pairs)),
            "INNER": 32,
        }


def wanted():
    """The kernel in all its variants."""
    from hf_kvcaches.kernels import rebuild_triton as kernels

    return ((kernels.rebuild_kernel, chosen, {}) for chosen in variants())


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), wanted())
