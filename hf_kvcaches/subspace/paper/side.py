"""Keys or values of a layer as coefficients in the bases of their blocks."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch.nn.functional import pad

from hf_kvcaches.codec.moments import descending, second_moment
from hf_kvcaches.core.layers import capacity_for
from hf_kvcaches.subspace.paper.sketch import Sketch

# Without a threshold, a tile may lose so many times what its basis lost when it was new, and at least the other share of its length.
_SLACK, _LEAST_RESIDUAL = 1.5, 1e-3
_TINY = torch.finfo(torch.float32).tiny


class Rule(NamedTuple):
    """How the bases of one side are made: options of `AdaptiveSubspace`, with no rank where energy decides, no sketch without chunks."""

    rank: int | None
    energy: float
    tau: float | None
    sketch: Sketch | None

    def kept(self, energies: torch.Tensor) -> torch.Tensor:
        """Return which directions of the first basis heads keep, (..., rank), of the energies of all, (..., d), largest first."""
        if self.rank is not None:
            return torch.ones_like(energies[..., : self.rank], dtype=torch.bool)
        kept = energies.cumsum(-1) - energies < self.energy * energies.sum(-1, keepdim=True)
        return kept[..., : max(1, int(kept.sum(-1).max()))]

    def limit(self, lost: torch.Tensor) -> torch.Tensor:
        """Return the largest relative residual of a tile in bases that lost a share of the energy when they were new."""
        return (_SLACK * lost.sqrt()).clamp_min(_LEAST_RESIDUAL) if self.tau is None else torch.full_like(lost, self.tau)


class Side(NamedTuple):
    """Keys or values as coefficients. Functions that return None write into the tensors.

    Args:
        coefficients: (batch, heads, capacity, rank), in the dtype of the model.
        bases: Of each block orthonormal rows, (batch, heads, blocks, rank, d); rows of zeros where a head has a smaller rank.
        limit: The largest relative residual of a tile, (batch, heads).
        sketch: (batch, heads, n, d), or None where the first basis is the only one.
    """

    coefficients: torch.Tensor
    bases: torch.Tensor
    limit: torch.Tensor
    sketch: torch.Tensor | None

    @classmethod
    def empty(cls, states: torch.Tensor, dtype: torch.dtype, sketch: Sketch | None) -> Self:
        """Return the side before the first token, for states (batch, heads, tokens, d) as they are projected."""
        lead, dim = states.shape[:2], states.shape[3]
        state = None if sketch is None else sketch.start(lead, dim, states.device)
        return cls(states.new_zeros(*lead, 0, 0, dtype=dtype), states.new_zeros(*lead, 1, 0, dim), states.new_zeros(lead), state)

    def with_room(self, tokens: int, rank: int) -> Self:
        """Return the side with room for so many tokens and directions."""
        wider = max(0, rank - self.bases.shape[3])
        longer = capacity_for(tokens) - self.coefficients.shape[2] if tokens > self.coefficients.shape[2] else 0
        if not wider and not longer:
            return self
        return self._replace(coefficients=pad(self.coefficients, (0, wider, 0, longer)), bases=pad(self.bases, (0, 0, 0, wider)))

    def begun(self, rule: Rule, rows: slice, tokens: torch.Tensor) -> Self:
        """Return the side with the first bases of some rows, made of tokens (rows, heads, tokens, d)."""
        energies, directions = descending(second_moment(tokens))
        kept = rule.kept(energies.clamp_min(0.0))
        side = self.with_room(0, kept.shape[-1])
        kept = pad(kept, (0, side.bases.shape[3] - kept.shape[-1]))
        basis, lost = _leading(energies, directions, kept)
        side.bases[rows], side.limit[rows] = basis.to(side.bases), rule.limit(lost).to(side.limit)
        side.learn(rule, rows, tokens, 1.0)
        return side

    def learn(self, rule: Rule, rows: slice, tokens: torch.Tensor, decay: float) -> None:
        """Add tokens to the sketches of some rows, if there are any, and multiply the energy of older ones."""
        if self.sketch is not None and rule.sketch is not None:
            self.sketch[rows] = rule.sketch.update(rule.sketch.scaled(self.sketch[rows], decay), tokens)

    def residual(self, rows: slice, block: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return the relative residual of a tile, (rows, heads), which follows from the lengths of tokens and of their coefficients."""
        energy = tokens.square().sum((-2, -1))
        kept = (tokens @ self.bases[rows, :, block].mT).square().sum((-2, -1))
        return ((energy - kept).clamp_min(0.0) / energy.clamp_min(_TINY)).sqrt()

    def renew(self, rule: Rule, rows: slice, block: int, due: torch.Tensor, tokens: torch.Tensor) -> None:
        """Give heads that are due, (rows, heads), the top directions of their sketches, from a block on that begins with some tokens."""
        assert self.sketch is not None
        assert rule.sketch is not None
        old = self.bases[rows, :, block:]
        basis, lost = _leading(*descending(rule.sketch.gram(self.sketch[rows])), old[:, :, 0].any(-1))
        self.bases[rows, :, block:] = torch.where(due[..., None, None, None], basis.to(old), old)
        # Frequent Directions know little of what lies beyond the main directions, the first tile does.
        limit = rule.limit(lost.maximum(self.residual(rows, block, tokens).double().square())).to(self.limit)
        self.limit[rows] = torch.where(due, limit, self.limit[rows])

    def decoded(self, block: int, tokens: slice) -> torch.Tensor:
        """Return tokens of a block as they were before projection, but for what was lost, (batch, heads, tokens, d)."""
        return self.coefficients[:, :, tokens].to(self.bases.dtype) @ self.bases[:, :, block]


def _leading(energies: torch.Tensor, directions: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first directions, zeros where they are not kept, (..., 1, rank, d), and the share of the energy that they lose, (...)."""
    rank, energies = kept.shape[-1], energies.clamp_min(0.0)
    basis = directions[..., :rank, :] * kept[..., None]
    lost = 1 - (energies[..., :rank] * kept).sum(-1) / energies.sum(-1).clamp_min(_TINY)
    return basis.unsqueeze(-3), lost.clamp_min(0.0)
