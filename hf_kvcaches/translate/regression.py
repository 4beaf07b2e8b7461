"""Reduced-rank regression on second moments of both models' states of the same tokens.

No states are kept: each text adds to products of named blocks of columns. Products are taken of what differs from the first text's mean,
so that float32 suffices for them, and are summed up in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from hf_kvcaches.evaluate.texts import add_up

Key = tuple[str, int]
"""The name of a block: its kind, and the number of a layer."""
Columns = tuple[Key, torch.Tensor]
"""A block, and which of its columns."""
# Directions with a smaller share of the strongest one's strength are rounding.
_ROUNDING = 1e-7
LEAST_RIDGE = {torch.float32: 1e-6, torch.float64: 1e-10}
"""The least regularisation, as a share of the mean variance, by the precision of the products."""


class Products:
    """Means over tokens, and covariances of some pairs of blocks, in float64.

    Args:
        pairs: The pairs whose products are wanted.
        dtype: In which products are taken.
        device: Where sums are kept.
    """

    def __init__(self, pairs: Iterable[tuple[Key, Key]], dtype: torch.dtype, device: torch.device) -> None:
        self.pairs, self.dtype, self.device = list(dict.fromkeys(pairs)), dtype, device
        self.tokens = torch.zeros((), dtype=torch.float64)  # by their weights
        self._shifts: dict[Key, torch.Tensor] = {}
        self.means: dict[Key, torch.Tensor] = {}
        self._moments: dict[tuple[Key, Key], torch.Tensor] = {}

    def add(self, blocks: Mapping[Key, torch.Tensor], weights: torch.Tensor) -> None:
        """Add the tokens of a text, (tokens, width) for each block, each by its weight, (tokens,)."""
        weights = weights.to(self.device, self.dtype)
        roots = weights.sqrt()[:, None]
        rows = {name: blocks[name].to(self.device, self.dtype) for name in dict.fromkeys(chain.from_iterable(self.pairs))}
        for name, block in rows.items():
            rows[name] = (block - self._shifts.setdefault(name, block.mean(0))) * roots
            self.means[name] = self.means.get(name, 0) + (rows[name] * roots).sum(0, dtype=torch.float64)
        for pair in self.pairs:
            product = rows[pair[0]].T @ rows[pair[1]]
            self._moments[pair] = self._moments[pair].add_(product) if pair in self._moments else product.double()
        self.tokens += weights.sum(dtype=torch.float64).cpu()

    def finish(self, processes: int) -> None:
        """Turn sums into means and covariances, of the tokens of all processes."""
        if processes > 1:  # whose shifts differ
            for (first, second), total in self._moments.items():
                one, other = (self._shifts[name].double() for name in (first, second))
                total += torch.outer(self.means[first], other) + torch.outer(one, self.means[second] + float(self.tokens) * other)
            for name, total in self.means.items():
                total += float(self.tokens) * self._shifts[name].double()
                self._shifts[name].zero_()
            add_up([self.tokens, *self.means.values(), *self._moments.values()])
        for total in (*self.means.values(), *self._moments.values()):
            total /= float(self.tokens)
        for (first, second), moment in self._moments.items():
            moment -= torch.outer(self.means[first], self.means[second])
        for name, mean in self.means.items():
            mean += self._shifts[name].double()

    def covariance(self, first: Key, second: Key) -> torch.Tensor:
        """Of two blocks, (first's width, second's width)."""
        return self._moments[first, second] if (first, second) in self._moments else self._moments[second, first].T


class Known:
    """What each model knows of a token without the other: the input of one layer's attention, on which states are regressed.

    Args:
        layer: Of the consumer.
    """

    def __init__(self, products: Products, layer: int, ridge: float) -> None:
        self.products, self.own_name, self.their_name = products, ("consumer input", layer), ("producer input", layer)
        self.own, self.theirs = (products.covariance(name, name) for name in (self.own_name, self.their_name))
        self.cross = products.covariance(self.own_name, self.their_name)
        self.own_root, self.their_root = (factor(covariance, ridge) for covariance in (self.own, self.theirs))


class Regression(NamedTuple):
    """A regression at full rank, of which any directions can be taken, in float32. An error of a coefficient costs its square.

    Args:
        strengths: By how much each direction reduces the cost of errors, as square roots, descending.
        encode: From the producer's states, (producer, directions).
        encode_side: From the input of the producer's attention, (hidden, directions).
        shift: (directions,).
        decode: To the consumer's states, (directions, consumer).
        side: From the input of the consumer's attention, without codes, (hidden, consumer).
        side_coefficients: From that input to the coefficients, (hidden, directions).
        side_mean: Of that input, (hidden,).
        mean: Of the consumer's states, (consumer,).
    """

    strengths: torch.Tensor
    encode: torch.Tensor
    encode_side: torch.Tensor
    shift: torch.Tensor
    decode: torch.Tensor
    side: torch.Tensor
    side_coefficients: torch.Tensor
    side_mean: torch.Tensor
    mean: torch.Tensor

    def coefficients(self, states: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return states @ self.encode + hidden @ self.encode_side + self.shift

    def decoder(self, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the maps from the input of the consumer's attention and from some coefficients, and the bias."""
        decode = self.decode[directions]
        side = self.side - self.side_coefficients[:, directions] @ decode
        return side, decode, self.mean - self.side_mean @ side


