"""How many bits each direction gets: the next ones go where they take off most distortion for each bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_kvcaches.codec.layout import packed_bytes
from hf_kvcaches.codec.sides import WIDTHS, CalibratedLayer
from hf_kvcaches.errors import ConfigError, is_number, whole_number

_WIDTHS_OF_BYTES = (1, 2, 4, 6, 8)


@dataclass(frozen=True)
class BitRule:
    """How bits are allotted; described in `KVCodec.at`. Made by `of`, which checks it.

    Args:
        rule: The argument and its value.
        widths: The bits that directions may have.
    """

    rule: dict[str, Any]
    widths: tuple[int, ...]

    @classmethod
    def of(cls, bytes_ratio: Any, rank: Any, energy: Any, widths: Any) -> BitRule:
        rules = {"bytes_ratio": bytes_ratio, "rank": rank, "energy": energy}
        rule = {name: value for name, value in rules.items() if value is not None}
        if len(rule) != 1:
            raise ConfigError.of("bytes_ratio, rank, energy", "exactly one of them", rule, "Try bytes_ratio=0.125.")
        for name in ("bytes_ratio", "energy"):
            if name in rule and not (is_number(rule[name]) and 0 < rule[name] <= 1):
                raise ConfigError.of(name, "a number above 0 and up to 1", rule[name], "It is a share, such as 0.125 of the bytes.")
        if "rank" in rule:
            pair = rank if isinstance(rank, tuple | list) else (rank, rank)
            expected = "an integer of at least 1, or two: (keys, values)"
            if len(pair) != 2:
                raise ConfigError.of("rank", expected, rank)
            rule["rank"] = tuple(whole_number("rank", each, 1, expected) for each in pair)
        if widths is None:
            widths = _WIDTHS_OF_BYTES if "bytes_ratio" in rule else (16,)
        listed = tuple(widths) if isinstance(widths, Sequence) and not isinstance(widths, str) else (widths,)
        if not listed or any(type(each) is not int or each not in WIDTHS for each in listed):
            raise ConfigError.of("widths", f"some of {WIDTHS}", widths)
        if "bytes_ratio" not in rule and len(listed) != 1:
            raise ConfigError.of("widths", f"one number with {next(iter(rule))}", widths)
        return cls(rule, tuple(sorted(set(listed))))

    def allot(self, layers: Sequence[CalibratedLayer]) -> list[CalibratedLayer]:
        """The layers with these bits."""
        [(name, value)] = self.rule.items()
        if name == "bytes_ratio":
            return by_bytes(layers, value, self.widths)
        return (by_rank if name == "rank" else by_energy)(layers, value, self.widths[0])


def by_bytes(layers: Sequence[CalibratedLayer], bytes_ratio: float, widths: Sequence[int]) -> list[CalibratedLayer]:
    """Spends a share of the bytes of exact keys and values in 16 bits, over all layers, heads and sides together.

    Args:
        widths: The bits that directions may have.
    """
    sides = [side for layer in layers for side in layer]
    bits = allot([side.distortions.flatten(0, 1) for side in sides], bytes_ratio * 2 * sum(layer.elements for layer in layers), widths)
    if not any(bool(each.any()) for each in bits):
        raise ConfigError.of("bytes_ratio", "enough for at least one direction", bytes_ratio, "Try 0.125.")
    return _with_widths(layers, [each.view(side.mean.shape) for side, each in zip(sides, bits, strict=True)])


def allot(distortions: Sequence[torch.Tensor], budget: float, widths: Sequence[int]) -> list[torch.Tensor]:
    """The bits of each direction with which a number of bytes loses least, (directions,) for each group of them.

    Args:
        distortions: For each group, which fills bytes of its own, what is lost of a direction at 0 bits and at each of `WIDTHS`,
            (directions, 1 + widths).
        budget: Bytes of a token.
        widths: The bits that directions may have.
    """
    steps = [_upgrades(group, widths) for group in distortions]
    gains, bits, directions = (torch.cat([step[place] for step in steps]) for place in range(3))
    owner = torch.cat([torch.full_like(step[2], place) for place, step in enumerate(steps)])
    order = gains.argsort(descending=True, stable=True)
    order = order[gains[order] > 0]

    def bought(count: int) -> list[torch.Tensor]:
        chosen, found = order[:count], []
        for place, group in enumerate(distortions):
            mine = chosen[owner[chosen] == place]
            found.append(torch.zeros(len(group), dtype=torch.int64).scatter_reduce(0, directions[mine], bits[mine], "amax"))
        return found

    # Whole bytes of each plane count, so the price of a number of upgrades is only known when they are laid out.
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(packed_bytes(each) for each in bought(middle)) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return bought(low)


def by_rank(layers: Sequence[CalibratedLayer], rank: tuple[int, int], width: int) -> list[CalibratedLayer]:
    """The same number of directions for all heads.

    Args:
        rank: Of keys and of values.
        width: Bits of each kept direction.
    """
    found = []
    for layer in layers:
        for side, kept in zip(layer, rank, strict=True):
            heads, dim = side.shape
            if kept > dim:
                raise ConfigError.of("rank", f"at most {dim}, the size of the model's heads", rank)
            found.append((torch.arange(dim) < kept).expand(heads, -1) * width)
    return _with_widths(layers, found)


def by_energy(layers: Sequence[CalibratedLayer], energy: float, width: int) -> list[CalibratedLayer]:
    """The fewest directions of each head that hold a share of its energy; all of them for 1."""
    found = []
    for side in (side for layer in layers for side in layer):
        sums = side.distortions[..., 0].double().cumsum(-1)
        before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], -1)
        kept = torch.ones_like(before, dtype=torch.bool) if energy == 1 else before < energy * sums[:, -1:]
        found.append(kept.long() * width)
    return _with_widths(layers, found)


def _with_widths(layers: Sequence[CalibratedLayer], widths: Sequence[torch.Tensor]) -> list[CalibratedLayer]:
    """The layers with the widths of their sides, keys and values in turn."""
    pairs = zip(widths[::2], widths[1::2], strict=True)
    return [
        CalibratedLayer(layer.keys.with_widths(keys), layer.values.with_widths(values))
        for layer, (keys, values) in zip(layers, pairs, strict=True)
    ]


def _upgrades(distortions: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All upgrades of some directions that are worth it: their gain for each bit, the width they lead to, and the direction.

    They follow the lower convex hull of a direction's distortions, so that each gains less than the one before.
    """
    levels = torch.tensor([0, *widths])
    columns = torch.tensor([0, *(1 + WIDTHS.index(width) for width in widths)])
    lost = distortions.double()[:, columns]
    directions, here = torch.arange(len(lost)), torch.zeros(len(lost), dtype=torch.int64)
    found = []
    for _ in widths:
        price = levels - levels[here][:, None]
        gains = (lost.gather(1, here[:, None]) - lost) / price.clamp_min(1)
        gain, there = gains.masked_fill(price <= 0, -torch.inf).max(1)
        worth = gain > 0
        found.append((gain[worth], levels[there[worth]], directions[worth]))
        here = torch.where(worth, there, here)
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))  # type: ignore[return-value]
