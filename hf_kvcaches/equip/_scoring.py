"""The arithmetic of two policies that is too long to stand among them."""

from __future__ import annotations

import torch
from torch.nn import functional


def lag_ranks(keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """How each token ranks within its lag, in [0, 1), by how much it spreads in the range of the next lag: (batch, kv_heads, slots).

    +inf for tokens of a lag that lacks a token, or whose next lag does.

    Args:
        keys: (batch, kv_heads, slots, head_dim).
        values: (batch, kv_heads, slots, value_dim).
        index: (batch, 1 or kv_heads, slots): index // size is a token's lag, no two are equal in a row; below 0: in no lag.
    """
    lags = keys.shape[2] // size
    if lags < 2:
        return torch.full(keys.shape[:3], torch.inf, device=keys.device)
    source, place, numbers = _whole_lags(index.long().expand(keys.shape[:3]), size, lags)
    worth = _information(keys, source, size) + _information(values, source, size)
    ranks = worth.argsort(-1).argsort(-1) / size
    follows = (numbers[..., :-1] >= 0) & (numbers[..., 1:] == numbers[..., :-1] + 1)
    ranks = torch.where(follows[..., None], ranks, torch.inf).flatten(2)
    # The last lag has no next one, and one place behind it is for the tokens of no whole lag.
    return functional.pad(ranks, (0, size + 1), value=torch.inf).gather(-1, place)


def _whole_lags(index: torch.Tensor, size: int, lags: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lags of which every token is there, put one after the other.

    Returns:
        The slots of their tokens, (batch, kv_heads, lags * size).
        For each slot its place among these, or one behind them, (batch, kv_heads, slots).
        The lags' numbers, (batch, kv_heads, lags), below 0 where there are fewer.
    """
    slots = index.shape[-1]
    index, order = index.sort(-1)
    inside = index.remainder(size)
    begin = torch.arange(slots, device=index.device) - inside
    end = begin + size - 1
    whole = (index >= 0) & (begin >= 0) & (end < slots)
    # No two are equal, so what begins and ends where it should lacks nothing between.
    whole &= index.gather(-1, begin.clamp(min=0)) == index - inside
    whole &= index.gather(-1, end.clamp(max=slots - 1)) == index - inside + size - 1
    nth = (whole & (inside == 0)).cumsum(-1) - 1
    place = torch.where(whole, nth * size + inside, lags * size)
    blank = index.new_zeros(*index.shape[:-1], lags * size + 1)
    source = blank.scatter(-1, place, order)[..., :-1]
    numbers = (blank - size).scatter(-1, place, index)[..., :-1:size].div(size, rounding_mode="floor")
    return source, torch.empty_like(place).scatter_(-1, order, place), numbers


def _information(states: torch.Tensor, source: torch.Tensor, size: int) -> torch.Tensor:
    """How much the channels of each token differ, scaled by their ranges in the next lag: shares of a lag, (.., lags - 1, size)."""
    batch, heads, slots, width = states.shape
    # Whole tokens are taken from a list of all: several times faster than gather, which looks up each number.
    base = torch.arange(0, batch * heads * slots, slots, device=source.device).view(batch, heads, 1)
    picked = states.detach().reshape(-1, width).index_select(0, (source + base).flatten()).float()
    picked = picked.view(batch, heads, -1, size, width)
    this, following = picked[:, :, :-1], picked[:, :, 1:]
    low, high = following.amin(-2, keepdim=True), following.amax(-2, keepdim=True)
    # What is divided by infinity says nothing.
    return ((this - low) / torch.where(high > low, high - low, torch.inf)).std(-1).softmax(-1)


def lots(positions: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers in [0, 1) that look random and depend on seed, head and position only, (batch, kv_heads, slots).

    Args:
        positions: (batch, kv_heads, slots).
    """
    heads = torch.arange(positions.shape[1], device=positions.device)[None, :, None]
    mixed = torch.full_like(heads, seed % 2**31)
    for part in (heads, positions.long()):
        mixed = (mixed * 0x9E3779B1 + part) & 0xFFFFFFFF
        # Multiplications wrap around at 64 bits, and the mask leaves what counts.
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 16)
    return (mixed >> 8).float() / 2**24
