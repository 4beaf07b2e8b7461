"""Summaries of a stream of vectors that know its main directions: one float32 tensor, with the caller's (batch, heads) first.

`Gram` keeps all d x d outer products of a head. `FrequentDirections` with `size` rows is smaller while size < d, and pays for that with a
singular value decomposition in each update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from hf_kvcaches.codec.moments import second_moment


@dataclass(frozen=True)
class Gram:
    """The sum of all outer products: state (..., d, d)."""

    def start(self, lead: tuple[int, ...], dim: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the state before the first row, with leading dimensions such as (batch, heads)."""
        return torch.zeros(*lead, dim, dim, device=device)

    def update(self, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the state after more rows, (..., n, d)."""
        return state + second_moment(rows).float()

    def scaled(self, state: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the state with the energy of all past rows multiplied by a factor."""
        return state * factor

    def gram(self, state: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows' outer products, as far as the state knows it, (..., d, d), float64."""
        return state.double()


@dataclass(frozen=True)
class FrequentDirections:
    """A few rows S in place of all rows A, with a bound on what is lost: state (..., size, d). Its functions are those of `Gram`.

    Frequent Directions (Liberty, arXiv 1206.0594; Ghashami et al., arXiv 1501.01711). Old and new rows are rotated to their singular
    directions, and the square of the first singular value that has no row is subtracted from all squares. However the rows come,
    `|A'A - S'S|_op <= |A - A_r|_F^2 / (size + 1 - r)` for every r <= size, and S'S <= A'A. With size >= d nothing is lost.
    """

    size: int

    def start(self, lead: tuple[int, ...], dim: int, device: torch.device | None = None) -> torch.Tensor:
        return torch.zeros(*lead, min(self.size, dim), dim, device=device)

    def update(self, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        size = state.shape[-2]
        _, lengths, directions = torch.linalg.svd(torch.cat([state.double(), rows.double()], -2), full_matrices=False)
        energies = pad(lengths.square(), (0, max(0, size + 1 - lengths.shape[-1])))
        kept = (energies[..., :size] - energies[..., size : size + 1]).sqrt()
        shrunk = kept[..., : directions.shape[-2], None] * directions[..., :size, :]
        return pad(shrunk, (0, 0, 0, size - shrunk.shape[-2])).float()

    def scaled(self, state: torch.Tensor, factor: float) -> torch.Tensor:
        return state * factor**0.5

    def gram(self, state: torch.Tensor) -> torch.Tensor:
        return second_moment(state)


Sketch = Gram | FrequentDirections
