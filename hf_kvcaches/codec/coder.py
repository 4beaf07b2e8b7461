"""Encoding and decoding of one layer on a device."""

from __future__ import annotations

import torch

from hf_kvcaches.codec.layout import Layout
from hf_kvcaches.codec.sides import CalibratedLayer, CalibratedSide
from hf_kvcaches.kernels.codes import CodeMap, decode_codes, pack_codes

# Tokens of all rows that are encoded at a time, so that a long prompt needs no more memory.
_PIECE = 2048


class Levels:
    """From coefficients in steps to packed codes, and what the levels of these are worth, for directions with given bits.

    A code u of w bits stands for `u + 1/2 - 2^(w - 1)` steps; each of its parts is a level of its own, counted from its middle.

    Args:
        widths: Bits of each direction, (kv_heads, d).
        separate: Whether a byte belongs to one head.

    Attributes:
        kept: The directions with bits of each head, (kv_heads, most of a head); heads with fewer are filled up with others.
        widths: Theirs, (kv_heads, most).
        index: Of each head its levels, (kv_heads, most levels of a head).
        rows: Bytes of a token.
        row_heads: With `separate`, the head of each byte, (rows,).
    """

    def __init__(self, widths: torch.Tensor, device: torch.device, separate: bool = False) -> None:
        heads, dim = widths.shape
        layout = Layout.of(widths, separate)
        self.counts = layout.counts
        self.rows = layout.counts[0] + layout.counts[1] // 2 + layout.counts[2] // 4 + layout.counts[3] // 8
        self.row_heads = layout.row_heads.to(device)
        most = max(1, int((widths > 0).sum(1).max()))
        kept = (widths == 0).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        kept_widths = widths.gather(1, kept)
        self.kept, self.widths = kept.to(device), kept_widths.to(device)
        self._top = (2.0 ** kept_widths[..., None] - 1).to(device, torch.float32)
        # Codes of a byte take a quarter of the time of wider ones.
        self._dtype = torch.uint8 if int(kept_widths.max()) <= 8 else torch.int32
        place = torch.zeros(heads, dim, dtype=torch.int64).scatter(1, kept, torch.arange(most).expand(heads, -1))
        self._source = (layout.heads * most + place[layout.heads, layout.directions]).to(device)
        self._bits_below = layout.shifts.to(device, self._dtype)[:, None]
        self._mask = (2**layout.bits - 1).to(device, self._dtype)[:, None]
        index, there = layout.by_head(heads)
        self.index = index.to(device)
        self._place = place[torch.arange(heads)[:, None], layout.directions[index]].to(device)
        self._worth = (2.0 ** layout.shifts[index] * there).to(device, torch.float64)
        self._middle = (2.0 ** (layout.bits - 1))[index].to(device, torch.float64)

    @property
    def middle(self) -> torch.Tensor:
        """What is added to coefficients in steps, so that their floor is their code, (kv_heads, most)."""
        return 2.0 ** (self.widths.double() - 1)

    def pack(self, steps: torch.Tensor) -> torch.Tensor:
        """The packed codes, (batch, rows, tokens), uint8.

        Args:
            steps: Coefficients of the kept directions in steps, with the middle added, (batch, kv_heads, most, tokens); changed in place.
        """
        # What is no number counts as 0; the rest is cut off by the conversion. These operations are vectorized on CPUs, `fmax` is not.
        codes = torch.minimum(steps.nan_to_num_(0.0).clamp_min_(0.0), self._top, out=steps).to(self._dtype)
        levels = codes.flatten(1, 2).index_select(1, self._source)
        return pack_codes((levels.bitwise_right_shift_(self._bits_below)).bitwise_and_(self._mask).to(torch.uint8), self.counts)

    def decoding(
        self, decode: torch.Tensor, steps: torch.Tensor, mean: torch.Tensor, heads: torch.Tensor | slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What turns levels into vectors: `decode` and `offset` of a `CodeMap`, in float64.

        Args:
            decode: The directions with bits, (..., kv_heads, d, most).
            steps: Theirs, (..., kv_heads, most).
            mean: (kv_heads, d).
            heads: In place of all: the heads that these are for.
        """
        place = self._place[heads].expand(*decode.shape[:-2], -1)
        columns = decode.double().gather(-1, place[..., None, :].expand(*decode.shape[:-1], -1))
        columns = columns * (steps.double().gather(-1, place) * self._worth[heads])[..., None, :]
        half = torch.where(self.widths[heads] > 0, 0.5 - self.middle[heads], 0.0) * steps.double()
        offset = mean.double() + (decode.double() @ half[..., None])[..., 0] + (columns * self._middle[heads][:, None]).sum(-1)
        return columns, offset


class SideCoder:
    """The keys, or the values, of one layer.

    Args:
        gamma: What decoded vectors are multiplied with, for each head, (kv_heads,).
        dtype: Of what is decoded.
        separate: Whether a byte belongs to one head.

    Attributes:
        map: How kernels read the codes.
    """

    def __init__(self, side: CalibratedSide, gamma: torch.Tensor, dtype: torch.dtype, device: torch.device, separate: bool = False) -> None:
        self.levels = levels = Levels(side.widths.long(), device, separate)
        kept = levels.kept.cpu()
        steps = side.chosen_steps.double().gather(1, kept)
        rows = side.encode.double().gather(1, kept[..., None].expand(-1, -1, side.encode.shape[-1])) / steps[..., None]
        wide = torch.promote_types(dtype, torch.float32)
        self._encode = rows.to(device, wide)
        self._shift = (levels.middle.cpu()[..., None] - rows @ side.mean.double()[..., None]).to(device, wide)
        decode = side.decode.gather(2, kept[:, None].expand(-1, side.decode.shape[1], -1))
        columns, offset = levels.decoding(*(each.to(device) for each in (decode, steps, side.mean)))
        scale = gamma.to(device, torch.float64)[:, None]
        self.map = CodeMap(levels.counts, levels.index, (columns * scale[..., None]).to(dtype), (offset * scale).to(dtype))

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """The packed codes, (batch, rows, tokens), uint8.

        Args:
            states: (batch, kv_heads, tokens, d).
        """
        tokens = max(1, _PIECE // max(1, len(states)))
        pieces = [self.levels.pack((self._encode @ piece.to(self._encode.dtype).mT).add_(self._shift)) for piece in states.split(tokens, 2)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """(batch, kv_heads, tokens, d).

        Args:
            packed: What `encode` gave.
        """
        return decode_codes(packed, self.map)


class LayerCoder:
    """Keys and values of one layer; a token's bytes are those of its key, then those of its value."""

    def __init__(
        self, layer: CalibratedLayer, gamma: torch.Tensor, dtype: torch.dtype, device: torch.device, separate: bool = False
    ) -> None:
        self.keys = SideCoder(layer.keys, gamma, dtype, device, separate)
        self.values = SideCoder(layer.values, torch.ones_like(gamma), dtype, device, separate)
        self.rows = self.keys.levels.rows + self.values.levels.rows

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The packed codes, (batch, rows, tokens), uint8.

        Args:
            keys: (batch, kv_heads, tokens, d), before rotation unless the codec was calibrated with rotation="post".
            values: Like `keys`.
        """
        return torch.cat([self.keys.encode(keys), self.values.encode(values)], 1)

    def split(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes of keys and of values, without a copy."""
        return packed[:, : self.keys.levels.rows], packed[:, self.keys.levels.rows :]

    def decode(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (batch, kv_heads, tokens, d)."""
        keys, values = self.split(packed)
        return self.keys.decode(keys), self.values.decode(values)

    def row_heads(self) -> torch.Tensor:
        """Where a byte belongs to one head, the head of each, (rows,)."""
        return torch.cat([self.keys.levels.row_heads, self.values.levels.row_heads])
