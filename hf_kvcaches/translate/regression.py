"""Reduced-rank regression on second moments of both models' states of the same tokens.

No states are kept: each text adds to products of named blocks of columns. Products are taken of what differs from the first text's mean,
so that float32 suffices for them, and are summed up in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations_with_replacement, product
from typing import NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.evaluate.texts import add_up
from hf_kvcaches.translate.states import CodeWeights

Key = tuple[str, int]
"""The name of a block: "producer", "consumer", "producer input" or "consumer input" (of the attention), and a layer."""
# Directions with a smaller share of the strongest one's strength are rounding.
_ROUNDING = 1e-7
LEAST_RIDGE = {torch.float32: 1e-6, torch.float64: 1e-10}
"""The least regularisation, as a share of the mean variance, by the precision of the products."""


class Group(NamedTuple):
    """The consumer's layers that share a code, and the producer's that they are translated from, each once."""

    layers: tuple[int, ...]
    sources: tuple[int, ...]

    @classmethod
    def of(cls, layers: Iterable[int], sources: Sequence[int]) -> Group:
        """The group of some layers; `sources` are those of all layers."""
        layers = tuple(layers)
        return cls(layers, tuple(dict.fromkeys(sources[layer] for layer in layers)))

    @property
    def name(self) -> str:
        return f"layer.{self.layers[0]}" if len(self.layers) == 1 else f"layers.{self.layers[0]}-{self.layers[-1]}"

    @property
    def keys(self) -> tuple[list[Key], list[Key]]:
        """The blocks of the producer's states and of the consumer's."""
        return [("producer", layer) for layer in self.sources], [("consumer", layer) for layer in self.layers]


def pairs_of(groups: Sequence[Group], lowest: Sequence[int], plain: bool) -> Iterator[tuple[Key, Key]]:
    """Yield the pairs of blocks whose products are needed; where all errors of a layer cost the same, also for their variance."""
    for group in groups:
        xs, ys = group.keys
        yield from chain(combinations_with_replacement(xs, 2), product(xs, ys), zip(ys, ys, strict=True) if plain else ())
        for layer in lowest:
            if group.layers[-1] > layer:
                inputs: list[Key] = [("consumer input", layer), ("producer input", layer)]
                yield from chain(combinations_with_replacement(inputs, 2), product(inputs, [*xs, *ys]))


def passes_of(
    groups: Sequence[Group], widths: Mapping[Key, int], lowest: Sequence[int], plain: bool, sample: int, memory: int
) -> list[list[Group]]:
    """Return the groups of layers whose sums fit the memory, beside all regressions and a sample of tokens, in each pass over the texts."""
    kept = sum(sample * widths["producer input", layer] for layer in lowest)  # numbers in float32
    for group in groups:
        x, y = (sum(widths[key] for key in keys) for keys in group.keys)
        kept += sample * x
        for layer in (layer for layer in lowest if layer < group.layers[-1]):  # a regression
            theirs, own = widths["producer input", layer], widths["consumer input", layer]
            kept += min(x, y) * (x + y + theirs + own) + own * y
    taken = lambda groups: 4 * kept + 8 * sum(widths[x] * widths[y] for x, y in {*pairs_of(groups, lowest, plain)})  # noqa: E731
    least = max((taken([group]) for group in groups), default=0)
    if least > memory:
        raise ConfigError.of("memory", f"{least:,} bytes or more for these models", memory, "Or give layers_per_code=1.")
    passes: list[list[Group]] = []
    for group in groups:
        if not passes or taken([*passes[-1], group]) > memory:
            passes.append([])
        passes[-1].append(group)
    return passes


class Products:
    """Means over tokens, and covariances of some pairs of blocks, in float64; the products of a text are taken in a dtype."""

    def __init__(self, pairs: Iterable[tuple[Key, Key]], dtype: torch.dtype, device: torch.device) -> None:
        self.pairs, self.dtype, self.device = list(dict.fromkeys(pairs)), dtype, device
        self.tokens = torch.zeros((), dtype=torch.float64)  # by their weights
        self.means: dict[Key, Tensor] = {}
        self._shifts: dict[Key, Tensor] = {}
        self._moments: dict[tuple[Key, Key], Tensor] = {}

    def add(self, blocks: Mapping[Key, Tensor], weights: Tensor) -> None:
        """Add the tokens of a text, (tokens, width) for each block, each by its weight, (tokens,)."""
        weights = weights.to(self.device, self.dtype)
        roots, rows = weights.sqrt()[:, None], dict[Key, Tensor]()
        for key in dict.fromkeys(chain.from_iterable(self.pairs)):
            block = blocks[key].to(self.device, self.dtype)
            rows[key] = (block - self._shifts.setdefault(key, block.mean(0))) * roots
            self.means[key] = self.means.get(key, 0) + (rows[key] * roots).sum(0, dtype=torch.float64)
        for pair in self.pairs:
            moment = rows[pair[0]].T @ rows[pair[1]]
            self._moments[pair] = self._moments[pair].add_(moment) if pair in self._moments else moment.double()
        self.tokens += weights.sum(dtype=torch.float64).cpu()

    def finish(self, processes: int) -> None:
        """Turn sums into means and covariances, of the tokens of all processes, which have added the same text first."""
        totals = [*self.means.values(), *self._moments.values()]
        if processes > 1:
            add_up([self.tokens, *totals])
        for total in totals:
            total /= float(self.tokens)
        for (first, second), moment in self._moments.items():
            moment -= torch.outer(self.means[first], self.means[second])
        for key, mean in self.means.items():
            mean += self._shifts[key].double()
            if not bool(mean.isfinite().all()):
                model, hint = key[0].split()[0], "Load it in bfloat16 or float32, or leave out texts of which it computes them."
                raise UnsupportedError(f"{model}: its layer {key[1]} has infinities or NaN. {hint}")

    def mean(self, keys: Sequence[Key]) -> Tensor:
        """Of some blocks side by side, (width,)."""
        return torch.cat([self.means[key] for key in keys])

    def covariance(self, rows: Sequence[Key], columns: Sequence[Key]) -> Tensor:
        """Of some blocks side by side with others, (width of rows, width of columns)."""
        moments = self._moments
        parts = [[moments[row, column] if (row, column) in moments else moments[column, row].T for column in columns] for row in rows]
        return torch.cat([torch.cat(part, dim=1) for part in parts])


class Regression(NamedTuple):
    """A regression at full rank, of which any directions can be taken, in float32. An error of a coefficient costs its square."""

    strengths: Tensor  # by how much each direction reduces the cost of errors, as square roots, descending
    encode: CodeWeights
    decode: Tensor  # to the consumer's states, (directions, consumer)
    side: Tensor  # from the input of the consumer's attention, without codes, (hidden, consumer)
    side_coefficients: Tensor  # from that input to the coefficients, (hidden, directions)
    side_mean: Tensor  # of that input, (hidden,)
    mean: Tensor  # of the consumer's states, (consumer,)

    def coefficients(self, states: Tensor, hidden: Tensor) -> Tensor:
        return states @ self.encode.states + hidden @ self.encode.hidden + self.encode.shift

    def decoder(self, directions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the maps from the input of the consumer's attention and from some coefficients, and the bias."""
        decode = self.decode[directions]
        side = self.side - self.side_coefficients[:, directions] @ decode
        return side, decode, self.mean - self.side_mean @ side