def regress(known: Known, producer: Columns, consumer: Columns, roots: Sequence[torch.Tensor], ridge: float) -> Regression:
    """Find the few combinations of a producer's states from which a consumer's follow with the least cost of errors.

    What follows from the producer's own attention input is taken out of its states, and what follows from the consumer's out of both.

    Args:
        roots: Square roots of the cost of errors, of consecutive blocks of the consumer's columns: (blocks, size, size) each.
        ridge: As a share of the mean variance of the producer's states.
    """
    products, ((x, x_columns), (y, y_columns)) = known.products, (producer, consumer)
    their_x, own_x, their_y, own_y = (
        products.covariance(side, block)[:, columns]
        for block, columns in (producer, consumer)
        for side in (known.their_name, known.own_name)
    )
    xx, xy = products.covariance(x, x)[x_columns][:, x_columns], products.covariance(x, y)[x_columns][:, y_columns]
    # What is left of the producer's states without its own input, and its products with the others.
    slopes = torch.cholesky_solve(their_x, known.their_root)
    left = xx - their_x.T @ slopes - slopes.T @ (their_x - known.theirs @ slopes)
    left_own, target = own_x - known.cross @ slopes, xy - slopes.T @ their_y
    # And without the consumer's input, as its states.
    of_x, of_y = (torch.cholesky_solve(own, known.own_root) for own in (left_own, own_y))
    rest = left_own - known.own @ of_x
    left, target = left - left_own.T @ of_x - of_x.T @ rest, target - of_x.T @ own_y - rest.T @ of_y
    root = factor(left, ridge, xx)
    whitened = torch.linalg.solve_triangular(root, target, upper=False)
    costly = weighted(whitened, roots)
    squares, vectors = torch.linalg.eigh(costly @ costly.T)
    strengths = squares.flip(0).clamp_min(0).sqrt()
    count = min(costly.shape[1], int((strengths > _ROUNDING * strengths[:1]).sum()))
    strengths, vectors = strengths[:count], vectors.flip(1)[:, :count]
    encode = torch.linalg.solve_triangular(root.T, vectors * strengths, upper=True)
    encode_side = -slopes @ encode
    means = {name: products.means[name] for name in (known.own_name, known.their_name, x, y)}
    shift = -(means[x][x_columns] @ encode + means[known.their_name] @ encode_side)
    parts = strengths, encode, encode_side, shift, (vectors / strengths).T @ whitened, of_y, of_x @ encode, means[known.own_name]
    return Regression(*(part.float() for part in (*parts, means[y][y_columns])))


def weighted(rows: torch.Tensor, roots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply consecutive blocks of columns by matrices, (blocks, size, size) each."""
    parts, start = [], 0
    for root in roots:
        count, size, _ = root.shape
        columns = rows[:, start : start + count * size].unflatten(1, (count, size))
        parts.append((columns.transpose(0, 1) @ root.to(rows)).transpose(0, 1).flatten(1))
        start += count * size
    return torch.cat(parts, dim=1)


def factor(covariance: torch.Tensor, ridge: float, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return the lower Cholesky factor of a covariance with a ridge, which is made larger where rounding asks for it.

    Args:
        ridge: As a share of the mean variance of `scale`, or else of the covariance.
    """
    covariance = (covariance + covariance.T) / 2
    size = (covariance if scale is None else scale).diagonal().mean().clamp_min(1e-250)
    while True:
        root, failed = torch.linalg.cholesky_ex(
            covariance + torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device) * (ridge * size)
        )
        if not bool(failed):
            return root
        ridge *= 10
