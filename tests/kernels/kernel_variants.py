"""Signatures of all Triton kernels, to compile them ahead of time: `python kernel_variants.py NAME CAPABILITY`, where none is interpreted.

Strings are types, everything else is known when a kernel is compiled.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.kernels.triton_process import STRIDES, compile_all

Wanted = Iterator[tuple[Any, dict[str, Any], dict[str, int]]]


def code_variants():
    """For a model of 8B."""
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


def codes() -> Wanted:
    from hf_kvcaches.kernels.common_triton import combine_kernel

    for kernel, chosen in code_variants():
        yield kernel, chosen, {"num_warps": 8}
    for chosen in combine_variants():
        yield combine_kernel, chosen, {}


def rans() -> Wanted:
    from hf_kvcaches.kernels import rans_triton as kernels

    pointers = {
        "*i32": ("lanes", "states", "counts", "symbols", "slots"),
        "*i16": ("words", "escaped"),
        "*i64": ("ends", "places"),
        "*fp32": ("values", "digits"),
        "*i8": ("valid",),
    }
    chosen = {name: kind for kind, names in pointers.items() for name in names} | {"tables": "i32"}
    yield kernels.rans_kernel, chosen | {"LANES": 32, "PRECISION": 12, "LOWEST": 1 << 15, "LEVELS": 16}, {"num_warps": 1}


def attend_variants():
    for dtype, group, rich in (("fp32", 3, 2), ("bf16", 1, 1), ("bf16", 3, 0)):
        tensor = f"*{dtype}"
        tensors = {"query": tensor, **dict.fromkeys(("keys", "values"), (tensor, *STRIDES)), **dict.fromkeys(("parts", "stats"), "*fp32")}
        tensors |= {"sinks": tensor if rich else None, "raw": "*fp32" if rich else None, "valid": ("*u8", *STRIDES) if rich else None}
        tensors |= {"tables": ("*i32", "i64") if rich == 1 else None}
        tensors |= {"rotation": (("*i64", *STRIDES), ("*fp32", "*fp32")) if rich == 2 else None}
        numbers = {"scaling": "fp32", "softcap": "fp32" if rich == 2 else None, "slots": "i32", "chunk": "i32"}
        sizes = {"KV_HEADS": 4, "GROUP": group, "HEADS": 16, "DIM": 60, "DIM_PAD": 64, "VALUE_DIM": 128}
        sizes |= {"VALUE_PAD": 128, "HALF": 20 if rich == 2 else 0, "INTERLEAVED": rich == 2, "PAGE": 16 if rich == 1 else 0}
        yield tensors | numbers | sizes | {"BLOCK": 32 if rich == 2 else 64}


def write_variants():
    for dtype, paged in (("fp32", False), ("bf16", True)):
        tensors = dict.fromkeys(("keys", "values", "new_keys", "new_values"), (f"*{dtype}", *STRIDES))
        tensors |= {"tables": ("*i32", "i64") if paged else None, "slots": ("*i64", *STRIDES), "tokens": "i32"}
        sizes = {"KV_HEADS": 4, "DIM": 60, "DIM_PAD": 64, "VALUE_DIM": 64, "VALUE_PAD": 64, "PAGE": 16 if paged else 0, "BLOCK": 4}
        yield tensors | sizes


def slots() -> Wanted:
    from hf_kvcaches.kernels import slots_triton as kernels

    for kernel, some in ((kernels.attend_kernel, attend_variants()), (kernels.write_kernel, write_variants())):
        for chosen in some:
            yield kernel, chosen, {}


def splice_variants():
    stored = {8: ("i8", "bf16", "fp16"), 4: ("u8", "fp32", "fp32"), 0: ("bf16", None, None)}
    some = ((8, "bf16", True), (8, "fp16", False), (4, "fp32", True), (4, "bf16", False), (0, "bf16", False), (0, "fp32", True))
    for bits, dtype, turned in some:
        data, scale, zero = ((f"*{kind}", *STRIDES) if kind else None for kind in stored[bits])
        tables = ("*fp64", "*fp64") if bits == 4 and turned else ("*fp32", "*fp32") if turned else None
        tensors = {"data": data, "scale": scale, "zero": zero, "out": (f"*{dtype}", *STRIDES), "slots": ("*i64", "i64"), "tables": tables}
        sizes = dict.fromkeys(("layer", "tokens", "capacity"), "i32") | {"DIM": 120, "DIM_PAD": 128, "BITS": bits}
        sizes |= {"GROUP": 120 if bits == 8 else 32, "HALF": 30 if turned else 0}
        yield tensors | sizes | {"INTERLEAVED": bits == 4, "BLOCK": 8}


def splice() -> Wanted:
    from hf_kvcaches.kernels.splice_triton import splice_kernel

    for chosen in splice_variants():
        yield splice_kernel, chosen, {}


KERNELS: dict[str, Callable[[], Wanted]] = {each.__name__: each for each in (codes, rans, slots, splice)}

if __name__ == "__main__":
    compile_all(int(sys.argv[2]), KERNELS[sys.argv[1]]())
