"""In which order, by which tables and with which step the coefficients of a token are coded.

First comes the token's level, then the low bits of directions whose integers are large, then the integers: alone those of the directions
with the largest deviations, in pairs those of the next, in fours the rest. Which table a group has depends on its deviation in steps, in 32
levels of a quarter of an octave, and on the level of the token. All coefficients of a model have one step, with which a sample of them
takes a number of bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from hf_kvcaches.codec.entropy import LARGEST, SIZES, TILE, TOKEN_LEVELS, Tables, tables_of, uniform_tables
from hf_kvcaches.errors import ArtifactError

# The levels of directions whose integers are coded in groups of each size, and the first table of each: behind those of low bits, for these
# levels and all tokens.
_LEVELS, _LEVEL_OF_ONE = 32, 12
_RANGES = {1: range(13, _LEVELS), 2: range(7, 13), 4: range(7)}
_FIRST = {1: 8, 2: 42, 4: 63}
TABLES = 85
_MOST_LOW_BITS, _TOKEN_BITS = 7, 4
_LANE_BITS = 12 + 64 / TILE  # of a token, for its half of a lane's state, and its share of what a record says of a tile
_LEAST_BITS = 0.01  # of a direction that is coded
# Deviations in steps: from which on low bits are coded as they are; from which on a direction says how large a token is.
_COARSE, _COUNTED = 10.0, 0.25
_COARSEST = 16  # how much larger the largest deviation may be than those that low bits do for
_ROUNDING = 0.1  # a coefficient is brought nearer to 0 by so much of a step before it is rounded
_HALF = LARGEST[1]
_SEARCHES = 6


def token_weights(deviations: torch.Tensor) -> torch.Tensor:
    """By which the squares of a token's coefficients are added up to tell its level, for each of the directions."""
    counted = deviations > _COUNTED
    return torch.where(counted, 1 / (deviations.square() * counted.sum().clamp_min(1)), 0.0)


def token_levels(squares: torch.Tensor) -> torch.Tensor:
    """The levels of tokens, int32, by their weighted sums of squares."""
    return (2 * squares.nan_to_num(0.0).clamp_min(2.0**-16).log2()).round_().add_(TOKEN_LEVELS // 2).clamp_(0, TOKEN_LEVELS - 1).int()


def rounded(coefficients: torch.Tensor, low_bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients in steps, (directions, tokens), as integers without the low bits of the first directions, and these bits, int16."""
    split, bits = len(low_bits), low_bits[:, None].int()
    wide = coefficients[:split].round().clamp_(-(2.0**30), 2.0**30).int()
    nearer = torch.nn.functional.softshrink(coefficients[split:], _ROUNDING).round_()
    integers = torch.cat([(wide >> bits).float(), nearer]).clamp_(-(2.0**15) + 1, 2.0**15 - 1)
    return integers.short(), (wide & ((1 << bits) - 1)).short()


def _low_bits_and_levels(deviations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By deviation in steps, how many bits of integers are coded as they are, and the level of what is left without these; int64."""
    low_bits = (deviations / _COARSE).log2().ceil().clamp(0, _MOST_LOW_BITS).long()
    levels = 4 * (deviations / 2.0**low_bits).clamp_min(2.0**-8).log2() + _LEVEL_OF_ONE
    return low_bits, levels.round().clamp(0, _LEVELS - 1).long()


@dataclass(frozen=True, eq=False)
class Plan:
    """How the integers of a layer's tokens are coded."""

    order: torch.Tensor  # the directions that are coded, the largest deviation first, (kept,), int64
    low_bits: torch.Tensor  # of the first of them, how many bits are coded as they are, (split,), int64
    levels: torch.Tensor  # of each group of directions, (groups,), int64
    counts: tuple[int, int, int]  # of the groups of each size, as in `SIZES`

    @classmethod
    def of_deviations(cls, order: torch.Tensor, deviations: torch.Tensor) -> Plan:
        """The plan for directions of these deviations in steps, the largest first."""
        low_bits, levels = _low_bits_and_levels(deviations)
        # Groups are full: directions that are too few for one go to the next smaller size.
        fours = int((levels < _RANGES[2].start).sum()) // 4
        pairs = (int((levels < _RANGES[1].start).sum()) - 4 * fours) // 2
        plan = cls(order, low_bits[low_bits > 0], levels, (len(order) - 2 * pairs - 4 * fours, pairs, fours))
        parts = zip(levels.split(plan.lengths), SIZES, strict=True)
        return replace(plan, levels=torch.cat([part.view(-1, size).float().mean(1).round().long() for part, size in parts]))

    def tensors(self) -> dict[str, torch.Tensor]:
        small = {"low_bits": self.low_bits.to(torch.uint8), "levels": self.levels.to(torch.uint8)}
        return {"order": self.order.int(), "counts": torch.tensor(self.counts, dtype=torch.int32)} | small

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], directions: int) -> Plan:
        """From `tensors`, if they make sense for a layer of so many directions."""
        order, low_bits, levels, counts = (tensors[name].long() for name in ("order", "low_bits", "levels", "counts"))
        distinct = len(order.unique()) == len(order) and bool(((order >= 0) & (order < directions)).all())
        known = bool((low_bits <= _MOST_LOW_BITS).all() & (low_bits > 0).all() & (levels < _LEVELS).all())
        whole = counts.shape == (3,) and bool((counts >= 0).all()) and int((counts * torch.tensor(SIZES)).sum()) == len(order)
        if not (distinct and known and whole and int(counts.sum()) == len(levels) and len(low_bits) <= int(counts[0])):
            raise ArtifactError("The order in which a layer's directions are coded makes no sense. Calibrate anew.")
        ones, pairs, fours = counts.tolist()
        return cls(order, low_bits, levels, (ones, pairs, fours))

    @property
    def split(self) -> int:
        """How many directions have low bits."""
        return len(self.low_bits)

    @property
    def lengths(self) -> list[int]:
        """How many directions are coded in groups of each size."""
        return [count * size for count, size in zip(self.counts, SIZES, strict=True)]

    @cached_property
    def ranks(self) -> torch.Tensor:
        """The integers' places in `order`: those alone, the first of all pairs, the second, the first of all fours and so on, (kept,)."""
        parts = torch.arange(len(self.order)).split(self.lengths)
        return torch.cat([part.view(-1, size).T.flatten() for part, size in zip(parts, SIZES, strict=True)])

    @property
    def integers(self) -> torch.Tensor:
        """The direction of each integer, (kept,)."""
        return self.order[self.ranks]

    @cached_property
    def symbols(self) -> torch.Tensor:
        """Of each symbol of a token, (symbols, 6), int32: its table, in tokens of level 0; whether others have the next ones; whether its
        integers have no shifts; how many there are; the number of the first among the digits, and how much further on each next one is.
        """
        rows = [[_TOKEN_BITS, 0, 0, 0, 0, 0], *([bits, 0, 0, 1, digit, 0] for digit, bits in enumerate(self.low_bits.tolist()))]
        start = self.split
        for count, size, levels in zip(self.counts, SIZES, self.levels.split(self.counts), strict=True):
            span = _RANGES[size]
            tables = (_FIRST[size] + levels.clamp(span.start, span.stop - 1) - span.start).tolist()
            rows += [[table, 1, size == 1 and place < self.split, size, start + place, count] for place, table in enumerate(tables)]
            start += count * size
        return torch.tensor(rows, dtype=torch.int32)


