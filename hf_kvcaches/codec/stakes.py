"""What errors of keys and values cost in the output of a layer's attention, by where each head looks.

Let a query give its keys the weights a_i and get the output o = sum a_i v_i, which the output projection W takes to the
layer's output. If a value is off by d_i, that is off by `sum a_i W d_i`. If a logit is off by e_i, weights are off by
`a_i (e_i - sum a_j e_j)` to first order, and because `sum a_i (v_i - o) = 0` the output by `sum a_i e_i W (v_i - o)`. With independent
errors the squares add up:

    keys:    sum a_i^2 |W (v_i - o)|^2 e_i^2        values:  sum a_i^2 |W d_i|^2

So two numbers of each query head make errors of keys and values comparable, the means over queries of
`stake = sum a_i^2 |W (v_i - o)|^2` and of `share = sum a_i^2`. With M, the second moment of the queries times the square of their scaling,
an error of keys is measured by `stake * M`, and one of values by `share * W'W`. A key head adds up the heads of its group.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.codec.metric import Sizes, before_rotation
from hf_kvcaches.codec.moments import Moments, rotation_average
from hf_kvcaches.core.rope import RotaryGeometry

# Queries of a sequence whose attention weights are computed.
_WATCHED = 128


class QueryMeter:
    """Sums over the queries of a layer, and the metric of keys that follows from them.

    Args:
        geometry: How keys are rotated; None to take them as they are.
        length: Of the longest sequence, as far as it is known.
    """

    def __init__(self, sizes: Sizes, geometry: RotaryGeometry | None, length: int, device: torch.device | str) -> None:
        self.sizes, self.geometry = sizes, geometry
        self.moments = Moments((sizes.heads,), sizes.key_dim, device)
        # How often a query met a key at each distance.
        self.met = torch.zeros(length, dtype=torch.float64, device=device)

    def sums(self) -> list[torch.Tensor]:
        """Everything that adds up over processes, to be changed in place."""
        return [self.moments.total, self.moments.count, self.met]

    def observe(self, query: torch.Tensor, options: dict[str, Any]) -> None:
        """Adds whole sequences.

        Args:
            query: (batch, heads, tokens, d), rotated.
            options: What else the model gave its attention.
        """
        tokens = query.shape[-2]
        met = torch.arange(tokens, 0, -1, dtype=torch.float64, device=query.device)
        if (window := options.get("sliding_window")) is not None:
            met[window:] = 0
        self.met = torch.nn.functional.pad(self.met, (0, max(0, tokens - len(self.met))))
        self.met[:tokens] += len(query) * met
        self.moments.add(before_rotation(self.geometry, query, torch.arange(tokens, device=query.device)))

    def logit_moment(self) -> torch.Tensor:
        """By which keys without rotation count for the squared error of a logit, (heads, d, d)."""
        moment = self.moments.mean * self.sizes.scaling**2
        if self.geometry is None or self.geometry.kind != "rope":
            return moment
        return rotation_average(moment, self.geometry, torch.arange(len(self.met), device=self.met.device), self.met / self.met.sum())


class AttentionMeter:
    """Sums over the attention weights of a layer, and the metric of its keys and values that follows from them.

    Args:
        geometry: How keys are rotated; None to take them as they are.
        output: As from `output_metric`; None for the identity.
    """

    def __init__(
        self, sizes: Sizes, geometry: RotaryGeometry | None, output: torch.Tensor | None, length: int, device: torch.device | str
    ) -> None:
        self.sizes, self.queries = sizes, QueryMeter(sizes, geometry, length, device)
        self.stake, self.share = (torch.zeros(sizes.heads, dtype=torch.float64, device=device) for _ in range(2))
        self.watched = torch.zeros((), dtype=torch.float64, device=device)
        identity = torch.eye(sizes.value_dim, dtype=torch.float64, device=device).expand(sizes.heads, -1, -1)
        self.output = identity if output is None else output.to(device)

    def sums(self) -> list[torch.Tensor]:
        """Everything that adds up over processes, to be changed in place."""
        return [*self.queries.sums(), self.stake, self.share, self.watched]

    def observe(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Adds whole sequences, and returns how much each value counts in the output, (batch, kv_heads, tokens).

        Args:
            query: (batch, heads, tokens, d), rotated.
            keys: (batch, kv_heads, tokens, d), rotated.
            values: (batch, kv_heads, tokens, e).
            options: What else the model gave its attention.
        """
        self.queries.observe(query, options)
        tokens, group = keys.shape[-2], query.shape[1] // keys.shape[1]
        # The last query has the most keys, so the even distances between those watched are counted from there.
        step = -(-tokens // _WATCHED)
        at = torch.arange(tokens - 1, -1, -step, device=keys.device)
        all_keys, all_values = (part.float().repeat_interleave(group, 1) for part in (keys, values))
        weights = _attention_weights(query[:, :, at].float(), all_keys, at, self.sizes.scaling, options)
        output, metric = weights @ all_values, self.output.float()
        projected = all_values @ metric
        # |W (v - o)|^2, multiplied out.
        spread = (projected * all_values).sum(-1).unsqueeze(-2) - 2 * output @ projected.mT
        spread += ((output @ metric) * output).sum(-1, keepdim=True)
        squares = weights.square()
        self.stake += (squares * spread.clamp_min(0)).sum((0, 2, 3), dtype=torch.float64)
        self.share += squares.sum((0, 2, 3), dtype=torch.float64)
        self.watched += len(keys) * len(at)
        size = self.output.diagonal(dim1=-2, dim2=-1).sum(-1).float()
        return (squares.sum(-2) * size[:, None]).unflatten(1, (-1, group)).sum(2)

    def metrics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What an error of a key without rotation and of a value costs, (kv_heads, d, d) and (kv_heads, e, e)."""
        stake, share = (_evened(part / self.watched)[:, None, None] for part in (self.stake, self.share))
        keys, values = stake * self.queries.logit_moment(), share * self.output
        return keys.unflatten(0, (self.sizes.kv_heads, -1)).sum(1), values.unflatten(0, (self.sizes.kv_heads, -1)).sum(1)


def _evened(heads: torch.Tensor) -> torch.Tensor:
    # A head that had little to do in this text may be the one that another text needs. On the testbed, halfway to the mean of the
    # layer costs nothing in perplexity at equal bytes and keeps the recall that heads' own numbers lose.
    return (heads + heads.mean()) / 2


def _attention_weights(query: torch.Tensor, keys: torch.Tensor, at: torch.Tensor, scaling: float, options: dict[str, Any]) -> torch.Tensor:
    """Causal attention weights of the queries at some positions, (batch, heads, queries, keys)."""
    scores = query @ keys.mT * scaling
    if (cap := options.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    distances = at.unsqueeze(-1) - torch.arange(keys.shape[-2], device=keys.device)
    hidden = distances < 0
    if (window := options.get("sliding_window")) is not None:
        hidden |= distances >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    if (sinks := options.get("s_aux")) is not None:
        drain = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, drain), -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)
