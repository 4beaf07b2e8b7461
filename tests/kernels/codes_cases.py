"""Cases for attention over codes, and what must come out: every token is decoded and rotated, with loops and in float64."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from hf_kvcaches.kernels.attention import AttentionPart, merged
from hf_kvcaches.kernels.code_format import PLANES, TILE, CodeLayout, Counts
from hf_kvcaches.kernels.codes import CodeMap, TileRotation
from hf_kvcaches.kernels.rotation import rotate_
from tests.kernels import reference
from tests.kernels.cases import NAN, TOLERANCE, Draws

WIDTHS = {
    "one bit": (1,) * 9,
    "bytes": (8, 8, 8),
    "two parts": (3, 5, 6, 16, 3),
    "three parts": (24, 0, 1),
    "all": (0, 1, 2, 3, 4, 5, 6, 8, 16, 24) * 2,
    "many": (4, 2, 1, 8) * 25,
    "none": (0, 0),
}
"""Bits of the directions."""


class Case(Draws):
    """Random codes and queries of one shape.

    There are `groups` of `kv_heads` with a basis each, and `group` query heads share a key head. `widths` are the bits of the directions,
    `pairs` of the dimensions rotate, and with `common` all rows share their angles. By `mask` all see all (""), or queries of a row see
    the same ("rows") or not ("queries"): the first row, or the first query of it, sees nothing, the others see the last token. Behind the
    tokens of each row there is `room` for others, and rows of bytes that are not used.
    """

    def __init__(
        self, batch=2, groups=2, kv_heads=2, group=2, queries=1, tokens=48, dim=8, value_dim=6, widths: Sequence[int] = WIDTHS["all"],
        pairs=0, layout="half", common=False, mask="", dtype=torch.float32, seed=0, room=0,
    ) -> None:  # fmt: skip
        tokens = -(-tokens // TILE) * TILE if pairs else tokens
        super().__init__(batch, groups, tokens, dtype, seed)
        self.query = self.randn(batch, groups * kv_heads * group, queries, dim)
        bits = torch.tensor(widths, dtype=torch.int64)
        self.integers = (torch.rand(batch, groups, len(widths), tokens, generator=self.generator).double() * 2.0 ** bits[:, None]).long()
        layout_of_codes = CodeLayout.of(bits)
        self.codes = self.within_a_buffer(layout_of_codes.pack(self.integers), room)
        self.code_map = CodeMap(
            layout_of_codes.counts, *(self.basis(groups, kv_heads, size, layout_of_codes.counts) for size in (dim, value_dim))
        )
        self.options: dict[str, Any] = {"rotation": self.rotation(pairs, layout, common), "visible": None}
        if mask:
            visible = torch.rand(batch, 1 if mask == "rows" else queries, tokens, generator=self.generator) < 0.6
            visible[..., -1] = True
            visible[0, 0] = False
            self.options["visible"] = visible

    def within_a_buffer(self, codes: torch.Tensor, room: int) -> torch.Tensor:
        """The codes as part of a larger buffer of other bytes."""
        batch, groups, rows, tokens = codes.shape
        buffer = torch.randint(0, 256, (batch, groups, rows + room, tokens + room), generator=self.generator).to(torch.uint8)
        buffer[:, :, :rows, :tokens] = codes
        return buffer[:, :, :rows, :tokens]

    def basis(self, groups: int, heads: int, dim: int, counts: Sequence[int]) -> torch.Tensor:
        """Each level contributes as much as the others to vectors of the size of 1; with a constant."""
        sizes = torch.tensor([2.0**bits for bits, count in zip(PLANES, counts, strict=True) for _ in range(count)])
        wide = torch.promote_types(self.dtype, torch.float32)
        levels = 2 * self.randn(groups, heads, dim, len(sizes)).double() / max(1, len(sizes)) ** 0.5 / sizes
        return torch.cat([levels, self.randn(groups, heads, dim, 1) / 4], -1).to(wide)

    def rotation(self, pairs: int, layout: str, common: bool) -> TileRotation | None:
        batch, _, tokens = self.shape
        if not pairs:
            return None
        angles = torch.rand(1 if common else batch, tokens // TILE, pairs, generator=self.generator, dtype=torch.float64) * 6
        cos, sin = (1.3 * table.to(torch.promote_types(self.dtype, torch.float32)) for table in (angles.cos(), angles.sin()))
        return TileRotation(cos, sin, layout)  # type: ignore[arg-type]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.query, self.codes, self.code_map, 0.3

    def expected(self, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and log sum exp."""
        keys, values = decoded(self.codes, self.code_map, self.options["rotation"])
        visible = self.options["visible"]
        return reference.attention(self.query, keys, values, 0.3, None if visible is None else visible[:, None], softcap)[:2]

    def hide_tiles(self) -> None:
        """Has no query of the first row see its first tile, whose angles are no numbers."""
        self.options["visible"] = self.options["visible"].clone()
        self.options["visible"][0, :, :TILE] = False
        rotation = self.options["rotation"]
        self.options["rotation"] = rotation._replace(cos=rotation.cos.clone(), sin=rotation.sin.clone())
        for table in self.options["rotation"][:2]:
            table[0, 0] = NAN


