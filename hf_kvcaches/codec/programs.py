"""How coefficients become integers, and in which order and by which tables the integers of a layer are coded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import fmean

import torch

from hf_kvcaches.codec.entropy import GROUP, HALVES, TILE, Tables, tables_of, uniform_tables
from hf_kvcaches.errors import ArtifactError

LEVELS = 32
"""Tables of each size of a group, by the deviation of the integers: a quarter of an octave each."""
TOKEN_LEVELS = 16
"""By so many levels, less 8, a token's coefficients may all be larger than in the mean."""
_LEVEL_OF_ONE = 12
_MOST_LOW_BITS = 7
NOTHING = GROUP * LEVELS
"""The table of steps that code nothing, before those of 1 to 7 low bits."""
_TOKEN_BITS = 4
_ROUNDING = 0.4  # a coefficient of so much less than a whole number of steps is rounded up to it
_LEAST_BITS = 0.01  # directions that take less are left out
_COARSE = 10.0  # deviation, in steps, from which on low bits are coded as they are
_COUNTED = 0.25  # deviation, in steps, of directions that say how large a token is
_WIDER = 2  # levels; groups are of a size that does for tokens so much larger
_LANE_BITS = 12 + 64 / TILE  # of a token, for its half of a lane's state, and its share of what a record says of a tile
_SAMPLED = 1 << 24  # numbers


def integers_of(coefficients: torch.Tensor, step: float) -> torch.Tensor:
    """Coefficients in steps, int32."""
    return (coefficients.abs() / step).add_(_ROUNDING).floor_().copysign_(coefficients).int()


