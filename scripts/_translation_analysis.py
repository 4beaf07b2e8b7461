"""What is measured of translation beside requests: how fast a layer is rebuilt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _common import synchronize
from _equip_sides import spread
from _segments_sides import Row

from hf_kvcaches.core.quantize import quantize
from hf_kvcaches.kernels.rebuild import Codes, Decoder, Span, rebuild, rebuild_reference


@dataclass(frozen=True)
class Kernel:
    """A layer to rebuild.

    Args:
        side: What is known of a token beside its code.
        rank: Of the code.
        width: Of keys and values together.
        tokens: How many.
        head_dim: Of keys and of values.
    """

    side: int
    rank: int
    width: int
    tokens: int = 900
    head_dim: int = 64

    def __str__(self) -> str:
        return f"d {self.side}, rank {self.rank}, C {self.width}"


def kernel_rows(kernel: Kernel, rounds: int, device: torch.device) -> list[Row]:
    """`rebuild` against the two matrix products alone, which decode nothing, turn nothing and write no cache.

    Args:
        kernel: The layer.
        rounds: How many.
        device: Where.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    heads, half = kernel.width // (2 * kernel.head_dim), kernel.head_dim // 2
    make = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    side = make(kernel.tokens, kernel.side).to(dtype)
    packed = quantize(make(kernel.tokens, kernel.rank).half().cpu(), bits=4, group=256, axis=0).to(device)
    decoder = Decoder(*(make(rows, kernel.width).div(rows**0.5).to(dtype) for rows in (kernel.side, kernel.rank)), None)
    angles = make(kernel.tokens, half)
    out = [torch.zeros(1, heads, kernel.tokens + 64, kernel.head_dim, dtype=dtype, device=device) for _ in range(2)]
    codes = Codes(packed.data, packed.scale, packed.zero, packed.group)
    tables = {"cos": angles.cos(), "sin": angles.sin()}

    def ours() -> None:
        rebuild(side, codes, decoder, out[0], out[1], [Span(0, 0, kernel.tokens)], **tables, check=False)

    _prove_kernel(kernel, side, packed, decoder, tables)
    plain, product = packed.dequantize(dtype), torch.empty(kernel.tokens, kernel.width, dtype=dtype, device=device)
    assert decoder.side is not None
    assert decoder.codes is not None
    sides, codes_weights = decoder.side, decoder.codes

    def bare() -> None:
        torch.mm(side, sides, out=product).addmm_(plain, codes_weights)

    works: dict[str, Callable[[], None]] = {"bare products": bare, "rebuild": ours}
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 3):
        for name in list(works) if turn % 2 else reversed(works):
            synchronize(device)
            begin = time.perf_counter()
            works[name]()
            synchronize(device)
            times[name].append(time.perf_counter() - begin)
    rows: list[Row] = []
    operations = 2 * kernel.tokens * (kernel.side + kernel.rank) * kernel.width
    for name, own in times.items():
        ratios = [base / mine for base, mine in zip(times["bare products"][3:], own[3:], strict=True)]
        row = {"section": "kernel", "workload": str(kernel), "side": name, "measure": "layer", "length": kernel.side, "count": rounds}
        row |= {"tokens": kernel.tokens, **spread("time", own[3:], 1e3), **spread("ratio", ratios)}
        rows.append({**row, "value": round(operations / statistics.median(own[3:]) / 1e9, 2), "unit": "Gflop/s"})
    return rows


def _prove_kernel(kernel: Kernel, side: torch.Tensor, packed: Any, decoder: Decoder, tables: dict[str, torch.Tensor]) -> None:
    """Some tokens, by the back-end that is timed and by the reference."""
    some, heads = 16, kernel.width // (2 * kernel.head_dim)
    codes = Codes(packed.dequantize(side.dtype)[:some])
    found = []
    for work in (rebuild, rebuild_reference):
        out = [torch.zeros(1, heads, some, kernel.head_dim, dtype=side.dtype, device=side.device) for _ in range(2)]
        work(side[:some], codes, decoder, out[0], out[1], [Span(0, 0, some)], **{name: part[:some] for name, part in tables.items()})
        found.append(torch.cat(out))
    apart = float((found[0].float() - found[1].float()).abs().max())
    if not apart <= (1e-4 if side.dtype == torch.float32 else 0.1):
        raise SystemExit(f"{kernel}: rebuilt keys and values differ from the reference by {apart:.2g}: nothing timed")
