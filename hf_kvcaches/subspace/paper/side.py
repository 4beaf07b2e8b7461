"""Keys or values of a layer as coefficients in the bases of their blocks, and the sketch that tells the next basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_kvcaches.codec.moments import descending, second_moment
from hf_kvcaches.core.layers import capacity_for

# Without a threshold, a tile may lose so many times what its basis lost when it was new, and at least the other share of its length.
_SLACK, _LEAST_RESIDUAL = 1.5, 1e-3
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Sketch:
    """What is known of a stream of vectors: one float32 tensor, with the caller's (batch, heads) first.

    Args:
        size: None: the sum of all outer products, (..., d, d). Else the rows of Frequent Directions (Liberty, arXiv 1206.0594; Ghashami et
            al., arXiv 1501.01711), (..., min(size, d), d): old and new rows are rotated to their singular directions, and the square of the
            first singular value that has no row is subtracted from all squares. However the rows come, `|A'A - S'S|_op <=
            |A - A_r|_F^2 / (size + 1 - r)` for every r <= size, and S'S <= A'A.
    """

    size: int | None = None

    def start(self, lead: tuple[int, ...], dim: int, device: torch.device | None = None) -> Tensor:
        """Return the state before the first row, with leading dimensions such as (batch, heads)."""
        return torch.zeros(*lead, min(self.size or dim, dim), dim, device=device)

    def update(self, state: Tensor, rows: Tensor, decay: float = 1.0) -> Tensor:
        """Return the state after more rows, (..., n, d); the energy of those before is multiplied with `decay`."""
        if self.size is None:
            return state * decay + second_moment(rows).float()
        size, past = state.shape[-2], state.double() * decay**0.5
        _, lengths, directions = torch.linalg.svd(torch.cat([past, rows.double()], -2), full_matrices=False)
        energies = pad(lengths.square(), (0, max(0, size + 1 - lengths.shape[-1])))
        kept = (energies[..., :size] - energies[..., size : size + 1]).sqrt()
        shrunk = kept[..., : directions.shape[-2], None] * directions[..., :size, :]
        return pad(shrunk, (0, 0, 0, size - shrunk.shape[-2])).float()

    def gram(self, state: Tensor) -> Tensor:
        """Return the sum of the rows' outer products, as far as the state knows it, (..., d, d), float64."""
        return state.double() if self.size is None else second_moment(state)


class Rule(NamedTuple):
    """How the bases of one side are made: options of `AdaptiveSubspace`, with no rank where energy decides, no sketch without chunks."""

    rank: int | None
    energy: float
    tau: float | None
    sketch: Sketch | None

    def limit(self, lost: Tensor) -> Tensor:
        """Return the largest relative residual of a tile in bases that lost a share of the energy when they were new."""
        return (_SLACK * lost.sqrt()).clamp_min(_LEAST_RESIDUAL) if self.tau is None else torch.full_like(lost, self.tau)


class Side(NamedTuple):
    """Keys or values as coefficients. Functions that return None write into the tensors."""

    rule: Rule
    coefficients: Tensor  # (batch, heads, capacity, rank), in the dtype of the model
    bases: Tensor  # of each block orthonormal rows, (batch, heads, blocks, rank, d); rows of zeros where a head has a smaller rank
    limit: Tensor  # the largest relative residual of a tile, (batch, heads)
    sketch: Tensor | None  # (batch, heads, n, d), or None where the first basis is the only one

    @classmethod
    def empty(cls, rule: Rule, states: Tensor, dtype: torch.dtype) -> Self:
        """Return the side before the first token, for states (batch, heads, tokens, d) as they are projected."""
        lead, dim = states.shape[:2], states.shape[3]
        state = None if rule.sketch is None else rule.sketch.start(lead, dim, states.device)
        return cls(rule, states.new_zeros(*lead, 0, 0, dtype=dtype), states.new_zeros(*lead, 1, 0, dim), states.new_zeros(lead), state)

    def with_room(self, tokens: int, rank: int) -> Self:
        """Return the side with room for so many tokens and directions."""
        wider = max(0, rank - self.bases.shape[3])
        longer = capacity_for(tokens) - self.coefficients.shape[2] if tokens > self.coefficients.shape[2] else 0
        if not wider and not longer:
            return self
        return self._replace(coefficients=pad(self.coefficients, (0, wider, 0, longer)), bases=pad(self.bases, (0, 0, 0, wider)))

    def begun(self, rows: slice, tokens: Tensor) -> Self:
        """Return the side with the first bases of some rows, made of tokens (rows, heads, tokens, d)."""
        energies, directions = descending(second_moment(tokens))
        energies, rank = energies.clamp_min(0.0), self.rule.rank
        if rank is not None:
            kept = torch.ones_like(energies[..., :rank], dtype=torch.bool)
        else:
            kept = energies.cumsum(-1) - energies < self.rule.energy * energies.sum(-1, keepdim=True)
            kept = kept[..., : max(1, int(kept.sum(-1).max()))]
        side = self.with_room(0, kept.shape[-1])
        basis, lost = _leading(energies, directions, pad(kept, (0, side.bases.shape[3] - kept.shape[-1])))
        side.bases[rows], side.limit[rows] = basis.to(side.bases), self.rule.limit(lost).to(side.limit)
        side.learn(rows, tokens)
        return side

    def learn(self, rows: slice, tokens: Tensor, decay: float = 1.0) -> None:
        """Add tokens to the sketches of some rows, if there are any, and multiply the energy of older ones."""
        if self.sketch is not None and self.rule.sketch is not None:
            self.sketch[rows] = self.rule.sketch.update(self.sketch[rows], tokens, decay)

    def residual(self, rows: slice, block: int, tokens: Tensor) -> Tensor:
        """Return the relative residual of a tile, (rows, heads), which follows from the lengths of tokens and of their coefficients."""
        energy = tokens.square().sum((-2, -1))
        kept = (tokens @ self.bases[rows, :, block].mT).square().sum((-2, -1))
        return ((energy - kept).clamp_min(0.0) / energy.clamp_min(_TINY)).sqrt()

    def renew(self, rows: slice, block: int, due: Tensor, tokens: Tensor) -> None:
        """Give heads that are due, (rows, heads), the top directions of their sketches, from a block on that begins with some tokens."""
        assert self.sketch is not None
        assert self.rule.sketch is not None
        old = self.bases[rows, :, block:]
        basis, lost = _leading(*descending(self.rule.sketch.gram(self.sketch[rows])), old[:, :, 0].any(-1))
        self.bases[rows, :, block:] = torch.where(due[..., None, None, None], basis.to(old), old)
        # Frequent Directions know little of what lies beyond the main directions, the first tile does.
        limit = self.rule.limit(lost.maximum(self.residual(rows, block, tokens).double().square())).to(self.limit)
        self.limit[rows] = torch.where(due, limit, self.limit[rows])

    def decoded(self, block: int, tokens: slice) -> Tensor:
        """Return tokens of a block as they were before projection, but for what was lost, (batch, heads, tokens, d)."""
        return self.coefficients[:, :, tokens].to(self.bases.dtype) @ self.bases[:, :, block]


def _leading(energies: Tensor, directions: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first directions, zeros where they are not kept, (..., 1, rank, d), and the share of the energy that they lose, (...)."""
    rank, energies = kept.shape[-1], energies.clamp_min(0.0)
    basis = directions[..., :rank, :] * kept[..., None]
    lost = 1 - (energies[..., :rank] * kept).sum(-1) / energies.sum(-1).clamp_min(_TINY)
    return basis.unsqueeze(-3), lost.clamp_min(0.0)
