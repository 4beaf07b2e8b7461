"""How the bases of a head follow its text, written down plainly: one token after the other, and nothing is forgotten."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hf_kvcaches.codec.sides import CalibratedSide

TILE = 16
BITS = (1, 2, 3, 4, 5, 6, 8, 16, 24)


class Slot(NamedTuple):
    """A direction that has bits.

    Args:
        unit: Its step, for an energy of 1.
        loss: What is lost of an energy, as a share.
    """

    width: int
    unit: float
    loss: float


class Step(NamedTuple):
    """What one token became.

    Args:
        vector: What its codes stand for, (d,).
        basis: The number of its basis.
        near: Whether another order of arithmetic may give it other codes.
    """

    vector: torch.Tensor
    basis: int
    near: bool


def clipped(energy: float, reach: float) -> float:
    """What is lost of normally distributed numbers that are clipped to -reach and reach."""
    if energy <= 0:
        return 0.0
    far = reach / energy**0.5
    density = math.exp(-(far**2) / 2) / (2 * math.pi) ** 0.5
    return (energy + reach**2) * math.erfc(far / 2**0.5) - 2 * reach * energy**0.5 * density


@dataclass
class FollowingOracle:
    """One head of one row.

    Args:
        limit: Of a tile's loss, as a share of its length; None for what was calibrated, or 1.5 times that of a new basis.
        rows: None for all outer products; how many remain with Frequent Directions.

    Attributes:
        close: Whether another order of arithmetic may give another basis.
    """

    side: CalibratedSide
    head: int
    chunk: int
    limit: float | None = None
    decay: float = 1.0
    agreement: float = 0.0
    rows: int | None = None
    close: bool = False
    kept: list[torch.Tensor] = field(default_factory=list)  # each with its energy's weight in its length

    def follow(self, vectors: torch.Tensor, warmup: int = 0) -> list[Step]:
        """What each token becomes.

        Args:
            vectors: All, (n, d).
            warmup: How many of them the first basis is made of; 0 for that of the calibration.
        """
        side, head = self.side, self.head
        self.mean, self.encode = side.mean[head].double(), side.encode[head].double()
        energies = side.energies[head].double()
        self.widths, self.slots, self.sizes, self.tail = side.widths[head].tolist(), [], [], 0.0
        for direction, width in enumerate(self.widths):
            if width:
                size = max(float(energies[direction]), float(energies.mean()) * self._least(width))
                place = BITS.index(width)
                lost = float(side.distortions[head, direction, 1 + place] / side.distortions[head, direction, 0] * energies[direction])
                self.tail += lost / float(energies.sum())
                self.slots.append(Slot(width, float(side.steps[head, direction, place]) / size**0.5, lost / size))
                self.sizes.append(size)
        self.tail += float(side.tails[head, len(self.slots)])
        self.tokens, self.basis = 0.0, -1
        tokens = [self.encode @ (vector.double() - self.mean) for vector in vectors]
        if warmup:
            for start in range(0, warmup, TILE):
                self._feed(tokens[start : start + TILE])
            self._renew()
        else:
            dim, units = len(energies), torch.eye(len(energies)).double()
            self._store([(4 * dim * energy).sqrt() * unit for energy, unit in zip(energies, units, strict=True)])
            self.tokens, self.basis = 4.0 * dim, 0
            self.axes = [unit for unit, width in zip(units, self.widths, strict=True) if width]
            self.share = self._expected(self.axes, self.sizes)[0] / float(energies.sum())
            self.bound = self.tail if self.limit is None else self.limit**2
        steps = []
        for index in range(len(tokens)):
            steps.append(self._step(tokens[index]))
            end = index + 1
            if end % TILE:
                continue
            tile, near = tokens[end - TILE : end], steps[end - TILE : end]
            if end > warmup:
                self._feed(tile)
            if end % self.chunk == 0:
                self.kept, self.tokens = [row * self.decay**0.5 for row in self.kept], self.tokens * self.decay
                self._renew()
            else:
                lost = sum(float((token - self._coefficients(step.vector)).square().sum()) for token, step in zip(tile, near, strict=True))
                share = lost / sum(float(token.square().sum()) for token in tile)
                if self._above(share, self.bound):
                    self.bound = share
                    self._renew()
        return steps

    def _coefficients(self, vector: torch.Tensor) -> torch.Tensor:
        return self.encode @ (vector - self.mean)

    def _least(self, width: int) -> float:
        """The least energy that a step is made for, as a share of the head's mean."""
        return 1.0 if width >= 16 else 1e-8

    def _step(self, token: torch.Tensor) -> Step:
        found, near = torch.zeros_like(token), False
        for slot, axis, size in zip(self.slots, self.axes, self.sizes, strict=True):
            step, most = slot.unit * size**0.5, 2.0 ** (slot.width - 1)
            level = float(axis @ token) / step
            near |= step > 4e-3 and abs(level - round(level)) * step < 5e-4
            found += (min(max(level // 1, -most), most - 1) + 0.5) * step * axis
        return Step(self.mean + torch.linalg.solve(self.encode, found), self.basis, near)

    def _feed(self, tile: list[torch.Tensor]) -> None:
        self._store(tile)
        self.tokens += len(tile)

    def _store(self, rows: list[torch.Tensor]) -> None:
        self.kept += rows
        if self.rows is not None and len(self.kept) > 2 * min(self.rows, len(rows[0])):
            self.kept = frequent(torch.stack(self.kept), self.rows)

    def _expected(self, axes: list[torch.Tensor], sizes: list[float]) -> tuple[float, float]:
        """What a token loses, and its energy, in the mean of the sketch."""
        seen = torch.stack(self.kept)
        lost = energy = float(seen.square().sum()) / self.tokens
        for slot, axis, size in zip(self.slots, axes, sizes, strict=True):
            found, reach = float((seen @ axis).square().sum()) / self.tokens, slot.unit * size**0.5 * 2.0 ** (slot.width - 1)
            lost -= found * (1 - slot.loss) - max(0.0, clipped(found, reach) - clipped(size, reach))
        return max(0.0, lost), energy

    def _renew(self) -> None:
        _, singular, axes = torch.linalg.svd(torch.stack(self.kept))
        energies = torch.nn.functional.pad(singular.square() / self.tokens, (0, len(axes) - len(singular)))
        count, energy = len(self.slots), float(energies.sum())
        new_axes, new_sizes = list(axes[:count]), [0.0] * count
        ranked = sorted(range(count), key=lambda slot: -self.slots[slot].width)
        for place, slot in enumerate(ranked):
            new_axes[slot] = axes[place]
            new_sizes[slot] = max(float(energies[place]), self._least(self.slots[slot].width) * energy / len(axes))
        lost = self._expected(new_axes, new_sizes)[0] / energy
        if self.basis >= 0:
            old = self._expected(self.axes, self.sizes)[0] / energy
            if not self._above(old, max(self.share * (1 + self.agreement), 1e-6)):
                return
            if not self._above(old, lost * (1 + self.agreement)):
                self.share = old
                return
        gaps = energies[: min(count, len(axes) - 1)] - energies[1 : 1 + min(count, len(axes) - 1)]
        self.close |= bool((gaps < 3e-3 * energies[0]).any())
        self.axes, self.sizes, self.share, self.basis = new_axes, new_sizes, lost, self.basis + 1
        self.bound = max(2.25 * lost, self.tail) if self.limit is None else self.limit**2

    def _above(self, value: float, bound: float) -> bool:
        self.close |= abs(value - bound) < 2e-6 + 1e-3 * bound
        return value > bound


def frequent(rows: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The rows that Frequent Directions leave: the energy of the first direction that has no row is taken off all.

    Args:
        rows: Old and new ones.
        size: How many remain.
    """
    _, singular, axes = torch.linalg.svd(rows, full_matrices=False)
    cut = float(singular[size]) ** 2 if size < len(singular) else 0.0
    return [(float(s) ** 2 - cut) ** 0.5 * axis for s, axis in zip(singular[:size], axes[:size], strict=True)]
