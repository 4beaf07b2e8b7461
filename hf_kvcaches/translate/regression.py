"""Reduced-rank regression on second moments of both models' states of the same tokens.

No states are kept: each text adds to one symmetric matrix over named blocks of columns, and fits solve on its blocks.
"""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import NamedTuple, Self

import torch

from hf_kvcaches.codec.moments import Moments, roots
from hf_kvcaches.kernels.arguments import Decoder

# A variance below this share of the mean variance is rounding.
_ROUNDING = 1e-12


class BlockMoments:
    """Mean products of named blocks of columns and of a column of ones; the first `add` decides the names, widths and device.

    Attributes:
        columns: The columns of each block; those of "one" come first.
    """

    def __init__(self) -> None:
        self.columns: dict[str, slice] = {}
        self.sums: Moments

    def add(self, weights: torch.Tensor | None = None, **blocks: torch.Tensor) -> None:
        """Add tokens, (tokens, width) for each block, with weights, (tokens,), of the mean 1."""
        first = next(iter(blocks.values()))
        blocks = {"one": first.new_ones(len(first), 1), **blocks}
        if not self.columns:
            *starts, width = accumulate((block.shape[1] for block in blocks.values()), initial=0)
            self.columns = {name: slice(start, start + blocks[name].shape[1]) for name, start in zip(blocks, starts, strict=True)}
            self.sums = Moments((), width, first.device)
        rows = torch.cat([blocks[name].to(self.sums.total) for name in self.columns], dim=1)
        self.sums.add(rows if weights is None else rows * weights.to(rows).sqrt()[:, None])

    def of(self, first: str, second: str) -> torch.Tensor:
        """Return the mean products of two blocks, (first's width, second's width)."""
        return self.sums.total[self.columns[first], self.columns[second]] / self.sums.count

    def covariance(self, first: str, second: str) -> torch.Tensor:
        """Return the covariance of two blocks, (first's width, second's width)."""
        return self.of(first, second) - self.of("one", first).T @ self.of("one", second)

    def without(self, block: str, source: str, ridge: float) -> tuple[Self, torch.Tensor]:
        """Replace a block by the residual of its regression on another block, if that is there; return the slopes, (source, block), too."""
        target = self.columns[block]
        if source not in self.columns:
            return self, self.sums.total[:0, target]
        slopes = fit_ridge(self.covariance(source, source), self.covariance(source, block), ridge)
        residual = copy.copy(self)
        residual.sums = copy.copy(self.sums)
        residual.sums.total = total = self.sums.total.clone()
        total[target] -= slopes.T @ total[self.columns[source]]
        total[:, target] -= total[:, self.columns[source]] @ slopes
        return residual, slopes


def fit_ridge(xx: torch.Tensor, xy: torch.Tensor, ridge: float) -> torch.Tensor:
    """Solve a ridge regression of y on x; return the slopes, (inputs, outputs), in float64.

    Args:
        xx: `x.T @ x`, (inputs, inputs).
        xy: `x.T @ y`, (inputs, outputs).
        ridge: As a share of the mean diagonal of `xx`, above 0.
    """
    xx = xx.double()
    # Inputs that are always 0 get slopes of 0.
    penalty = ridge * xx.diagonal().mean() + torch.finfo(torch.float64).tiny
    return torch.linalg.solve((xx + xx.T) / 2 + penalty * torch.eye(len(xx), dtype=xx.dtype, device=xx.device), xy.double())


class ReducedRank(NamedTuple):
    """A regression at full rank, of which any directions can be taken. Coefficients have the metric's unit and the mean 0.

    Args:
        strengths: By how much each direction reduces the error in the metric, as square roots, descending.
        encode: (producer, directions), float64.
        side: From the block "producer_side", (producer_side, directions); None where there is none.
        shift: (directions,).
        decode: (directions, consumer).
        side_coefficients: The coefficients as the side information predicts them, (1 + side, directions); the first row is the constant.
        side_states: The same of the consumer's states, (1 + side, consumer).
    """

    strengths: torch.Tensor
    encode: torch.Tensor
    side: torch.Tensor | None
    shift: torch.Tensor
    decode: torch.Tensor
    side_coefficients: torch.Tensor
    side_states: torch.Tensor

    def coefficients(self, states: torch.Tensor, producer_side: torch.Tensor | None = None) -> torch.Tensor:
        """Return the coefficients of all directions, (tokens, directions), of the blocks "producer" and "producer_side"."""
        coefficients = states.to(self.encode) @ self.encode + self.shift
        if self.side is None or producer_side is None:
            return coefficients
        return coefficients + producer_side.to(self.side) @ self.side

    def encoder(self, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return the weights, side and shift of some directions, float32."""
        directions = directions.to(self.encode.device)
        side = None if self.side is None else self.side[:, directions].float()
        return self.encode[:, directions].float(), side, self.shift[directions].float()

    def decoder(self, directions: torch.Tensor, columns: slice = slice(None)) -> Decoder:
        """Return the map from side information and some directions to some columns of the consumer's states, float32."""
        directions = directions.to(self.encode.device)
        decode = self.decode[directions]
        side_map = (self.side_states - self.side_coefficients[:, directions] @ decode)[:, columns].float()
        codes = decode[:, columns].float() if len(directions) else None
        return Decoder(side=side_map[1:] if len(side_map) > 1 else None, codes=codes, bias=side_map[0])


def reduced_rank(moments: BlockMoments, metric: torch.Tensor, ridge: float) -> ReducedRank:
    """Find the few combinations of a producer's states from which a consumer's are predicted with the least error in a metric.

    Args:
        moments: Of the blocks "producer" and "consumer"; of "side", the consumer's side information, if there is any; and of
            "producer_side", if there is any: what it predicts of the producer's states then need not be sent.
        metric: The cost of errors, (consumer, consumer), symmetric and positive semidefinite.
        ridge: As a share of the mean variance of the regressors.
    """
    moments, side_slopes = moments.without("producer", "producer_side", ridge)
    variance = float(moments.covariance("producer", "producer").diagonal().mean())
    residual, producer_slopes = moments.without("producer", "side", ridge)
    residual, consumer_slopes = residual.without("consumer", "side", ridge)
    xx, xy = residual.covariance("producer", "producer"), residual.covariance("producer", "consumer")
    values, vectors = torch.linalg.eigh((xx + xx.T) / 2)
    # Where states follow from side information, or from each other, nothing is left but rounding.
    inverse = torch.where(values > _ROUNDING * variance, 1 / (values + ridge * variance), 0.0)
    root, inverse_root = roots(metric.to(xx))
    target = (vectors.T @ xy) @ root
    _, strengths, directions = torch.linalg.svd((vectors * inverse.sqrt()) @ target, full_matrices=False)
    encode = (vectors * inverse) @ target @ directions.T
    shift = -(moments.of("one", "producer") @ encode)
    return ReducedRank(
        strengths,
        encode,
        side=-side_slopes @ encode if len(side_slopes) else None,
        shift=shift[0],
        decode=directions @ inverse_root,
        side_coefficients=torch.cat([residual.of("one", "producer") @ encode + shift, producer_slopes @ encode]),
        side_states=torch.cat([residual.of("one", "consumer"), consumer_slopes]),
    )
