"""Which tokens stay: in each head alike, or with a budget that heads, or heads and layers, share.

One head in ninety recalls, and keeps nothing of use where all heads have the same budget. So the scores of all heads are compared, and
each head keeps as many tokens as it has of the best. A fifth of its budget stays a head's own, besides sinks and recent tokens. Within a
layer that is Ada-KV (arXiv 2407.11550); over all layers, KVzip's threshold (arXiv 2505.23416) with Ada-KV's floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.equip.storage import Slots

# Of a head's slots that are neither sinks' nor recent tokens' one in so many is its own: Ada-KV's alpha of 0.2.
_FLOOR = 5


@dataclass(frozen=True)
class Candidates:
    """The tokens of a layer of which some stay.

    Args:
        worth: +inf for protected tokens, -inf where there is none, (batch, 1 or kv_heads, tokens).
        budget: How many stay in each head, in the mean.
        slots: How many slots each head has afterwards, in the mean.
        fits: Whether all may stay, and all heads have as many slots.
    """

    worth: torch.Tensor
    budget: int
    slots: int
    fits: bool = False


def protected(scores: torch.Tensor, positions: torch.Tensor, count: int | torch.Tensor, sinks: int, recent: int) -> torch.Tensor:
    """Scores with +inf for sinks and recent tokens, and -inf where there is no token, (batch, 1 or kv_heads, tokens).

    Args:
        positions: (batch, 1 or kv_heads, tokens), in each row's own count of tokens.
        count: Tokens of each row so far, a number or (batch, 1, 1).
    """
    worth = torch.where((positions < sinks) | (positions >= count - recent), math.inf, scores)
    return torch.where(positions < 0, -math.inf, worth)


def best(worth: torch.Tensor, positions: torch.Tensor, count: int) -> Slots:
    """The tokens with the highest worth, in order of position, those that are none last, (batch, 1 or kv_heads, count)."""
    index = worth.topk(min(count, worth.shape[-1]), -1, sorted=False).indices
    return in_order(index, positions)


def in_order(index: Slots, positions: torch.Tensor) -> Slots:
    """Indices of tokens in order of position, those that are none last."""
    chosen = positions.expand(index.shape[0], max(index.shape[1], positions.shape[1]), -1).take_along_dim(index, -1)
    order = torch.where(chosen < 0, torch.iinfo(chosen.dtype).max, chosen).argsort(dim=-1, stable=True)
    return index.expand_as(order).gather(-1, order)


def compared(layers: Sequence[Candidates], shard: HeadShard | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer, True for tokens that stay, (batch, kv_heads, tokens), and how many slots each head gets, (batch, kv_heads, 1).

    The layers' heads share all their slots: scores have to mean the same in them.

    Args:
        shard: Which heads these are, under tensor parallelism.
    """
    device = layers[-1].worth.device
    worths = [_of_all(layer.worth.to(device), shard) for layer in layers]
    heads = [worth.shape[1] for worth in worths]
    flat = torch.cat([_with_floor(worth, layer.budget).flatten(1) for worth, layer in zip(worths, layers, strict=True)], 1)
    total = sum(layer.budget * count for layer, count in zip(layers, heads, strict=True))
    chosen = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, flat.topk(min(total, flat.shape[1]), 1, sorted=False).indices, True)
    chosen &= flat > -math.inf
    parts = chosen.split([worth.shape[1] * worth.shape[2] for worth in worths], 1)
    kept = [part.view_as(worth) for part, worth in zip(parts, worths, strict=True)]
    rooms = torch.cat([part.sum(-1) for part in kept], 1)
    slots = sum(layer.slots * count for layer, count in zip(layers, heads, strict=True))
    left = (slots - rooms.sum(1, keepdim=True)).clamp(min=0)  # what short rows and a budget for decoding leave goes to all heads alike
    number = torch.arange(rooms.shape[1], device=device)
    rooms = (rooms + left // rooms.shape[1] + (number < left % rooms.shape[1]))[..., None]
    return [_of_these(part, room, layer, shard) for part, room, layer in zip(kept, rooms.split(heads, 1), layers, strict=True)]


def with_rooms(layer: Candidates, rooms: torch.Tensor) -> torch.Tensor:
    """True for tokens that stay where each head keeps a number of its own, (batch, kv_heads, tokens).

    Args:
        rooms: How many, (batch or 1, kv_heads, 1).
    """
    return (_ranks(layer.worth) < rooms) & (layer.worth > -math.inf)


def rooms_of(shares: torch.Tensor, slots: int, least: int) -> torch.Tensor:
    """How many slots each head of a layer gets of a mean number, (1, kv_heads, 1).

    Args:
        shares: (kv_heads,), with the mean 1 over all heads of the model.
        least: What each head gets beforehand: its sinks and recent tokens.
    """
    return (least + (shares * (slots - least)).round().long()).view(1, -1, 1)


def indices_of(kept: torch.Tensor, positions: torch.Tensor) -> tuple[Slots, torch.Tensor]:
    """A mask of tokens as indices in order of position, (batch, kv_heads, most in a head), and how many of them count."""
    lengths = kept.sum(-1, keepdim=True)
    first = torch.where(kept, positions.expand_as(kept), torch.iinfo(positions.dtype).max)
    return first.argsort(dim=-1, stable=True)[..., : max(1, int(lengths.max()))], lengths


def _with_floor(worth: torch.Tensor, budget: int) -> torch.Tensor:
    """Worth that is infinite for each head's own best as well."""
    protected = worth.isposinf().sum(-1, keepdim=True)
    free = (budget - protected).clamp(min=0)
    floor = protected + (free + _FLOOR - 1) // _FLOOR
    return torch.where((_ranks(worth) < floor) & (worth > -math.inf), math.inf, worth)


def _ranks(worth: torch.Tensor) -> torch.Tensor:
    """How many numbers of the last dimension come before this one, the highest first."""
    order = worth.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))