class Sample(NamedTuple):
    """Coefficients of some tokens of a layer."""

    order: torch.Tensor  # the directions, the largest deviation first, (directions,)
    deviations: torch.Tensor  # in this order, (directions,)
    coefficients: torch.Tensor  # in deviations, (directions, tokens), float32


class StepQuantizer(NamedTuple):
    """How the coefficients of all layers are packed: their step, the tables, and a plan for each layer."""

    step: float
    tables: Tables
    plans: tuple[Plan, ...]
    bits: float  # of a token in all layers, expected
    loss: float  # the squared error of a token in all layers, expected


def fit(samples: Sequence[Sample], bits: float, least_bits: float = _LEAST_BITS) -> StepQuantizer:
    """The quantizer that takes so many bits of a token, and leaves out directions that take less than `least_bits`."""
    deviations = torch.cat([sample.deviations for sample in samples])
    # With finer steps most of the largest integers would have no symbols, and in the end no 16 bits.
    finest = math.log2(max(float(deviations.max()), 1e-30) / (_COARSEST * _COARSE * 2.0**_MOST_LOW_BITS))
    # The secant method, from where normal distributions would take about as many bits.
    octave = max(_normal_octave(deviations, bits), finest)
    found, slope = _Model(samples, 2.0**octave, least_bits), -float(len(deviations))
    for _ in range(_SEARCHES):
        following = max(octave + min(max((bits - found.bits) / slope, -2.0), 2.0), finest)
        if abs(following - octave) < 1e-4:
            break
        before, (octave, found) = (octave, found.bits), (following, _Model(samples, 2.0**following, least_bits))
        slope = min((found.bits - before[1]) / (octave - before[0]), -1.0)
    return found.quantizer()


def _normal_octave(deviations: torch.Tensor, bits: float) -> float:
    """The logarithm of the step with which normal coefficients of these deviations take so many bits."""
    rates = deviations.clamp_min(1e-30).log2() + math.log2(math.sqrt(2 * math.pi * math.e))
    low, high = float(rates.max()) - bits - 1, float(rates.max())
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if float((rates - middle).clamp_min(0).sum()) > bits else (low, middle)
    return low


