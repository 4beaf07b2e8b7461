"""How many tokens each layer keeps, and which: in each head alike, or with a budget that heads, or heads and layers, share.

Few heads recall, and keep nothing of use where all heads have the same budget. So the scores of all heads are compared: within a layer as
in Ada-KV (arXiv 2407.11550), over all layers as in KVzip (arXiv 2505.23416).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.equip.storage import Slots
from hf_kvcaches.errors import ConfigError, is_number, whole_number

# One in so many of a head's slots, beyond those of sinks and recent tokens, is reserved for that head. With Ada-KV's one in five, twice as
# many needles are lost when an eighth of a text is kept.
_FLOOR = 20


class Limit(NamedTuple):
    """How many tokens stay, and how many of the newest whatever they are worth."""

    slots: int
    recent: int


def resolve_budgets(budget: Any, layers: Any) -> tuple[int | float, ...]:
    """Return one checked budget per layer; `layers` is their number or a model's config."""
    layers = layers if isinstance(layers, int) else len(compat.layer_plan(layers))
    if not isinstance(budget, Sequence) or isinstance(budget, str):
        return (one_budget("budget", budget),) * layers
    if len(budget) != layers:
        raise ConfigError.of("budget", f"one value for each of {layers} layers", f"{len(budget)} values", "Pass one number for all layers.")
    return tuple(one_budget(f"budget[{layer}]", share) for layer, share in enumerate(budget))


def one_budget(name: str, budget: Any) -> int | float:
    """A budget that is a single number, checked, as a plain number."""
    if isinstance(budget, Integral) and not isinstance(budget, bool) and int(budget) >= 1:
        return int(budget)
    if isinstance(budget, float) and 0 < budget <= 1:
        return budget
    hint = f"Write {int(budget)} for tokens." if isinstance(budget, float) and budget > 1 and budget.is_integer() else ""
    raise ConfigError.of(name, "an integer of at least 1 (tokens), or a float above 0 and up to 1 (share of the prompt)", budget, hint)


def slots_for(budget: int | float, prompt_tokens: int, least: int = 1) -> int:
    """How many tokens a layer keeps of a prompt; a share of it is no fewer than `least`."""
    return budget if isinstance(budget, int) else max(least, int(budget * prompt_tokens))


