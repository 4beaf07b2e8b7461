"""The kernel of `codes_triton.py` runs under Triton's interpreter (on a GPU where there is one), and compiles ahead of time."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.triton_process import SHARED_MEMORY, STRIDES, assert_compiles, assert_passes, compile_all

pytestmark = pytest.mark.full


def test_the_kernel_equals_the_reference() -> None:
    assert_passes("codes_on_triton.py")


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_the_kernel_compiles_ahead_of_time_and_fits(capability: int) -> None:
    assert_compiles("test_codes_triton.py", capability)


def code_variants():
    """Signatures of the kernels, for a model of 8B: strings are types, everything else is known when it is compiled."""
    import triton.language as tl

    from hf_kvcaches.kernels.codes_triton import score_kernel, sizes, value_kernel

    types = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    numbers = ("rows", "tokens", "chunk", "dim", "count", "of_8", "of_4", "of_2")
    for dtype, queries, dim, pairs, rich in (
        ("bf16", 1, 128, 64, False),
        ("bf16", 3, 128, 64, True),
        ("bf16", 5, 128, 0, True),
        ("bf16", 1, 128, 32, False),
        ("bf16", 3, 256, 96, False),  # as large as keys may be
        ("fp16", 1, 128, 64, True),
        ("fp32", 1, 128, 64, True),
        ("fp32", 3, 128, 32, True),
        ("fp32", 1, 128, 0, False),
        ("fp32", 3, 256, 96, True),
        ("fp32", 3, 256, 0, True),
    ):
        for_scores, for_values = sizes(4 * queries, dim, pairs, dtype == "fp32")
        given = {"codes": ("*u8", *STRIDES), "scores": "*fp32", **dict.fromkeys(numbers, "i32")}
        given |= {"KV_HEADS": 8, "HEADS": 2, "ALL": 4 * queries}
        tables = dict.fromkeys(("cos", "sin"), ("*fp32", *STRIDES) if pairs else None)
        yield score_kernel, {"query": f"*{dtype}", "keys": "*fp32", **tables, "INTERLEAVED": rich, **given, **for_scores}
        options: dict[str, Any] = {"visible": ("*u8", *STRIDES) if rich else None, "softcap": "fp32" if rich else None, "scaling": "fp32"}
        options |= {"COUNT": queries, "DTYPE": types[dtype]}
        yield value_kernel, {**dict.fromkeys(("parts", "stats"), "*fp32"), **options, **given, **for_values}


def combine_variants():
    for lse, group in (("*fp64", 4), ("*fp32", 12)):
        tensors = {**dict.fromkeys(("parts", "stats", "output"), "*fp32"), "lse": lse, "splits": "i32", "width": "i32"}
        yield {**tensors, "GROUP": group, "HEADS": 16, "DIMS": 64}


def wanted():
    """Every kernel in all its variants."""
    from hf_kvcaches.kernels.common_triton import combine_kernel

    for kernel, chosen in code_variants():
        yield kernel, chosen, {"num_warps": 8}
    for chosen in combine_variants():
        yield combine_kernel, chosen, {}


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), wanted())
