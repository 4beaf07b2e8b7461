"""Compiles what launchers launch for GPUs that are not there: `python launched.py NAME CAPABILITY`, where nothing is interpreted."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_kvcaches.kernels import codes_triton, common_triton, rans_triton, slots_triton, splice_triton
from tests.kernels import codes_cases, test_slots, test_splice
from tests.kernels.triton_process import SHARED_MEMORY

NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
NAMES |= {torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}


class Compiler:
    """In place of a kernel: compiles it for a capability where it would be launched."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability = kernel, capability

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.compile

    def compile(self, *arguments: Any, **options: Any) -> None:
        given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | options
        options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
        types = {
            parameter.name: "constexpr" if parameter.is_constexpr or given[parameter.name] is None else type_of(given[parameter.name])
            for parameter in self.kernel.params
        }
        known = {(place,): given[name] for place, name in enumerate(types) if types[name] == "constexpr"}
        done = triton.compile(ASTSource(self.kernel, types, known), target=GPUTarget("cuda", self.capability, 32), options=options)
        assert done.asm["cubin"]
        assert done.metadata.shared <= SHARED_MEMORY[self.capability], (self.kernel, given, done.metadata.shared)
        print(self.kernel.__name__)


def type_of(value: Any, whole: str = "i32") -> Any:
    """Triton's name of a type; strides are as wide as they can be."""
    if isinstance(value, tuple):
        return tuple(type_of(part, "i64") for part in value)
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}"
    return whole if isinstance(value, int) else "fp32"


def codes() -> None:
    """Of models of 8B, and keys as large as they may be."""
    for dtype, queries, dim, pairs, rich in (
        (torch.bfloat16, 1, 128, 64, False),
        (torch.bfloat16, 3, 128, 64, True),
        (torch.bfloat16, 5, 128, 0, True),
        (torch.bfloat16, 1, 128, 32, False),
        (torch.bfloat16, 3, 256, 96, False),
        (torch.float16, 1, 128, 64, True),
        (torch.float32, 1, 128, 64, True),
        (torch.float32, 3, 128, 32, True),
        (torch.float32, 1, 128, 0, False),
        (torch.float32, 3, 256, 96, True),
        (torch.float32, 3, 256, 0, True),
    ):
        layout, mask = ("interleaved", "queries") if rich else ("half", "")
        case = codes_cases.Case(1, 4, 2, 4, queries, 64, dim, 128, (4, 2, 1) * 40, pairs, layout, mask=mask, dtype=dtype)
        codes_triton.code_part(*case.arguments, *case.options.values(), 2.0 if rich else None)


def rans() -> None:
    ints, shorts = torch.zeros(2, 32, dtype=torch.int32), torch.zeros(9, dtype=torch.int16)
    coded, places = (ints[:, :2], ints, shorts, shorts, ints[:, :2]), torch.zeros(2, 4, dtype=torch.int64)
    rans_triton.decode_tiles(coded, places, ints[:, :6], ints, torch.zeros(4, 512), 100, 12, 16)


def slots() -> None:
    for dtype, group, kind in ((torch.float32, 3, "rotated"), (torch.bfloat16, 1, "paged"), (torch.bfloat16, 3, "plain")):
        case = test_slots.Case(1, 4, group, 64, 60, 128, dtype)
        options = case.options(kind != "plain", "interleaved" if kind == "rotated" else "", 2.0 if kind == "rotated" else None)
        options |= {"sink_logits": None if kind == "plain" else case.query[0, :, 0, 0], "want_weights": kind != "plain"}
        *buffers, tables, _ = case.paged(16) if kind == "paged" else (case.keys, case.values, None, None)
        slots_triton.attend(case.query, *buffers, tables, 64, 0.3, **options)
        slots_triton.write(*buffers, tables, *case.new_tokens(4))


def splice() -> None:
    for bits, dtype, stored, fine in (
        (8, torch.bfloat16, torch.bfloat16, False),
        (8, torch.float16, torch.float16, None),
        (4, torch.float32, torch.float32, True),
        (4, torch.bfloat16, torch.float32, None),
        (0, torch.bfloat16, torch.bfloat16, None),
        (0, torch.float32, torch.bfloat16, False),
    ):
        turn, group = "" if fine is None else "interleaved" if fine else "half", 32 if bits == 4 else None
        case = test_splice.Case(1, 3, 64, 120, bits, group, stored, dtype, turn=turn, fine=bool(fine))
        tables = (case.given["cos"], case.given["sin"]) if turn else None
        splice_triton.splice(case.packed, case.outs(case.pool), case.slots, tables, case.given.get("layout", "half"))


if __name__ == "__main__":
    for module in (codes_triton, common_triton, rans_triton, slots_triton, splice_triton):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Compiler(getattr(module, name), int(sys.argv[2])))
    {"codes": codes, "rans": rans, "slots": slots, "splice": splice}[sys.argv[1]]()
