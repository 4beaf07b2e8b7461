"""Which tokens of a row lie where: the first ones and the newest exactly, whole tiles between them as codes.

Each row is placed as if it were alone, by the number of its real tokens: all else follows from that. Exact tokens lie in one tensor, sinks
first; the newest are at its end. While all rows have as many tokens, everything is a slice. Else a pass gathers the tokens of each row, and
slots that hold none are hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_kvcaches.core.layers import capacity_for
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.step import Pass
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.code_format import TILE
from hf_kvcaches.kernels.codes import TileRotation
from hf_kvcaches.kernels.rotation import cos_sin

# Buffers of codes have room for one token more for each so many.
_RESERVE = 128


@dataclass(frozen=True)
class Ends:
    """What stays exact.

    Args:
        sinks: First tokens of each row.
        recent: Newest tokens; up to 15 more wait for their tile.
        warmup: A row has no codes before it has so many tokens behind the sinks.
    """

    sinks: int
    recent: int
    warmup: int = 0

    def tiles(self, tokens: int) -> int:
        """Tiles of a row that are codes."""
        return 0 if tokens - self.sinks < self.warmup else max(0, tokens - self.sinks - self.recent) // TILE

    def window(self, tokens: int) -> int:
        """Tokens of a row that are exact behind the sinks."""
        return max(0, tokens - self.sinks) - TILE * self.tiles(tokens)


class Encoded(NamedTuple):
    """Tokens that become codes.

    Args:
        slots: Where they lie among the exact and the new ones: a slice, or for each row the slots, (batch, tokens).
        tile: The first tile that they fill: a number, or one for each row, (batch,).
        tiles: How many these are, in the row with most.
        stop: How many tiles there are afterwards, in the row with most; with those that only fill up a row.
    """

    slots: slice | torch.Tensor
    tile: int | torch.Tensor
    tiles: int
    stop: int

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """These tokens, of (batch, kv_heads, exact + new, dim)."""
        return states[:, :, self.slots] if isinstance(self.slots, slice) else taken(states, self.slots)

    def spans(self) -> list[tuple[slice, int, int]]:
        """Rows that fill the same tiles: which rows, the first tile, and how many that hold their tokens."""
        if isinstance(self.slots, slice) or isinstance(self.tile, int):
            assert isinstance(self.tile, int)
            return [(slice(None), self.tile, self.tiles)]
        counts = (self.slots[:, TILE - 1 :: TILE] > 0).sum(1).tolist()  # slots that only fill up a row are 0
        return [(slice(row, row + 1), tile, count) for row, (tile, count) in enumerate(zip(self.tile.tolist(), counts, strict=True))]

    def written(self, buffer: torch.Tensor | None, new: torch.Tensor, size: int) -> torch.Tensor:
        """A buffer, (batch, ..., capacity), with what belongs to these tiles, (batch, ..., tiles * size); a larger one where it is full."""
        stop = self.stop * size
        if buffer is None or stop > buffer.shape[-1]:
            larger = new.new_zeros(*new.shape[:-1], room_for(stop))  # unwritten memory may hold other data
            if buffer is not None:
                larger[..., : buffer.shape[-1]] = buffer
            buffer = larger
        if isinstance(self.tile, int):
            buffer[..., self.tile * size : stop] = new
        else:
            places = self.tile[:, None] * size + torch.arange(new.shape[-1], device=new.device)
            buffer.scatter_(-1, places.view(len(new), *[1] * (new.ndim - 2), -1).expand_as(new), new)
        return buffer


class Move(NamedTuple):
    """What happens to the exact tokens of a layer, with the new ones behind them.

    Args:
        counts: Real tokens of each row afterwards; one number while all rows have as many.
        coded: Tokens that are codes afterwards, in the row with most.
        encoded: What becomes codes, or None.
        sinks: Slots of sinks afterwards.
        newest: Slots of the tokens at the end.
        slots: For each row which tokens these are, (batch, sinks + newest); None where they lie at both ends.
        padding: How many of the new tokens there are up to the last that is padding in any row; None for no padding.
        positions: The model's, of exact tokens afterwards, (batch, 1, sinks + newest, 1); None where keys are not rotated.
        starts: Those of the first token of each tile afterwards, (batch, capacity); and `new_starts` of the new tiles alone.
        seen: Of a step, which exact tokens and which codes its query sees; see `visible`.
    """

    counts: tuple[int, ...]
    coded: int
    encoded: Encoded | None
    sinks: int
    newest: int
    slots: torch.Tensor | None = None
    padding: int | None = None
    positions: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    new_starts: torch.Tensor | None = None
    seen: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def keep(self, states: torch.Tensor) -> torch.Tensor:
        """The tokens that stay exact, of (batch, kv_heads, exact + new, dim)."""
        if self.slots is not None:
            return taken(states, self.slots)
        if self.sinks + self.newest == states.shape[2]:
            return states
        return torch.cat([states[:, :, : self.sinks], states[:, :, states.shape[2] - self.newest :]], 2)


def room_for(count: int) -> int:
    """How many tokens or tiles a new buffer has room for, that is to hold so many: whole tiles, so that kernels load whole words."""
    return -(-capacity_for(count, _RESERVE) // TILE) * TILE


def taken(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """states[b, h, index[b, n]], (batch, kv_heads, n, dim)."""
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def move(ends: Ends, counts: tuple[int, ...], held: int, running: Pass, spare: int, rows: int) -> Move:
    """Where the tokens of a pass go.

    Args:
        counts: Real tokens of each row so far; one number while all have as many.
        held: Slots of exact tokens so far, sinks included.
        running: Says which new tokens are real.
        spare: How many tokens that have codes stay exact as well, so that newer ones can be taken back.
        rows: How many rows there are.
    """
    if running.valid is not None or len(counts) > 1:
        return _move_apart(ends, counts * (rows if len(counts) == 1 else 1), held, running, spare)
    [before], tokens = counts, running.tokens
    after = before + tokens
    sinks, tiles = min(ends.sinks, after), ends.tiles(after)
    newest = min(ends.window(after) + spare, held + tokens - sinks)
    encoded, count = None, tiles - ends.tiles(before)
    if count > 0:
        # The last of the tokens that lie behind the new tiles are the window.
        stop = held + tokens - ends.window(after)
        encoded = Encoded(slice(stop - count * TILE, stop), tiles - count, count, tiles)
    return Move((after,), TILE * tiles, encoded, sinks, newest)


def _move_apart(ends: Ends, counts: tuple[int, ...], held: int, running: Pass, spare: int) -> Move:
    tokens, valid, device = running.tokens, running.valid, running.device
    real = [list(range(tokens))] * len(counts) if valid is None else [own.nonzero()[:, 0].tolist() for own in valid.cpu()]
    first = min(ends.sinks, max(counts))
    sources, after = [], tuple(count + len(own) for count, own in zip(counts, real, strict=True))
    for count, new in zip(counts, real, strict=True):
        sinks = min(first, count)
        newest = min(count - sinks, held - first)
        sources.append([*range(sinks), *range(held - newest, held), *(held + place for place in new)])
    sinks = min(ends.sinks, max(after))
    newest = max(min(ends.window(count) + spare, len(own) - min(sinks, count)) for count, own in zip(after, sources, strict=True))
    index, coded = torch.zeros(len(counts), sinks + newest, dtype=torch.int64), []
    for row, (own, count, before) in enumerate(zip(sources, after, counts, strict=True)):
        index[row, : min(sinks, count)] = torch.tensor(own[: min(sinks, count)], dtype=torch.int64)
        kept = min(newest, len(own) - min(sinks, count))
        index[row, sinks + newest - kept :] = torch.tensor(own[len(own) - kept :], dtype=torch.int64)
        stop = len(own) - ends.window(count)
        coded.append(own[stop - TILE * (ends.tiles(count) - ends.tiles(before)) : stop])
    most, encoded = max(map(len, coded)), None
    if most:
        # What fills up a row becomes codes that nobody sees, where its next tiles will be.
        slots = torch.tensor([own + [0] * (most - len(own)) for own in coded])
        tiles, count = [ends.tiles(before) for before in counts], most // TILE
        encoded = Encoded(slots.to(device), torch.tensor(tiles, device=device), count, max(tiles) + count)
    padding = None
    if valid is not None:
        padding = max((place + 1 for own in real for place in set(range(tokens)) - set(own)), default=0)
    return Move(after, TILE * ends.tiles(max(after)), encoded, sinks, newest, index.to(device), padding)


def visible(
    ends: Ends, counts: tuple[int, ...], held: int, allowed: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which exact tokens and which codes queries see, (batch or 1, queries or 1, tokens) each; None for all.

    Args:
        counts: Real tokens of each row; one number while all have as many.
        held: Slots of exact tokens.
        allowed: What the model's mask says of all tokens so far, (batch or 1, 1, queries, at least these), or None.
    """
    sinks, coded = min(ends.sinks, max(counts)), TILE * max(map(ends.tiles, counts))
    newest = held - sinks
    if allowed is not None:
        if allowed.shape[1] != 1:
            raise UnsupportedError("attention_mask: SubspaceCache can't follow a mask that differs by head. Give one for all heads.")
        if len(counts) > 1:
            raise UnsupportedError("attention_mask: SubspaceCache can't follow a mask that hides more than padding where rows are padded.")
        last = allowed[:, 0, :, : counts[0]]
        window = last[..., counts[0] - newest :] & (torch.arange(newest, 0, -1, device=device) <= ends.window(counts[0]))
        return torch.cat([last[..., :sinks], window], 2), last[..., ends.sinks : ends.sinks + coded]
    if len(counts) == 1 and newest == ends.window(counts[0]):
        return None, None
    windows, kept, tiles = (
        torch.tensor([function(count) for count in counts], device=device)[:, None, None]
        for function in (ends.window, lambda count: min(ends.sinks, count), ends.tiles)
    )
    shown = torch.cat([torch.arange(sinks, device=device) < kept, torch.arange(newest, 0, -1, device=device) <= windows], 2)
    return shown, torch.arange(coded, device=device) < TILE * tiles


def with_positions(before: torch.Tensor | None, running: Pass, rows: int) -> torch.Tensor:
    """The positions of exact tokens, (batch, 1, exact, 1), if any, with those of new ones behind them."""
    new = running.positions().expand(rows, -1)[:, None, :, None]
    return new if before is None else torch.cat([before, new], 2)


def tile_rotation(geometry: RotaryGeometry, starts: torch.Tensor, dtype: torch.dtype) -> TileRotation:
    """By what queries of a dtype are rotated back for tiles whose first tokens are at these positions, (batch, tiles)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = cos_sin(geometry.frequencies_on(starts.device), starts, wide)
    if geometry.attention_scaling != 1:
        cos, sin = cos * geometry.attention_scaling, sin * geometry.attention_scaling
    return TileRotation(cos, sin, geometry.layout)
