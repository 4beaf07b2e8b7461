"""What errors of keys and values cost: the parts that such metrics have in common.

**In the output of attention**, an error of a key counts by the logits that meet it: by the second moment of the queries, as keys without
rotation meet them. An error of a value counts by W'W, with W the output projection.

**In the prediction.** Draw a token at each position from the model's distribution there, and take the loss of these tokens. Its gradient g
at some vector of a layer has the mean 0, and to second order an error d there changes the predictions by the divergence `E (g . d)^2 / 2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.rope import RotaryGeometry

Metric = Literal["loss", "attention", "plain"]
_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "proj")


class Sizes(NamedTuple):
    """The shape of a layer's attention.

    Args:
        scaling: What the model multiplies `q.k` with.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    projected: bool

    @classmethod
    def of(cls, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any], projected: bool) -> Sizes:
        """Those of one call of attention, with its options."""
        scaling = options.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        return cls(query.shape[1], keys.shape[1], keys.shape[-1], values.shape[-1], scaling, projected)


def output_metric(module: nn.Module, heads: int, values: torch.Tensor) -> torch.Tensor | None:
    """W'W of each query head's part of the output projection, (heads, e, e), or None where there is no such projection."""
    rows = output_rows(module, heads, values)
    return None if rows is None else rows @ rows.mT


def output_rows(module: nn.Module, heads: int, values: torch.Tensor, shard: HeadShard | None = None) -> torch.Tensor | None:
    """Each query head's part of the output projection, (heads, e, hidden), or None where there is no such projection.

    The projection is asked what it does to unit vectors, so that its layout, adapters and quantisation need not be known.

    Args:
        heads: Of the queries.
        values: (batch, kv_heads, tokens, e).
        shard: Which heads these are, under tensor parallelism, where the projection sums over the heads of all processes.
    """
    size = values.shape[-1]
    for name in _PROJECTIONS:
        projection = getattr(module, name, None)
        if not isinstance(projection, nn.Module):
            continue
        units = torch.eye(heads * size, dtype=values.dtype, device=values.device)
        try:
            turns = [projection(units * (shard is None or shard.rank == rank)) for rank in range(1 if shard is None else shard.size)]
            rows = turns[0 if shard is None else shard.rank].double() - projection(units[:1] * 0).double()
        except (RuntimeError, TypeError, AttributeError):
            continue
        if rows.ndim == 2 and len(rows) == heads * size and bool(rows.isfinite().all()):
            return rows.unflatten(0, (heads, size))
    return None


def before_rotation(geometry: RotaryGeometry | None, gradients: torch.Tensor, positions: int | torch.Tensor) -> torch.Tensor:
    """Gradients at keys before their rotation, of those at rotated keys; queries are such gradients, of logits.

    The adjoint of a rotation is the rotation back, and what scales a key scales its gradient once more instead of less.

    Args:
        geometry: How keys are rotated; None where they are taken as they are.
        gradients: (batch, heads, tokens, d).
    """
    precise = gradients if gradients.dtype == torch.float64 else gradients.float()
    return geometry.rotate(precise, -positions) if geometry is not None and geometry.kind == "rope" else precise


def loss_of_drawn(logits: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """The loss of tokens that the model itself would continue with, drawn anew at each position; summed.

    Args:
        logits: (batch, tokens, vocabulary).
        seeds: One for each row, so that batches and processes don't matter.
    """
    log_shares = logits.float().log_softmax(-1)
    with torch.no_grad():
        drawn = [torch.rand(logits.shape[1], 1, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        sums = log_shares.exp().cumsum(-1)
        # Rounding leaves the whole a little off 1.
        tokens = torch.searchsorted(sums, torch.stack(drawn).to(sums.device) * sums[..., -1:])
        tokens = tokens.clamp_max(logits.shape[-1] - 1)
    return -log_shares.gather(-1, tokens).sum()
