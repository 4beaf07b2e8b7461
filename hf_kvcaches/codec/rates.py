"""The step of all coefficients of a model with which their codes take a number of bits, and the tables that go with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_kvcaches.codec.entropy import LARGEST, TILE, TOKEN_LEVELS, Tables
from hf_kvcaches.codec.plan import (
    COARSE,
    LEVEL_OF_ONE,
    LEVELS,
    MOST_LOW_BITS,
    ROUNDING,
    TOKEN_BITS,
    Plan,
    levels_of_deviations,
    low_bits_of,
    rounded,
    tables_from,
    token_levels,
    token_weights,
)

_LEAST_BITS = 0.01  # of a direction that is coded
_LANE_BITS = 12 + 64 / TILE  # of a token, for its half of a lane's state, and its share of what a record says of a tile
_SEARCHES = 6
_COARSEST = 16  # how much larger the largest deviation may be than those that low bits do for
_HALF = LARGEST[1]


class Sample(NamedTuple):
    """Coefficients of some tokens of a layer.

    Args:
        order: The directions, the largest deviation first, (directions,).
        deviations: In this order, (directions,).
        coefficients: In deviations, (directions, tokens), float32.
    """

    order: torch.Tensor
    deviations: torch.Tensor
    coefficients: torch.Tensor


@dataclass(frozen=True, eq=False)
class StepQuantizer:
    """How the coefficients of all layers are packed.

    Args:
        step: Of all of them.
        tables: Of all layers.
        plans: One for each layer.
        bits: Of a token in all layers, expected.
        loss: The squared error of a token in all layers, expected.
    """

    step: float
    tables: Tables
    plans: tuple[Plan, ...]
    bits: float
    loss: float


def fit(samples: Sequence[Sample], bits: float, least_bits: float = _LEAST_BITS) -> StepQuantizer:
    """The quantizer that takes so many bits of a token.

    Args:
        least_bits: Directions that take less are left out.
    """
    deviations = torch.cat([sample.deviations for sample in samples])
    # With finer steps most of the largest integers would have no symbols, and in the end no 16 bits.
    finest = math.log2(max(float(deviations.max()), 1e-30) / (_COARSEST * COARSE * 2.0**MOST_LOW_BITS))
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


class _Layer:
    """The sample of a layer at one step."""

    def __init__(self, sample: Sample, step: float) -> None:
        self.order, self.deviations = sample.order, sample.deviations / step
        self.coefficients = sample.coefficients * self.deviations[:, None]
        self.levels, self.low_bits = levels_of_deviations(self.deviations), low_bits_of(self.deviations)
        of_tokens = token_levels(token_weights(self.deviations) @ self.coefficients.square())
        self.level_of = (self.levels[:, None].int() + of_tokens - TOKEN_LEVELS // 2).clamp_(0, LEVELS - 1)
        self.split = int((self.low_bits > 0).sum())
        self.integers, self.low = rounded(self.coefficients, self.low_bits[: self.split])

    def counts(self) -> torch.Tensor:
        """How often each integer is coded at each level, (32, 255)."""
        bins = self.integers.int().clamp_(-_HALF, _HALF).add_(_HALF).add_(self.level_of * (2 * _HALF + 1))
        return torch.bincount(bins.flatten(), minlength=LEVELS * (2 * _HALF + 1)).view(LEVELS, -1)

    def beyond(self, sums: torch.Tensor) -> None:
        """Add to how far coefficients of each level lie beyond their integers, and how many there are, (2, 32)."""
        coefficients, integers, level_of = (each[self.split :] for each in (self.coefficients, self.integers, self.level_of))
        inner = integers != 0
        beyond = coefficients.abs().sub_(integers.abs())[inner]
        sums.index_add_(1, level_of[inner], torch.stack([beyond, torch.ones_like(beyond)]))

    def loss(self, shifts: torch.Tensor, kept: int) -> float:
        """The mean squared error of a token in steps, if the first directions are kept."""
        found = self.integers.float()
        found[: self.split].mul_(2.0 ** self.low_bits[: self.split, None]).add_(self.low)
        found[self.split :].add_(shifts[self.level_of[self.split :]] * self.integers[self.split :].sign())
        found[kept:] = 0
        return float(found.sub_(self.coefficients).square_().sum()) / found.shape[1]

    def bits(self, bits_of: torch.Tensor) -> torch.Tensor:
        """Of each direction in the mean, (directions,); `bits_of` as from `tables_from`."""
        return bits_of.flatten()[self.level_of + LEVELS * self.levels[:, None]].mean(1) + self.low_bits


class _Model:
    """What integers are at one step, and how many bits of a token they take."""

    def __init__(self, samples: Sequence[Sample], step: float, least_bits: float) -> None:
        self.step, self.layers, counts = step, [_Layer(sample, step) for sample in samples], _prior()
        for layer in self.layers:
            counts += layer.counts()
        # An integer and its negative are as likely.
        both = (counts + counts.flip(1)).double()
        self.shares = both / both.sum(1, keepdim=True)
        _, bits_of = tables_from(self.shares, torch.zeros(LEVELS))
        bits = [layer.bits(bits_of) for layer in self.layers]
        self.kept = [int((own > least_bits).sum()) for own in bits]
        self.bits = sum(float(own[:kept].sum()) + TOKEN_BITS + _LANE_BITS for own, kept in zip(bits, self.kept, strict=True))

    def quantizer(self) -> StepQuantizer:
        """With the shifts that lose least."""
        sums, loss, plans = torch.zeros(2, LEVELS), 0.0, list[Plan]()
        for layer in self.layers:
            layer.beyond(sums)
        shifts = sums[0] / sums[1].clamp_min(1)
        for layer, kept in zip(self.layers, self.kept, strict=True):
            loss += layer.loss(shifts, kept) * self.step**2
            plans.append(Plan.of_deviations(layer.order[:kept], layer.deviations[:kept]))
        return StepQuantizer(self.step, tables_from(self.shares, shifts)[0], tuple(plans), self.bits, loss)


def _prior() -> torch.Tensor:
    """How often each integer is taken to have been seen at each level before any is, (32, 255): a Laplace distribution."""
    integers = torch.arange(-_HALF, _HALF + 1)
    scale = 2 ** ((torch.arange(LEVELS)[:, None] - LEVEL_OF_ONE) / 4) / math.sqrt(2)
    edges = ((integers.abs() - 0.5 + ROUNDING).clamp_min(0) / scale).neg().exp()
    outer = ((integers.abs() + 0.5 + ROUNDING) / scale).neg().exp()
    shares = torch.where(integers == 0, 1 - outer, (edges - outer) / 2)
    return 16 * shares / shares.sum(1, keepdim=True)