def regress(products: Products, lowest: int, group: Group, roots: Sequence[Tensor], ridges: tuple[float, float]) -> Regression:
    """Find the few combinations of a producer's states from which a consumer's follow with the least cost of errors.

    What follows from the producer's own attention input is taken out of its states, and what follows from the consumer's out of both.

    Args:
        roots: Square roots of the cost of errors, of consecutive blocks of the consumer's columns: (blocks, size, size) each.
        ridges: As shares of the mean variances of attention inputs, and of the producer's states.
    """
    of, x, y, mine, theirs = products.covariance, *group.keys, [("consumer input", lowest)], [("producer input", lowest)]
    own_root, their_root = (factor(of(keys, keys), ridges[0]) for keys in (mine, theirs))
    their_x, own_x, their_y, own_y, xx = of(theirs, x), of(mine, x), of(theirs, y), of(mine, y), of(x, x)
    # What is left of the producer's states without its own input, and its products with the others.
    slopes = torch.cholesky_solve(their_x, their_root)
    left = xx - their_x.T @ slopes - slopes.T @ (their_x - of(theirs, theirs) @ slopes)
    left_own, target = own_x - of(mine, theirs) @ slopes, of(x, y) - slopes.T @ their_y
    # And without the consumer's input, as its states.
    of_x, of_y = (torch.cholesky_solve(states, own_root) for states in (left_own, own_y))
    rest = left_own - of(mine, mine) @ of_x
    left, target = left - left_own.T @ of_x - of_x.T @ rest, target - of_x.T @ own_y - rest.T @ of_y
    root = factor(left, ridges[1], xx)
    whitened = torch.linalg.solve_triangular(root, target, upper=False)
    costly = whitened @ torch.block_diag(*chain.from_iterable(roots)).to(whitened)
    squares, vectors = torch.linalg.eigh(costly @ costly.T)
    strengths = squares.flip(0).clamp_min(0).sqrt()
    count = min(costly.shape[1], int((strengths > _ROUNDING * strengths[:1]).sum()))
    strengths, vectors = strengths[:count], vectors.flip(1)[:, :count]
    encode = torch.linalg.solve_triangular(root.T, vectors * strengths, upper=True)
    encode_side = -slopes @ encode
    encoder = encode, encode_side, -(products.mean(x) @ encode + products.mean(theirs) @ encode_side)
    rest_of = (vectors / strengths).T @ whitened, of_y, of_x @ encode, products.mean(mine), products.mean(y)
    return Regression(strengths.float(), CodeWeights(*(part.float() for part in encoder)), *(part.float() for part in rest_of))


def factor(covariance: Tensor, ridge: float, scale: Tensor | None = None) -> Tensor:
    """Return the lower Cholesky factor with a ridge, a share of the mean variance (of `scale`), which grows where rounding asks for it."""
    covariance = (covariance + covariance.T) / 2
    size = (covariance if scale is None else scale).diagonal().mean().clamp_min(1e-250)
    while True:
        regular = covariance.clone()
        regular.diagonal().add_(ridge * size)
        root, failed = torch.linalg.cholesky_ex(regular)
        if not bool(failed):
            return root
        ridge *= 10