def pyramid_budgets(model: Any, budget: int, *, beta: float = 20, floor: int | None = None) -> list[int]:
    """Budgets that fall linearly from the first layer to the last and are `budget` on average.

    PyramidKV (Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv 2406.02069): attention is spread over the
    text in low layers and gathers on few tokens in high ones. Pass the result as the budget of a cache.

    Args:
        model: A model, its config, or the number of layers.
        budget: Mean number of tokens for each layer. The budgets sum up to exactly that many for all layers.
        beta: How steep: what is shared out above the floor is `beta` times smaller than the mean in the last layer. At least 1 (flat).
        floor: Tokens that every layer gets beforehand, such as sinks and recent tokens. None: 68 (SnapKV's window and four sinks), but
            at most half of the budget.
    """
    layers = model if isinstance(model, Integral) else len(compat.layer_plan(compat.split_model(model)[1]))
    layers, budget = whole_number("layers", layers, 1), whole_number("budget", budget, 1)
    if not is_number(beta) or not beta >= 1:
        raise ConfigError.of("beta", "a number of at least 1", beta)
    floor = min(68, budget // 2) if floor is None else floor
    floor = whole_number("floor", floor, 0, f"an integer from 0 to the budget ({budget})", most=budget)
    mean, last = budget - floor, layers - 1
    step = 2 * (mean - mean / beta) / max(last, 1)
    shares = [mean / beta + step * (last - layer) if last else mean for layer in range(layers)]
    by_remainder = sorted(range(layers), key=lambda layer: (int(shares[layer]) - shares[layer], layer))
    missing = layers * mean - sum(map(int, shares))
    return [floor + int(share) + (layer in by_remainder[:missing]) for layer, share in enumerate(shares)]


class Candidates(NamedTuple):
    """The tokens of a layer of which some stay."""

    worth: torch.Tensor  # +inf for protected tokens, -inf where there is none, (batch, 1 or kv_heads, tokens)
    budget: int  # how many stay in each head, in the mean
    slots: int  # how many slots each head has afterwards, in the mean
    fits: bool = False  # whether all may stay, and all heads have as many slots


def protected(scores: torch.Tensor, positions: torch.Tensor, count: int | torch.Tensor, sinks: int, recent: int) -> torch.Tensor:
    """Scores, (batch, 1 or kv_heads, tokens), with +inf for sinks and recent ones of `count` tokens, and -inf for no token."""
    worth = torch.where((positions < sinks) | (positions >= count - recent), math.inf, scores)
    return torch.where(positions < 0, -math.inf, worth)


def best(worth: torch.Tensor, positions: torch.Tensor, count: int) -> Slots:
    """The tokens with the highest worth, in order of position, those that are none last, (batch, 1 or kv_heads, count)."""
    index = worth.topk(min(count, worth.shape[-1]), -1, sorted=False).indices
    chosen = positions.expand(index.shape[0], max(index.shape[1], positions.shape[1]), -1).take_along_dim(index, -1)
    order = by_position(chosen, chosen >= 0)
    return index.expand_as(order).gather(-1, order)


def by_position(positions: torch.Tensor, first: torch.Tensor) -> Slots:
    """Indices of tokens in order of position, those where `first` is False last."""
    return torch.where(first, positions, torch.iinfo(positions.dtype).max).argsort(dim=-1, stable=True)


def compared(layers: Sequence[Candidates], shard: HeadShard | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer, True for tokens that stay, (batch, kv_heads, tokens), and how many slots each head gets, (batch, kv_heads, 1).

    The layers' heads share all their slots: scores have to mean the same in them.
    """
    device = layers[-1].worth.device
    worths = [layer.worth.to(device) for layer in layers]
    if shard is not None:  # a process with fewer tokens fills up
        widths = [shard.most(worth.shape[-1], device) for worth in worths]
        fill = torch.nn.functional.pad
        worths = [shard.gather(fill(x, (0, width - x.shape[-1]), value=-math.inf)) for x, width in zip(worths, widths, strict=True)]
    heads, flat = [worth.shape[1] for worth in worths], []
    for worth, layer in zip(worths, layers, strict=True):  # each head's own best count as protected, too
        guarded = worth.isposinf().sum(-1, keepdim=True)
        floor = guarded + ((layer.budget - guarded).clamp(min=0) + _FLOOR - 1) // _FLOOR
        flat.append(torch.where(with_rooms(worth, floor), math.inf, worth).flatten(1))
    joint = torch.cat(flat, 1)
    total = sum(layer.budget * count for layer, count in zip(layers, heads, strict=True))
    chosen = torch.zeros_like(joint, dtype=torch.bool).scatter_(1, joint.topk(min(total, joint.shape[1]), 1, sorted=False).indices, True)
    chosen &= joint > -math.inf
    parts = chosen.split([worth.shape[1] * worth.shape[2] for worth in worths], 1)
    kept = [part.view_as(worth) for part, worth in zip(parts, worths, strict=True)]
    rooms = torch.cat([part.sum(-1) for part in kept], 1)
    slots = sum(layer.slots * count for layer, count in zip(layers, heads, strict=True))
    left = (slots - rooms.sum(1, keepdim=True)).clamp(min=0)  # what short rows and a budget for decoding leave goes to all heads alike
    number = torch.arange(rooms.shape[1], device=device)
    rooms = (rooms + left // rooms.shape[1] + (number < left % rooms.shape[1]))[..., None]
    shares = []
    for part, room, layer in zip(kept, rooms.split(heads, 1), layers, strict=True):
        own = slice(None) if shard is None else shard.span(part.shape[1])
        part, room = part[:, own, : layer.worth.shape[-1]], room[:, own]
        shares.append((part.to(layer.worth.device), room.to(layer.worth.device).contiguous()))
    return shares


def with_rooms(worth: torch.Tensor, rooms: torch.Tensor) -> torch.Tensor:
    """True for tokens that stay where each head keeps a number of its own, (batch or 1, kv_heads, 1): (batch, kv_heads, tokens)."""
    order = worth.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    return (ranks < rooms) & (worth > -math.inf)


class Assembly:
    """The layers that wait for all `expected` ones, to share their slots when the last one has read the prompt."""

    def __init__(self, shard: HeadShard | None) -> None:
        self.shard, self.expected = shard, 0
        self._layers: list[tuple[Any, Candidates]] = []

    def add(self, layer: Any, candidates: Candidates) -> None:
        """Have a layer wait; the last one ends the waiting: each layer's `settle` is told which tokens stay, or None for all."""
        if any(layer is waiting for waiting, _ in self._layers):
            self.clear()  # what waited before failed
        self._layers.append((layer, candidates))
        if len(self._layers) < self.expected:
            return
        (layers, parts), self._layers = zip(*self._layers, strict=True), []
        shares = [(None, None)] * len(parts) if all(part.fits for part in parts) else compared(parts, self.shard)
        for waiting, (kept, rooms) in zip(layers, shares, strict=True):
            waiting.settle(kept, rooms)

    def clear(self) -> None:
        self._layers = []
