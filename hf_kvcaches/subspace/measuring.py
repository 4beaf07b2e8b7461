"""What one pass over a text tells about a layer: second moments, what errors cost in its output, and a sample of tokens.

**What an error costs.** Let a query give its keys the weights a_i and get the output o = sum a_i v_i, which the output projection W takes
to the layer's output. If a value is off by d_i, that is off by `sum a_i W d_i`. If a logit is off by e_i, weights are off by
`a_i (e_i - sum a_j e_j)` to first order, and because `sum a_i (v_i - o) = 0` the output by `sum a_i e_i W (v_i - o)`. With errors that
have nothing to do with each other the squares add up:

    keys:    sum a_i^2 |W (v_i - o)|^2 e_i^2        values:  sum a_i^2 |W d_i|^2

So for each query head there are two numbers that make errors of keys and values comparable, the means over queries of
`stake = sum a_i^2 |W (v_i - o)|^2` and of `share = sum a_i^2`. With M, the second moment of the queries times the square of their scaling,
an error of keys is measured by `stake * M`, and one of values by `share * W'W`. A key head adds up what the heads of its group give. Values
count in their own second moment by the a_i^2 that they get: those that nobody looks at may be off. Keys count alike: one that nobody looks
at becomes one that somebody does if its logit is far too high, which a first order does not see.

**What it costs in the end.** The layer's output is a means; what is to stay the same is what the model says. Draw at each place a token
from what the model says there, and let `f` be the loss of these tokens. Its gradient g at some vector of a layer has the mean 0, and to
second order an error d there moves what the model says by the divergence `E (g . d)^2 / 2`, all that comes behind it included. So
one pass back measures, whatever attention and the layers above are like:

    keys:    E (G_i . e_i)^2, with G_i the gradient at key i        values:  E (g . (o - o'))^2, with g that at a query's output o

A projection P of the values is one of the outputs, `sum a_i P v_i = P o`, so that errors of values that add up or cancel are counted as
they do. Both are treated as if gradients had nothing to do with the vectors but for how large they are: vectors count in their moment by
the square of their gradient. With keys that holds for one half of the moment, and in the other half all count alike, for the reason above.

**The sample.** Gamma and the percentiles depend on bases that are known only in the end. They are measured on at most `SAMPLE_TOKENS`
tokens of each layer, up to `SAMPLE_OF_BLOCK` of a block so that they have met each other. Which blocks depends on their numbers alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.subspace.moments import Moments

SAMPLE_TOKENS = 4096
SAMPLE_OF_BLOCK = 128
# Queries of a block whose attention weights are looked at.
_WATCHED = 128
_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "proj")


class Sizes(NamedTuple):
    """The shape of a layer's attention.

    Args:
        heads: Query heads.
        kv_heads: Key heads.
        key_dim: Size of a key.
        value_dim: Size of a value.
        scaling: What the model multiplies `q.k` with.
        projected: Whether the output projection was found.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    projected: bool


class Pick(NamedTuple):
    """Tokens of one block that are in the sample.

    Args:
        row: Of the batch.
        block: The number of the block.
        positions: Sorted, 1-D.
    """

    row: int
    block: int
    positions: torch.Tensor


class Sampler:
    """Chooses blocks, the same ones whatever the order and whoever reads them.

    Every block has a priority that follows from its number; those with the smallest stay, as many as make `SAMPLE_TOKENS` tokens.
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[float, int]] = {}  # block -> priority, tokens

    def pick(self, blocks: Sequence[int], length: int) -> list[Pick]:
        """What to keep of a batch, if anything.

        Args:
            blocks: The numbers of the rows.
            length: Tokens of each row.
        """
        picked = []
        for row, block in enumerate(blocks):
            source = random.Random(block)
            priority, size = source.random(), min(length, SAMPLE_OF_BLOCK)
            picked.append(Pick(row, block, torch.tensor(sorted(source.sample(range(length), size)))))
            self.kept[block] = (priority, size)
        self.trim()
        return [pick for pick in picked if pick.block in self.kept]

    def trim(self) -> None:
        """Forgets the blocks that are too many."""
        total = 0
        for block, (_, size) in sorted(self.kept.items(), key=lambda item: item[1]):
            total += size
            if total > SAMPLE_TOKENS:
                del self.kept[block]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Sampled tokens of one block, as attention saw them.

    Args:
        positions: (tokens,).
        queries: (heads, tokens, d).
        keys: (kv_heads, tokens, d).
        values: (kv_heads, tokens, e).
    """

    positions: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def to(self, device: torch.device | str) -> Tokens:
        """The same on another device.

        Args:
            device: Which.
        """
        return Tokens(*(each.to(device) for each in (self.positions, self.queries, self.keys, self.values)))


