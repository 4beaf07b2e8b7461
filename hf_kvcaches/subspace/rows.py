"""Which tokens of a row lie where: the first ones and the newest exactly, whole tiles between them as codes.

Each row is placed as if it were alone, by the number of its real tokens: all else follows from that. Exact tokens lie in one tensor, sinks
first; the newest are at its end. While all rows have as many tokens, everything is a slice. Else a pass gathers the tokens of each row, and
slots that hold none are hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_kvcaches.core.layers import capacity_for
from hf_kvcaches.core.step import Pass
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.code_format import TILE

# Buffers of codes have room for one token more for each so many.
_RESERVE = 128
Seen = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Ends:
    """What stays exact."""

    sinks: int  # first tokens of each row
    recent: int  # newest tokens; up to 15 more wait for their tile
    warmup: int = 0  # a row has no codes before it has so many tokens behind the sinks

    def tiles(self, tokens: int) -> int:
        """Tiles of a row that are codes."""
        return 0 if tokens - self.sinks < self.warmup else max(0, tokens - self.sinks - self.recent) // TILE

    def window(self, tokens: int) -> int:
        """Tokens of a row that are exact behind the sinks."""
        return max(0, tokens - self.sinks) - TILE * self.tiles(tokens)


class Encoded(NamedTuple):
    """Tokens that become codes."""

    # Slots among the exact and the new tokens: a slice, or (batch, tokens). A row with fewer tiles is filled up with arbitrary tokens.
    slots: slice | Tensor
    spans: list[tuple[slice, int, int]]  # rows that fill the same tiles: which rows, the first tile, and how many
    stop: int  # tiles afterwards, in the row with most

    def of(self, states: Tensor) -> Tensor:
        """These tokens, of (batch, kv_heads, exact + new, dim)."""
        return states[:, :, self.slots] if isinstance(self.slots, slice) else taken(states, self.slots)

    def written(self, buffer: Tensor | None, new: Tensor, size: int) -> Tensor:
        """A buffer, (batch, ..., capacity), with what belongs to these tiles, (batch, ..., tiles * size); a larger one where it is full."""
        stop = self.stop * size
        if buffer is None or stop > buffer.shape[-1]:
            larger = new.new_zeros(*new.shape[:-1], room_for(stop))  # unwritten memory may hold other data
            if buffer is not None:
                larger[..., : buffer.shape[-1]] = buffer
            buffer = larger
        for rows, first, tiles in self.spans:
            buffer[rows, ..., size * first : size * (first + tiles)] = new[rows, ..., : size * tiles]
        return buffer


class Move(NamedTuple):
    """What happens to the exact tokens of a layer, with the new ones behind them; numbers and positions are those afterwards."""

    counts: tuple[int, ...]  # real tokens of each row; one number while all rows have as many
    coded: int  # tokens that are codes, in the row with most
    encoded: Encoded | None
    sinks: int  # slots of sinks
    newest: int  # slots of the tokens at the end
    slots: Tensor | None = None  # of each row which tokens these are, (batch, sinks + newest); None where they lie at both ends
    padding: int | None = None  # new tokens up to the last that is padding in any row; None for no padding
    positions: Tensor | None = None  # the model's, of exact tokens, (batch, 1, sinks + newest, 1); None where keys are not rotated
    starts: Tensor | None = None  # those of the first token of each tile, (batch, capacity)
    new_starts: Tensor | None = None  # those of the new tiles alone
    seen: Seen = (None, None)  # by the query of a step; see `visible`

    def keep(self, states: Tensor) -> Tensor:
        """The tokens that stay exact, of (batch, kv_heads, exact + new, dim)."""
        if self.slots is not None:
            return taken(states, self.slots)
        if self.sinks + self.newest == states.shape[2]:
            return states
        return torch.cat([states[:, :, : self.sinks], states[:, :, states.shape[2] - self.newest :]], 2)


def room_for(count: int) -> int:
    """How many tokens or tiles a new buffer has room for, that is to hold so many: whole tiles, so that kernels load whole words."""
    return -(-capacity_for(count, _RESERVE) // TILE) * TILE


def taken(states: Tensor, index: Tensor) -> Tensor:
    """states[b, h, index[b, n]], (batch, kv_heads, n, dim)."""
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def move(ends: Ends, counts: tuple[int, ...], held: int, running: Pass, spare: int, rows: int) -> Move:
    """Where the tokens of a pass go.

    Args:
        counts: Real tokens of each row so far; one number while all have as many.
        held: Slots of exact tokens so far, sinks included.
        spare: How many tokens that have codes stay exact as well, so that newer ones can be taken back.
    """
    if running.valid is not None or len(counts) > 1:
        return _move_apart(ends, np.broadcast_to(counts, rows), held, running, spare)
    [before], tokens = counts, running.tokens
    after = before + tokens
    sinks, tiles = min(ends.sinks, after), ends.tiles(after)
    newest = min(ends.window(after) + spare, held + tokens - sinks)
    encoded, count = None, tiles - ends.tiles(before)
    if count > 0:
        # The last of the tokens that lie behind the new tiles are the window.
        stop = held + tokens - ends.window(after)
        encoded = Encoded(slice(stop - count * TILE, stop), [(slice(None), tiles - count, count)], tiles)
    return Move((after,), TILE * tiles, encoded, sinks, newest)


def _move_apart(ends: Ends, before: Any, held: int, running: Pass, spare: int) -> Move:
    """`move` of rows that differ, `before`: (batch,). Tokens of a row have numbers, from its first real one on."""
    valid = np.ones((len(before), running.tokens), bool) if running.valid is None else running.valid.cpu().numpy()
    after, real_first = before + valid.sum(1), np.argsort(~valid, axis=1, kind="stable")
    first, sinks = min(ends.sinks, before.max()), min(ends.sinks, int(after.max()))

    def slots_of(numbers: Any) -> Tensor:
        """Where tokens lie among the exact and the new ones, (batch, n); any token in place of one that is not there."""
        numbers = np.clip(numbers, 0, np.maximum(after - 1, 0)[:, None])
        new = held + np.take_along_axis(real_first, np.maximum(numbers - before[:, None], 0), 1)
        old = np.where(numbers < first, numbers, held - before[:, None] + numbers)
        return torch.from_numpy(np.where(numbers < before[:, None], np.maximum(old, 0), new)).to(running.device)

    # Behind the sinks a row has its new tokens, and of older ones those that are still exact.
    exact = np.minimum(np.maximum(before - first, 0), held - first) + np.minimum(before, first) + after - before - np.minimum(after, sinks)
    newest = max(min(ends.window(count) + spare, most) for count, most in zip(after.tolist(), exact.tolist(), strict=True))
    done, tiles = (np.array([ends.tiles(count) for count in counts.tolist()]) for counts in (before, after))
    spans = [(slice(row, row + 1), *pair) for row, pair in enumerate(zip(done.tolist(), (tiles - done).tolist(), strict=True)) if pair[1]]
    encoded = None
    if spans:
        slots = slots_of(ends.sinks + TILE * done[:, None] + np.arange(TILE * (tiles - done).max()))
        encoded = Encoded(slots, spans, int(tiles.max()))
    ends_of_rows = np.broadcast_to(np.arange(sinks), (len(after), sinks)), after[:, None] - newest + np.arange(newest)
    padding = None if running.valid is None else int(np.flatnonzero((~valid).any(0)).max(initial=-1)) + 1
    coded = TILE * int(tiles.max())
    return Move(tuple(after.tolist()), coded, encoded, sinks, newest, slots_of(np.concatenate(ends_of_rows, 1)), padding)


def visible(ends: Ends, counts: tuple[int, ...], held: int, allowed: Tensor | None, device: torch.device) -> Seen:
    """Which of the `held` exact tokens and which codes queries see, (batch or 1, queries or 1, tokens) each; None for all.

    Args:
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