@dataclass(frozen=True, eq=False)
class Program:
    """In which order the integers of a layer's tokens are coded.

    Args:
        order: The directions that are coded, the largest deviation first, (kept,), int64.
        low_bits: Of each, how many bits are coded as they are, (kept,), int64.
        levels: Of each group of directions, (groups,), int64.
        sizes: Directions of each group, (groups,), int64; the last one may lack some.
        deviations: Of the directions that say how large a token is, in steps, (counted,); the first of the order.
    """

    order: torch.Tensor
    low_bits: torch.Tensor
    levels: torch.Tensor
    sizes: torch.Tensor
    deviations: torch.Tensor

    def to(self, device: torch.device) -> Program:
        """The same on another device."""
        return Program(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, in small types."""
        small = {name: getattr(self, name).to(torch.uint8) for name in ("low_bits", "levels", "sizes")}
        return {"order": self.order.int(), "counted": self.deviations} | small

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], directions: int) -> Program:
        """From `tensors`, if they make sense.

        Args:
            directions: Of the layer.
        """
        order, low_bits, levels, sizes = (tensors[name].long() for name in ("order", "low_bits", "levels", "sizes"))
        program = cls(order, low_bits, levels, sizes, tensors["counted"])
        order, sizes, kept = program.order, program.sizes, len(program.order)
        distinct = len(order.unique()) == kept == len(program.low_bits) and bool(((order >= 0) & (order < directions)).all())
        known = bool(
            (program.low_bits <= _MOST_LOW_BITS).all() and (program.levels < LEVELS).all() and ((sizes > 0) & (sizes <= GROUP)).all()
        )
        covered = len(sizes) == len(program.levels) and (kept <= int(sizes.sum()) < kept + GROUP) and len(program.deviations) <= kept
        if not (distinct and known and covered and bool((program.deviations > 0).all())):
            raise ArtifactError("The order in which a layer's directions are coded makes no sense. Calibrate anew.")
        return program

    @cached_property
    def split(self) -> torch.Tensor:
        """The directions, by their place in the order, whose low bits are coded as they are; int64."""
        return self.low_bits.nonzero()[:, 0]

    @cached_property
    def rows(self) -> torch.Tensor:
        """The table of each step in tokens of each level, (steps, 16), int32: the token's level, groups, then low bits."""
        offsets = torch.arange(TOKEN_LEVELS, device=self.levels.device) - TOKEN_LEVELS // 2
        groups = (self.sizes[:, None] - 1) * LEVELS + (self.levels[:, None] + offsets).clamp(0, LEVELS - 1)
        plain = torch.cat([self.levels.new_tensor([_TOKEN_BITS]), self.low_bits[self.split]]) + NOTHING
        first, low = plain[:, None].expand(-1, TOKEN_LEVELS).split([1, len(self.split)])
        return torch.cat([first, groups, low]).int()

    @cached_property
    def step_sizes(self) -> torch.Tensor:
        """Integers of each step, (steps,), int64."""
        one = self.sizes.new_ones(1)
        return torch.cat([one, self.sizes, one.expand(len(self.split))])

    @cached_property
    def sources(self) -> torch.Tensor:
        """Which integers each step codes, (4, steps), int64: of directions by their place, low bits, the token's level, and a 0."""
        kept, low, groups = len(self.order), len(self.split), len(self.sizes)
        real = torch.arange(GROUP, device=self.sizes.device) < self.sizes[:, None]
        places = real.flatten().cumsum(0).view_as(real) - 1
        sources = places.new_full((len(self.step_sizes), GROUP), kept + low + 1)
        sources[0, 0] = kept + low
        sources[1 : 1 + groups] = torch.where(real & (places < kept), places, kept + low + 1)
        sources[1 + groups :, 0] = kept + torch.arange(low, device=places.device)
        return sources.T.contiguous()

    @cached_property
    def places(self) -> torch.Tensor:
        """Where each integer is among the digits of all steps, (kept + low,), int64."""
        flat, count = self.sources.T.flatten(), len(self.order) + len(self.split)
        real = (flat < count).nonzero()[:, 0]
        return torch.empty_like(real).scatter_(0, flat[real], real)

    def token_levels(self, coefficients: torch.Tensor) -> torch.Tensor:
        """How large each token is, (tokens,), int32 from 0 on.

        Args:
            coefficients: In steps, (kept, tokens).
        """
        count = len(self.deviations)
        squares = (
            (coefficients[:count] / self.deviations[:, None]).square_().mean(0) if count else coefficients.new_ones(coefficients.shape[1])
        )
        return (2 * squares.clamp_min(2.0**-16).log2()).round_().add_(TOKEN_LEVELS // 2).clamp_(0, TOKEN_LEVELS - 1).int()

    def groups_of(self, integers: torch.Tensor, token_levels: torch.Tensor) -> torch.Tensor:
        """What each step codes, (4, steps, tokens), int32.

        Args:
            integers: (kept, tokens), int32.
            token_levels: (tokens,), int32.
        """
        shifts, split = self.low_bits[:, None].int(), self.split
        low = integers[split] & ((1 << shifts[split]) - 1)
        parts = torch.cat([integers >> shifts, low, token_levels[None], torch.zeros_like(token_levels)[None]])
        return parts.index_select(0, self.sources.flatten()).view(GROUP, len(self.step_sizes), -1)

    def integers_of(self, groups: torch.Tensor) -> torch.Tensor:
        """The inverse, (kept, tokens), int16.

        Args:
            groups: (steps, tokens, 4), int16.
        """
        digits, kept = groups.transpose(1, 2).flatten(0, 1).index_select(0, self.places), len(self.order)
        integers = digits[:kept] << self.low_bits[:, None].short()
        return integers.index_add_(0, self.split, digits[kept:]) if len(self.split) else integers

    def shifts_of(self, shifts: torch.Tensor, token_levels: torch.Tensor) -> torch.Tensor:
        """How far each coefficient lies beyond its integer, (kept, tokens).

        Args:
            shifts: For each level, (32,).
            token_levels: (tokens,), int32.
        """
        levels = self.rows[1 : 1 + len(self.sizes)] % LEVELS
        of_group = shifts[levels.long()].index_select(1, token_levels)
        return of_group.index_select(0, self.places[: len(self.order)] // GROUP - 1)


@dataclass(frozen=True, eq=False)
class StepQuantizer:
    """How the coefficients of all layers are packed.

    Args:
        step: Of all of them.
        shifts: How far coefficients of a level lie beyond their integers, in steps, in the mean, (32,).
        tables: Of all layers.
        programs: One for each layer.
        bits: Of a token in all layers, expected.
        loss: The squared error of a token in all layers, expected.
    """

    step: float
    shifts: torch.Tensor
    tables: Tables
    programs: tuple[Program, ...]
    bits: float
    loss: float


def fit(samples: Sequence[torch.Tensor], bits: float) -> StepQuantizer:
    """The quantizer that takes so many bits of a token.

    Args:
        samples: Coefficients, (tokens, directions) for each layer.
    """
    tokens = max(1, _SAMPLED // sum(layer.shape[1] for layer in samples))
    columns = [layer[:tokens].T.contiguous() for layer in samples]
    spread = math.sqrt(sum(float(layer.square().sum()) for layer in columns) / sum(layer.numel() for layer in columns))
    low, high = (math.log(max(spread, 1e-30) * factor) for factor in (2.0**-10, 2.0**6))
    most = least = 0.0
    for _ in range(7):
        middle = (low + high) / 2
        expected = _Counts.of(columns, math.exp(middle)).bits
        low, high, most, least = (middle, high, expected, least) if expected > bits else (low, middle, most, expected)
    slope = (least - most) / (high - low) if most else -1.0
    chosen = low + (bits - most) / slope if most and slope < 0 else high
    quantizer = quantizer_of(columns, math.exp(chosen))
    # Tables take a little more than the entropy.
    return quantizer_of(columns, math.exp(chosen + (bits - quantizer.bits) / slope)) if most and slope < 0 else quantizer


@dataclass(frozen=True, eq=False)
class _Counts:
    """What coefficients are at one step.

    Args:
        layers: (directions, tokens) each.
        counts: How often each integer is coded at each level, (32, 255).
        sums: How far coefficients of each level lie beyond their integers, in the sum, and how many, (2, 32).
    """

    layers: Sequence[_Sampled]
    counts: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[torch.Tensor], step: float) -> _Counts:
        layers, counts, sums = [_Sampled(sample / step) for sample in samples], _prior(), torch.zeros(2, LEVELS)
        for layer in layers:
            layer.count(counts, sums)
        return cls(layers, counts, sums)

    @cached_property
    def shares(self) -> torch.Tensor:
        """(32, 255), float64; an integer and its negative are as likely."""
        both = (self.counts + self.counts.flip(1)).double()
        return both / both.sum(1, keepdim=True)

    @cached_property
    def entropies(self) -> torch.Tensor:
        """In bits, (32,), float32."""
        return (-torch.xlogy(self.shares, self.shares).sum(1) / math.log(2)).float()

    @property
    def bits(self) -> float:
        """Of a token in all layers, at the least."""
        total = 0.0
        for layer in self.layers:
            own = self.entropies[layer.level_of].mean(1)
            total += float((own + layer.low_bits)[own > _LEAST_BITS].sum()) + _TOKEN_BITS + _LANE_BITS
        return total


def quantizer_of(samples: Sequence[torch.Tensor], step: float) -> StepQuantizer:
    """The quantizer with one step.

    Args:
        samples: Coefficients, (directions, tokens) for each layer.
    """
    counted = _Counts.of(samples, step)
    shifts, (tables, sizes) = counted.sums[0] / counted.sums[1].clamp_min(1), _tables(counted.shares)
    programs, bits, loss = [], 0.0, 0.0
    for layer in counted.layers:
        program = layer.program(counted.entropies, sizes)
        kept, tokens = len(program.order), layer.integers.shape[1]
        integers, coefficients = layer.integers[:kept], layer.coefficients
        rows = program.rows.index_select(1, layer.token_levels)
        symbols = tables.symbols_of(program.groups_of(integers, layer.token_levels), rows, program.step_sizes)
        bits += float(tables.bits(symbols, rows).sum()) / tokens + _LANE_BITS
        decoded = integers + integers.sign() * program.shifts_of(shifts, layer.token_levels)
        lost = (decoded - coefficients[:kept]).square().sum() + coefficients[kept:].square().sum()
        loss += float(lost) * step**2 / tokens
        programs.append(program)
    return StepQuantizer(step, shifts, tables, tuple(programs), bits, loss)


class _Sampled:
    """Coefficients of a layer's sample in steps, (directions, tokens), those of the largest deviation first."""

    def __init__(self, coefficients: torch.Tensor) -> None:
        deviations = coefficients.square().mean(1).sqrt()
        self.order = deviations.argsort(descending=True, stable=True)
        self.coefficients, self.deviations = coefficients[self.order], deviations[self.order]
        self.low_bits = (self.deviations / _COARSE).log2().ceil().clamp(0, _MOST_LOW_BITS).long()
        levels = 4 * (self.deviations / 2.0**self.low_bits).clamp_min(2.0**-8).log2() + _LEVEL_OF_ONE
        self.levels = levels.round().clamp(0, LEVELS - 1).long()
        self.counted = self.deviations[: int((self.deviations > _COUNTED).sum())]
        none = self.order[:0]
        self.token_levels = Program(self.order, self.low_bits, none, none, self.counted).token_levels(self.coefficients)
        self.integers = integers_of(self.coefficients, 1.0)
        self.level_of = (self.levels[:, None] + self.token_levels - TOKEN_LEVELS // 2).clamp_(0, LEVELS - 1)

    def count(self, counts: torch.Tensor, sums: torch.Tensor) -> None:
        """Add to how often each integer is coded at each level, and to how far coefficients lie beyond their integers."""
        bins = (self.integers >> self.low_bits[:, None].int()).clamp_(-HALVES[1], HALVES[1]).add_(HALVES[1])
        index = self.level_of * counts.shape[1] + bins
        counts.view(-1).add_(torch.bincount(index.flatten(), minlength=counts.numel()))
        inner = self.integers != 0
        beyond = (self.coefficients.abs() - self.integers.abs())[inner]
        sums.index_add_(1, self.level_of[inner], torch.stack([beyond, torch.ones_like(beyond)]))

    def program(self, bits_of: torch.Tensor, size_of: list[int]) -> Program:
        """How the directions are coded that take some bits.

        Args:
            bits_of: Of an integer at each level, (32,).
            size_of: Of groups of each level.
        """
        kept = int((bits_of[self.level_of].mean(1) > _LEAST_BITS).sum())
        listed, levels, sizes, place = self.levels[:kept].tolist(), [], [], 0
        while place < kept:
            sizes.append(size_of[listed[place]])
            levels.append(round(fmean(listed[place : place + sizes[-1]])))
            place += sizes[-1]
        own, size = (torch.tensor(each, dtype=torch.int64) for each in (levels, sizes))
        return Program(self.order[:kept], self.low_bits[:kept], own, size, self.counted[:kept])


def _prior() -> torch.Tensor:
    """How often each integer is taken to have been seen at each level before any is, (32, 255)."""
    integers = torch.arange(-HALVES[1], HALVES[1] + 1)
    scale = 2 ** ((torch.arange(LEVELS)[:, None] - _LEVEL_OF_ONE) / 4) / math.sqrt(2)  # of a Laplace distribution
    edges = ((integers.abs() - _ROUNDING).clamp_min(0) / scale).neg().exp()
    outer = ((integers.abs() + 1 - _ROUNDING) / scale).neg().exp()
    shares = torch.where(integers == 0, 1 - outer, (edges - outer) / 2)
    return 16 * shares / shares.sum(1, keepdim=True)


def _tables(shares: torch.Tensor) -> tuple[Tables, list[int]]:
    """All tables, and for each level the size of its groups.

    Args:
        shares: Of the integers at each level, (32, 255).
    """
    found = [tables_of(shares, size) for size in HALVES]
    bits = torch.stack([rows.bits for rows in found])  # (sizes, levels)
    wider = bits[:, (torch.arange(LEVELS) + _WIDER).clamp_max(LEVELS - 1)]
    # More integers in a symbol are less work.
    good = wider <= 1.005 * wider.amin(0) + 1e-3
    sizes = (good * torch.tensor(list(HALVES))[:, None]).amax(0).tolist()
    rows = [*found, uniform_tables(_MOST_LOW_BITS)]
    of_rows = [size for size in HALVES for _ in range(LEVELS)] + [1] * (_MOST_LOW_BITS + 1)
    digits, frequencies = torch.cat([each.digits for each in rows]), torch.cat([each.frequencies for each in rows])
    return Tables(digits, frequencies, torch.tensor(of_rows, dtype=torch.int32)), sizes