def levels_of(codes: torch.Tensor, counts: Counts) -> torch.Tensor:
    """The levels, and 1 behind them, (batch, groups, levels + 1, tokens)."""
    levels, row = [], 0
    for bits, count in zip(PLANES, counts, strict=True):
        rows = count * bits // 8
        for part in range(count):
            byte = codes[:, :, row + part % rows].long()
            levels.append((byte >> bits * (part // rows)) % 2**bits - 2 ** (bits - 1))
        row += rows
    return torch.stack([*levels, torch.ones(codes.shape[:2] + codes.shape[3:], dtype=torch.long)], 2).double()


def decoded(codes: torch.Tensor, code_map: CodeMap, rotation: TileRotation | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, rotated by the angles of their tiles, and values, (batch, kv_heads, tokens, dim) each."""
    (batch, groups, _, tokens), heads = codes.shape, code_map.keys.shape[1]
    levels = levels_of(codes, code_map.counts)
    keys = torch.zeros(batch, groups * heads, tokens, code_map.keys.shape[2], dtype=torch.float64)
    values = torch.zeros(batch, groups * heads, tokens, code_map.values.shape[2], dtype=torch.float64)
    for b, g, h, token in product(range(batch), range(groups), range(heads), range(tokens)):
        key = code_map.keys[g, h].double() @ levels[b, g, :, token]
        if rotation is not None:
            row = b if len(rotation.cos) > 1 else 0
            rotate_(key, rotation.cos[row, token // TILE], rotation.sin[row, token // TILE], rotation.layout)
        keys[b, g * heads + h, token] = key
        values[b, g * heads + h, token] = code_map.values[g, h].double() @ levels[b, g, :, token]
    return keys, values


def assert_part(part: AttentionPart, expected: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, exactness: torch.dtype) -> None:
    """A part is that attention, in float32 or in the query's float64."""
    output, lse = expected
    batch, queries, heads, value_dim = output.shape
    assert part.sums.shape == (batch, heads, queries, value_dim)
    assert part.total.shape == part.highest.shape == (batch, heads, queries, 1)
    assert {tensor.dtype for tensor in part} == {torch.promote_types(dtype, torch.float32)}
    part = AttentionPart(*(tensor.cpu() for tensor in part))
    tolerance = TOLERANCE[exactness]
    torch.testing.assert_close(merged([part]).double(), output, atol=tolerance, rtol=tolerance)
    found = torch.where(part.total > 0, part.total.log() + part.highest, -torch.inf).squeeze(-1)
    torch.testing.assert_close(found.double(), lse, atol=tolerance, rtol=tolerance)
