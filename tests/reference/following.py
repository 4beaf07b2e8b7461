"""How a head follows its text, written down plainly: one token after the other, and nothing is forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

TILE = 16
SLACK = 1.5


class Step(NamedTuple):
    """What one token became.

    Args:
        coefficients: (rank,).
        basis: The number of its basis.
        decode: What reads the coefficients, (d, rank).
    """

    coefficients: torch.Tensor
    basis: int
    decode: torch.Tensor


@dataclass
class FollowingOracle:
    """One head of one row.

    Args:
        rank: Coefficients of a token.
        chunk: The most tokens until a basis is looked at again.
        warmup: Tokens that the first basis is made of.
        tail: Tokens that stay exact behind a token until it gets its coefficients.
        limit: Of a tile's loss; None for SLACK times the basis' own.
        decay: Of the energy, after each chunk.
        agreement: What a new basis must save.
        directions: None for all outer products; (rows that remain, rows more that fit) for Frequent Directions.

    Attributes:
        margin: How near to another outcome it was: the smallest distance of any comparison, and of any two directions' energies, as a
            share of what is compared.
    """

    rank: int
    chunk: int
    warmup: int
    tail: int = 0
    limit: float | None = None
    decay: float = 1.0
    agreement: float = 0.0
    directions: tuple[int, int] | None = None
    margin: float = float("inf")

    def follow(self, vectors: torch.Tensor, root: torch.Tensor | None) -> list[Step]:
        """What each token becomes that is not among the last `tail`.

        Args:
            vectors: All, (n, d), float64.
            root: Of the metric, (d, d), or None for the identity.
        """
        dim = vectors.shape[1]
        if self.rank == dim:
            return [Step(vector, 0, torch.eye(dim).double()) for vector in vectors[: max(0, len(vectors) - self.tail)]]
        self.root = torch.eye(dim).double() if root is None else root
        self.kept: list[torch.Tensor] = []  # each with its energy's weight in its length
        self.known, self.begun, self.basis = 0, 0, -1
        self._know(vectors, self.warmup)
        self._renew(0)
        steps = []
        for token in range(len(vectors) - self.tail):
            steps.append(Step(self.encode @ vectors[token], self.basis, self.decode))
            end = token + 1
            if end % TILE == 0 and self._is_due(vectors[end - TILE : end], end - self.begun):
                self._know(vectors, end + self.tail)
                self._renew(end)
        return steps

    def _know(self, vectors: torch.Tensor, tokens: int) -> None:
        """Sees to it that the whole tiles of the first tokens are known."""
        while self.known + TILE <= tokens:
            tile = [self.root @ vector for vector in vectors[self.known : self.known + TILE]]
            self.known += TILE
            if self.directions is not None and len(self.kept) + TILE > sum(self.directions):
                self.kept = frequent(torch.stack([*self.kept, *tile]), self.directions[0])
            else:
                self.kept += tile

    def _is_due(self, tile: torch.Tensor, length: int) -> bool:
        if length >= self.chunk:
            return True
        lost = sum(float((self.root @ (x - self.decode @ (self.encode @ x))).square().sum()) for x in tile)
        whole = sum(float((self.root @ x).square().sum()) for x in tile)
        return length >= max(TILE, self.chunk // 4) and self._above((lost / whole) ** 0.5, self.bound, 1.0)

    def _renew(self, at: int) -> None:
        seen = torch.stack(self.kept)
        _, singular, axes = torch.linalg.svd(seen)
        energies = singular.square()
        total, lost = float(energies.sum()), float(energies[self.rank :].sum())
        gaps = energies[: self.rank] - energies[1 : self.rank + 1]
        self.margin = min(self.margin, float(gaps.min() / energies[0]))
        better = True
        if self.basis >= 0:
            back = torch.linalg.inv(self.root)
            left = seen - seen @ (self.root @ self.decode @ self.encode @ back).T
            old = float(left.square().sum())
            worse = self._above(old / total - self.share, self.agreement, 1.0)
            better = worse and self._above(old - lost, self.agreement * total, total)
            lost = lost if better else old
        if better:
            self.share = lost / total
            self.basis += 1
            self.encode = axes[: self.rank] @ self.root
            self.decode = torch.linalg.solve(self.root, axes[: self.rank].T)
        if not better and at - self.begun < self.chunk:
            self.bound = float("inf")  # not again before the chunk is over
            return
        self.bound = SLACK * (lost / total) ** 0.5 if self.limit is None else self.limit
        weight = self.decay ** ((at - self.begun) / self.chunk)
        self.kept = [vector * weight**0.5 for vector in self.kept]
        self.begun = at

    def _above(self, value: float, bound: float, scale: float) -> bool:
        self.margin = min(self.margin, abs(value - bound) / scale)
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
