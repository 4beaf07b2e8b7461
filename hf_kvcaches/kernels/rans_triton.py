"""Entropy codes on a GPU. `codec/entropy.py` defines the code, and decodes it where there is no Triton.

Import it inside a function: it needs Triton as soon as it is imported. One program decodes a tile, and each of its 32 threads a lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rans_kernel(
    lanes, states, words, escaped, counts, ends, places, symbols, slots, values, tables, digits, valid,
    LANES: tl.constexpr, PRECISION: tl.constexpr, LOWEST: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Decodes a tile; words and escaped integers are read up to the tile's last ones, whatever the code says.

    `ends`: where those of each tile end, (tiles, 2), int64. `places`: of each tile its layer's first symbol in `symbols`, how many there
    are, where its first token is in `digits`, and the tokens of a digit there, (tiles, 4), int64. `symbols`: see `codec/plan.py`.
    `values`: (4, 2 * tables * 256).
    """
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    first, count = tl.load(places + tile * 4), tl.load(places + tile * 4 + 1)
    out, tokens = tl.load(places + tile * 4 + 2), tl.load(places + tile * 4 + 3)
    word_end, escaped_end = tl.load(ends + tile * 2), tl.load(ends + tile * 2 + 1)
    word, escape = word_end - tl.load(counts + tile * 2), escaped_end - tl.load(counts + tile * 2 + 1)
    state = tl.load(states + tile * LANES + lane)
    levels_0, levels_1 = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
    for number in range(count):
        symbol = symbols + (first + number) * 6
        row, follows, plain = tl.load(symbol), tl.load(symbol + 1), tl.load(symbol + 2)
        size, digit, stride = tl.load(symbol + 3 + 0 * lane), tl.load(symbol + 4), tl.load(symbol + 5)
        for half in tl.static_range(2):
            present = lane < tl.load(lanes + tile * 2 + half)
            levels = levels_0 if half == 0 else levels_1
            # Table 0 codes nothing.
            table = tl.where(present, row + follows * levels, 0)
            entry = tl.load(slots + (table << PRECISION) + (state & ((1 << PRECISION) - 1)))
            frequency, place = ((entry >> 8) & ((1 << PRECISION) - 1)) + 1, (entry >> 20) & ((1 << PRECISION) - 1)
            state = (state >> PRECISION) * frequency + place
            low = state < LOWEST
            at = word + tl.cumsum(low.to(tl.int32), 0) - 1
            read = tl.load(words + at, mask=low & (at < word_end), other=0).to(tl.int32) & 0xFFFF
            state = tl.where(low, (state << 16) | read, state)
            word += tl.sum(low.to(tl.int32), 0)
            code, found = entry & 255, tl.minimum(tl.maximum((entry & 255) - 1, 0), LEVELS - 1)
            levels_0 = tl.where((number == 0) & (half == 0), found, levels_0)
            levels_1 = tl.where((number == 0) & (half == 1), found, levels_1)
            escapes = present & (code == 0) & (size > 0)
            from_escaped = escape + (tl.cumsum(escapes.to(tl.int32), 0) - 1) * size
            escape += tl.sum(escapes.to(tl.int32) * size, 0)
            value = (table + plain * tables) * 256 + code
            for part in tl.static_range(4):
                live = present & (size > part)
                stored = tl.load(escaped + from_escaped + part, mask=live & (code == 0) & (from_escaped + part < escaped_end), other=0)
                usual = tl.load(values + part * (2 * tables * 256) + value, mask=live & (code != 0), other=0.0)
                to = digits + out + (digit + part * stride) * tokens + half * LANES + lane
                tl.store(to, tl.where(escapes, stored.to(tl.float32), usual), mask=live)
    whole = (tl.sum((state != LOWEST).to(tl.int32), 0) == 0) & (word == word_end) & (escape == escaped_end)
    tl.store(valid + tile, whole.to(tl.int8))


def decode_tiles(
    codes: Sequence[Tensor], places: Tensor, symbols: Tensor, slots: Tensor, values: Tensor, size: int, precision: int, levels: int
) -> tuple[Tensor, Tensor]:
    """Return all digits, (size,), float32, and whether the codes, a `CodedTiles` of `codec/entropy.py`, are whole; see the kernel."""
    digits = torch.empty(size, dtype=torch.float32, device=slots.device)
    lanes, states, words, escaped, counts = codes
    valid = torch.ones(len(states), dtype=torch.int8, device=slots.device)
    if len(states):
        ends = counts.cumsum(0, dtype=torch.int64)
        rans_kernel[(len(states),)](
            lanes, states, words, escaped, counts, ends, places, symbols, slots, values, values.shape[1] // 512, digits, valid,
            LANES=states.shape[1], PRECISION=precision, LOWEST=1 << 15, LEVELS=levels, num_warps=1,
        )  # fmt: skip
    return digits, valid.all()
