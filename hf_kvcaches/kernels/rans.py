"""Entropy codes on a GPU; `codec/entropy.py` defines the code, and decodes it where there is no Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def decode_tiles(
    codes: Sequence[Tensor], places: Tensor, symbols: Tensor, slots: Tensor, values: Tensor, size: int, precision: int, levels: int
) -> tuple[Tensor, Tensor]:
    """Return all digits, (size,), float32, and whether the codes are whole, on their device.

    Args:
        codes: The tensors of a `CodedTiles` of `codec/entropy.py`.
        places: (tiles, 4), int64, and `symbols`, (all, 6), int32: as `rans_triton.rans_kernel` takes them.
        slots: As `Tables` has them, and `values`.
        precision: Bits of a slot.
        levels: Of tokens.
    """
    from hf_kvcaches.kernels import rans_triton

    digits = torch.empty(size, dtype=torch.float32, device=slots.device)
    lanes, states, words, escaped, counts = codes
    valid = torch.ones(len(states), dtype=torch.int8, device=slots.device)
    if len(states):
        ends = counts.cumsum(0, dtype=torch.int64)
        rans_triton.rans_kernel[(len(states),)](
            lanes, states, words, escaped, counts, ends, places, symbols, slots, values, values.shape[1] // 512, digits, valid,
            LANES=states.shape[1], PRECISION=precision, LOWEST=1 << 15, LEVELS=levels, num_warps=1,
        )  # fmt: skip
    return digits, valid.all()