def _of_all(worth: torch.Tensor, shard: HeadShard | None) -> torch.Tensor:
    """The worth of the heads of all processes; one with fewer tokens is filled up."""
    if shard is None:
        return worth
    missing = shard.most(worth.shape[-1], worth.device) - worth.shape[-1]
    return shard.gather(torch.nn.functional.pad(worth, (0, missing), value=-math.inf))


def _of_these(kept: torch.Tensor, rooms: torch.Tensor, layer: Candidates, shard: HeadShard | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `compared` says of this process's heads, on the layer's device."""
    device, tokens = layer.worth.device, layer.worth.shape[-1]
    if shard is not None:
        heads = shard.span(kept.shape[1])
        kept, rooms = kept[:, heads, :tokens], rooms[:, heads]
    return kept.to(device), rooms.to(device).contiguous()


class Assembly:
    """The layers that wait for all others, to share their slots when the last one has read the prompt.

    Attributes:
        expected: How many layers there are.
    """

    def __init__(self, shard: HeadShard | None) -> None:
        self.shard, self.expected = shard, 0
        self._layers: list[tuple[Any, Candidates]] = []

    def add(self, layer: Any, candidates: Candidates) -> None:
        """Have a layer wait; the last one ends the waiting: each layer's `settle` is told which tokens stay, or None for all."""
        self._layers.append((layer, candidates))
        if len(self._layers) < self.expected:
            return
        (layers, parts), self._layers = zip(*self._layers, strict=True), []
        shares = [(None, None)] * len(parts) if all(part.fits for part in parts) else compared(parts, self.shard)
        for waiting, (kept, rooms) in zip(layers, shares, strict=True):
            waiting.settle(kept, rooms)

    def clear(self) -> None:
        """Forget layers of a pass that failed."""
        self._layers = []
