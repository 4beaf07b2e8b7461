"""The kernels of `_coefficients_triton.py` run under Triton's interpreter (on a GPU where there is one), and compile ahead of time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.test_slots_triton import SHARED_MEMORY, STRIDES, run

HERE = Path(__file__).resolve()


def test_every_kernel_equals_the_reference() -> None:
    tests = str(HERE.parent / "coefficients_on_triton.py")
    said = run("-m", "pytest", "-p", "no:cacheprovider", tests, interpret=not torch.cuda.is_available())
    assert " passed" in said
    assert "skipped" not in said


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_compiles_ahead_of_time_and_fits(capability: int) -> None:
    assert run(str(HERE), str(capability), interpret=False).split()[-1] == "compiled"


def padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def attend_variants():
    """Signatures of `attend_kernel`: strings are types, everything else is known when it is compiled."""
    from hf_kvcaches.kernels._coefficients_triton import block_size

    #   query,  kept,   dim, rank, value rank, pairs, bank, positions, rich
    for dtype, kept, dim, rank, value_rank, pairs, bank, where, rich in (
        ("bf16", "i8", 128, 32, 32, 64, False, "start", False),
        ("bf16", "i8", 128, 32, 48, 0, False, "", False),
        ("bf16", "bf16", 256, 128, 128, 64, False, "starts", True),
        ("fp32", "fp32", 256, 64, 256, 64, False, "positions", True),  # as large as a turned basis may be
        ("fp32", "fp32", 256, 256, 256, 0, False, "", True),
        ("fp32", "i8", 256, 64, 128, 64, True, "start", True),  # as large as bases in a bank may be
        ("fp16", "i8", 128, 32, 32, 0, True, "", True),
    ):
        yield {
            "query": f"*{dtype}",
            "asked": (f"*{dtype}", *STRIDES) if 2 * pairs < dim else None,
            **dict.fromkeys(("keys", "values"), (f"*{kept}", *STRIDES)),
            **dict.fromkeys(("key_scales", "value_scales"), ("*fp32", *STRIDES) if kept == "i8" else None),
            **dict.fromkeys(("key_basis_of", "value_basis_of"), ("*i16", *STRIDES) if bank else None),
            "valid": ("*u8", *STRIDES) if rich else None,
            "key_bank": (f"*{dtype}", *STRIDES) if pairs else None,
            "value_bank": (f"*{dtype}", *STRIDES) if bank else None,
            "turning": "*i64" if pairs else None,
            "positions": ("*i64", "i64") if where == "positions" else None,
            "starts": "*i64" if where == "starts" else None,
            "start": "i64",
            "attention_scaling": "fp32",
            **dict.fromkeys(("parts", "stats"), "*fp32"),
            "scaling": "fp32",
            "softcap": "fp32" if rich else None,
            "tokens": "i32",
            "chunk": "i32",
            "KV_HEADS": 8,
            "GROUP": 4,
            "HEADS": 16,
            "DIM": dim,
            "RANK": rank,
            "RANK_PAD": padded(rank),
            "VALUE_DIM": 128,
            "VALUE_PAD": 128,
            "VALUE_RANK": value_rank,
            "VALUE_RANK_PAD": padded(value_rank),
            "PAIRS": pairs,
            "PAIRS_PAD": padded(pairs) if pairs else 16,
            "INTERLEAVED": rich,
            "BLOCK": 16 if bank else block_size(rank, value_rank, pairs),
        }


def combine_variants():
    tensors = {"parts": "*fp32", "stats": "*fp32", "output": "*bf16", "lse": "*fp64", "splits": "i32"}
    for decode, width in ((("*bf16", *STRIDES), 256), (("*fp32", *STRIDES), 60), (None, 128)):
        sizes = {"KV_HEADS": 8, "GROUP": 4, "HEADS": 16, "VALUE_DIM": 128, "WIDTH": width, "WIDTH_PAD": padded(width), "DIMS": 64}
        yield {**tensors, "decode": decode, **sizes}


def compile_all(capability: int) -> None:
    """Compiles every kernel in all its variants for a GPU that needs not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_kvcaches.kernels import _coefficients_triton as kernels

    for kernel, wanted in ((kernels.attend_kernel, attend_variants()), (kernels.combine_kernel, combine_variants())):
        for chosen in wanted:
            types = {name: chosen[name] if isinstance(chosen[name], str | tuple) else "constexpr" for name in kernel.arg_names}
            known = {(i,): chosen[name] for i, name in enumerate(kernel.arg_names) if types[name] == "constexpr"}
            options = {"num_stages": 2}
            if kernel is kernels.attend_kernel:
                options["num_warps"] = kernels.warps(chosen["RANK"], chosen["VALUE_RANK"], chosen["query"] == "*fp32")
            done = triton.compile(ASTSource(kernel, types, known), target=GPUTarget("cuda", capability, 32), options=options)
            assert done.asm["cubin"]
            assert done.metadata.shared <= SHARED_MEMORY[capability], (kernel, chosen, done.metadata.shared)
    print("compiled")


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