class _Model:
    """What integers are at one step, and how many bits of a token they take."""

    def __init__(self, samples: Sequence[Sample], step: float, least_bits: float) -> None:
        self.step, self.layers, counts = step, [_Layer(sample, step) for sample in samples], _prior()
        for layer in self.layers:
            bins = layer.integers.int().clamp_(-_HALF, _HALF).add_(_HALF).add_(layer.level_of * counts.shape[1])
            counts.view(-1).add_(torch.bincount(bins.flatten(), minlength=counts.numel()))
        # An integer and its negative are as likely.
        both = (counts + counts.flip(1)).double()
        self.shares = both / both.sum(1, keepdim=True)
        _, bits_of = _tables_from(self.shares, torch.zeros(_LEVELS))
        bits = [bits_of.flatten()[own.level_of + _LEVELS * own.levels[:, None]].mean(1) + own.low_bits for own in self.layers]
        self.kept = [int((own > least_bits).sum()) for own in bits]
        self.bits = sum(float(own[:kept].sum()) + _TOKEN_BITS + _LANE_BITS for own, kept in zip(bits, self.kept, strict=True))

    def quantizer(self) -> StepQuantizer:
        """With the shifts that lose least."""
        sums = torch.zeros(2, _LEVELS)
        for layer in self.layers:
            coefficients, integers, level_of = (own[layer.split :] for own in (layer.coefficients, layer.integers, layer.level_of))
            beyond = coefficients.abs().sub_(integers.abs())[integers != 0]
            sums.index_add_(1, level_of[integers != 0], torch.stack([beyond, torch.ones_like(beyond)]))
        shifts = sums[0] / sums[1].clamp_min(1)
        coded = [*zip(self.layers, self.kept, strict=True)]
        plans = tuple(Plan.of_deviations(layer.order[:kept], layer.deviations[:kept]) for layer, kept in coded)
        loss = sum(layer.loss(shifts, kept) * self.step**2 for layer, kept in coded)
        return StepQuantizer(self.step, _tables_from(self.shares, shifts)[0], plans, self.bits, loss)


class _Layer:
    """The sample of a layer at one step: coefficients as integers and low bits, and the level of each direction in each token."""

    def __init__(self, sample: Sample, step: float) -> None:
        self.order, self.deviations = sample.order, sample.deviations / step
        self.coefficients = sample.coefficients * self.deviations[:, None]
        self.low_bits, self.levels = _low_bits_and_levels(self.deviations)
        of_tokens = token_levels(token_weights(self.deviations) @ self.coefficients.square())
        self.level_of = (self.levels[:, None].int() + of_tokens - TOKEN_LEVELS // 2).clamp_(0, _LEVELS - 1)
        self.split = int((self.low_bits > 0).sum())
        self.integers, self.low = rounded(self.coefficients, self.low_bits[: self.split])

    def loss(self, shifts: torch.Tensor, kept: int) -> float:
        """The mean squared error of a token in steps, if the first directions are kept."""
        found = self.integers.float()
        found[: self.split].mul_(2.0 ** self.low_bits[: self.split, None]).add_(self.low)
        found[self.split :].add_(shifts[self.level_of[self.split :]] * self.integers[self.split :].sign())
        found[kept:] = 0
        return float(found.sub_(self.coefficients).square_().sum()) / found.shape[1]


def _prior() -> torch.Tensor:
    """How often each integer is taken to have been seen at each level before any is, (32, 255): a Laplace distribution."""
    integers = torch.arange(-_HALF, _HALF + 1)
    scale = 2 ** ((torch.arange(_LEVELS)[:, None] - _LEVEL_OF_ONE) / 4) / math.sqrt(2)
    edges = ((integers.abs() - 0.5 + _ROUNDING).clamp_min(0) / scale).neg().exp()
    outer = ((integers.abs() + 0.5 + _ROUNDING) / scale).neg().exp()
    shares = torch.where(integers == 0, 1 - outer, (edges - outer) / 2)
    return 16 * shares / shares.sum(1, keepdim=True)


def _tables_from(shares: torch.Tensor, shifts: torch.Tensor) -> tuple[Tables, torch.Tensor]:
    """All tables, and the bits of an integer, (levels, levels): at the level of a direction, and at that of the direction in a token.

    Shares are of the integers from -127 to 127 at each level, (32, 255); shifts are those of levels, (32,).
    """
    parts, bits = [uniform_tables(_MOST_LOW_BITS + 1)], torch.empty(_LEVELS, _LEVELS)
    for size, span in _RANGES.items():
        tables, of_level = tables_of(shares, shifts, size)
        levels = torch.arange(span.start - TOKEN_LEVELS // 2, span.stop + TOKEN_LEVELS // 2 - 1).clamp(0, _LEVELS - 1)
        parts.append(Tables(*(tensor[levels] for tensor in tables.tensors().values())))
        bits[span.start : span.stop] = of_level.float()
    return Tables(*map(torch.cat, zip(*(part.tensors().values() for part in parts), strict=True))), bits