class LayerMeter:
    """Sums over all tokens of one layer.

    Args:
        geometry: How to undo the rotation of keys and queries; None to take them as they are.
        watch: Whether to look at attention weights.
        block: The longest sequence.
    """

    def __init__(self, geometry: RotaryGeometry | None, watch: bool, block: int) -> None:
        self.geometry, self.watch, self.block = geometry, watch, block
        self.sizes: Sizes | None = None
        self.sample: dict[int, Tokens] = {}

    def open(self, sizes: Sizes, device: torch.device | str) -> None:
        """Makes the sums.

        Args:
            sizes: Of the layer.
            device: Where they are.
        """
        self.sizes = sizes
        self.queries = Moments((sizes.heads,), sizes.key_dim, device)
        self.keys = Moments((sizes.kv_heads,), sizes.key_dim, device)
        self.values = Moments((sizes.kv_heads,), sizes.value_dim, device)
        self.value_weight = torch.zeros(sizes.kv_heads, dtype=torch.float64, device=device)
        self.stake = torch.zeros(sizes.heads, dtype=torch.float64, device=device)
        self.share = torch.zeros(sizes.heads, dtype=torch.float64, device=device)
        self.watched = torch.zeros((), dtype=torch.float64, device=device)
        # How often a query met a key at each distance.
        self.met = torch.zeros(self.block, dtype=torch.float64, device=device)
        # The loss' gradients at keys and at the outputs of the heads of a group, and these vectors by the size of their gradient.
        self.key_pulls, self.pulled_keys = (Moments((sizes.kv_heads,), sizes.key_dim, device) for _ in range(2))
        self.output_pulls, self.pulled_outputs = (Moments((sizes.kv_heads,), sizes.value_dim, device) for _ in range(2))
        # W'W of each query head.
        self.output = torch.eye(sizes.value_dim, dtype=torch.float64, device=device).repeat(sizes.heads, 1, 1)

    def sums(self) -> list[torch.Tensor]:
        """Everything that adds up over processes, to be changed in place."""
        pulls = (self.key_pulls, self.pulled_keys, self.output_pulls, self.pulled_outputs)
        moments = [part for each in (self.queries, self.keys, self.values, *pulls) for part in (each.total, each.count)]
        return [*moments, self.value_weight, self.stake, self.share, self.watched, self.met]

    def observe(
        self, module: nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any], picks: list[Pick]
    ) -> None:
        """Counts a batch of whole sequences in.

        Args:
            module: The attention module.
            query: (batch, heads, tokens, d), as it meets the keys.
            keys: (batch, kv_heads, tokens, d).
            values: (batch, kv_heads, tokens, e).
            options: What else the model gave its attention.
            picks: What to keep as a sample.
        """
        if self.sizes is None:
            projection = _output_metric(module, query, values) if self.watch else None
            scaling = options.get("scaling")
            scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            self.open(Sizes(query.shape[1], keys.shape[1], keys.shape[-1], values.shape[-1], scaling, projection is not None), keys.device)
            if projection is not None:
                self.output = projection
        tokens = keys.shape[-2]
        self.queries.add(self.in_frame(query))
        self.keys.add(self.in_frame(keys))
        self.met[:tokens] += len(keys) * torch.arange(tokens, 0, -1, dtype=torch.float64, device=keys.device)
        weights = self._watch(query, keys, values, options) if self.watch else torch.ones_like(values[..., 0])
        self.value_weight += weights.double().sum((0, 2))
        self.values.add(values * weights.sqrt().unsqueeze(-1))
        for pick in picks:
            at = pick.positions.to(keys.device)
            self.sample[pick.block] = Tokens(at, *(each[pick.row, :, at].clone() for each in (query, keys, values)))

    def pull_keys(self, keys: torch.Tensor, gradients: torch.Tensor) -> None:
        """Counts in what the loss asks of keys.

        Args:
            keys: (batch, kv_heads, tokens, d), as attention sees them.
            gradients: Like `keys`.
        """
        pulls = self.in_frame(gradients)
        if self.geometry is not None and self.geometry.attention_scaling != 1:
            # Undone for a key, which it made larger; a gradient behind it is one before it times as much.
            pulls[..., : self.geometry.rotary_dim] *= self.geometry.attention_scaling**2
        _pull(self.key_pulls, self.pulled_keys, self.in_frame(keys), pulls)

    def pull_outputs(self, outputs: torch.Tensor, gradients: torch.Tensor) -> None:
        """Counts in what the loss asks of attention's outputs.

        Args:
            outputs: (batch, tokens, heads, e).
            gradients: Like `outputs`.
        """
        assert self.sizes is not None
        grouped = [each.transpose(1, 2).unflatten(1, (self.sizes.kv_heads, -1)).flatten(2, 3) for each in (outputs, gradients)]
        _pull(self.output_pulls, self.pulled_outputs, *grouped)

    def forget(self, sampler: Sampler) -> None:
        """Drops what is no longer in the sample.

        Args:
            sampler: Who decides.
        """
        self.sample = {block: tokens for block, tokens in self.sample.items() if block in sampler.kept}

    def in_frame(self, vectors: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Keys or queries as the bases see them.

        Args:
            vectors: (batch, heads, tokens, d), as attention sees them.
            positions: (tokens,); None for those from 0 on.
        """
        if self.geometry is None:
            return vectors
        if positions is None:
            positions = torch.arange(vectors.shape[-2], device=vectors.device)
        return self.geometry.unrotate(vectors if vectors.dtype == torch.float64 else vectors.float(), positions)

    @property
    def value_moment(self) -> torch.Tensor:
        """(kv_heads, e, e), by the weights of the values."""
        return self.values.total / self.value_weight.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]

    @property
    def key_pull(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The moment of keys, half of it by their gradients, and that of the gradients, (kv_heads, d, d)."""
        return (self.keys.mean + _by_size(self.key_pulls, self.pulled_keys)) / 2, self.key_pulls.mean

    @property
    def output_pull(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The moment of outputs by their gradients, and that of the gradients of a token's group of heads, (kv_heads, e, e)."""
        tokens = self.keys.count.clamp_min(1)[:, None, None]
        return _by_size(self.output_pulls, self.pulled_outputs), self.output_pulls.total / tokens

    def _watch(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Adds up stakes and shares; returns what each value weighs in the output, (batch, kv_heads, tokens)."""
        assert self.sizes is not None
        tokens, group = keys.shape[-2], query.shape[1] // keys.shape[1]
        # The last query has the most keys, so the even distances between those watched are counted from there.
        step = -(-tokens // _WATCHED)
        at = torch.arange(tokens - 1, -1, -step, device=keys.device)
        every_key, every_value = (each.float().repeat_interleave(group, 1) for each in (keys, values))
        weights = _attention_weights(query[:, :, at].float(), every_key, at, self.sizes.scaling, options)
        output = weights @ every_value
        metric = self.output.float()
        seen = every_value @ metric
        # |W (v - o)|^2, multiplied out.
        spread = (seen * every_value).sum(-1).unsqueeze(-2) - 2 * output @ seen.mT + ((output @ metric) * output).sum(-1, keepdim=True)
        squares = weights.square()
        self.stake += (squares * spread.clamp_min(0)).sum((0, 2, 3), dtype=torch.float64)
        self.share += squares.sum((0, 2, 3), dtype=torch.float64)
        self.watched += len(keys) * len(at)
        size = self.output.diagonal(dim1=-2, dim2=-1).sum(-1).float()
        return (squares.sum(-2) * size[:, None]).unflatten(1, (-1, group)).sum(2)


def _pull(gradients: Moments, vectors: Moments, rows: torch.Tensor, pulls: torch.Tensor) -> None:
    """Counts in gradients, and their vectors as many times as the square of the gradient is large."""
    gradients.add(pulls)
    vectors.add(rows.double() * torch.linalg.vector_norm(pulls.double(), dim=-1, keepdim=True))


def _by_size(gradients: Moments, vectors: Moments) -> torch.Tensor:
    size = gradients.total.diagonal(dim1=-2, dim2=-1).sum(-1)
    return vectors.total / size.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]


def _attention_weights(query: torch.Tensor, keys: torch.Tensor, at: torch.Tensor, scaling: float, options: dict[str, Any]) -> torch.Tensor:
    """Causal attention weights of the queries at some positions, (batch, heads, queries, keys)."""
    scores = query @ keys.mT * scaling
    if (cap := options.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    hidden = torch.arange(keys.shape[-2], device=keys.device) > at.unsqueeze(-1)
    scores = scores.masked_fill(hidden, float("-inf"))
    if (sinks := options.get("s_aux")) is not None:
        drain = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, drain), -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


def _output_metric(module: nn.Module, query: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """W'W of each query head's part of the output projection, (heads, e, e), or None where there is no such projection.

    The projection is asked what it does to unit vectors, so that its layout, adapters and quantisation need not be known.
    """
    heads, size = query.shape[1], values.shape[-1]
    for name in _PROJECTIONS:
        projection = getattr(module, name, None)
        if not isinstance(projection, nn.Module):
            continue
        units = torch.eye(heads * size, dtype=values.dtype, device=values.device)
        try:
            rows = projection(units).double() - projection(units[:1] * 0).double()
        except (RuntimeError, TypeError, AttributeError):
            continue
        if rows.ndim == 2 and len(rows) == heads * size and bool(rows.isfinite().all()):
            rows = rows.unflatten(0, (heads, size))
            return rows @ rows.mT
    return None
