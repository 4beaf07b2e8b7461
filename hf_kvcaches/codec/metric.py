"""What errors of keys and values cost: the parts that such metrics have in common.

**In the output of attention**, an error of a key counts by the logits that meet it: by the second moment of the queries, as keys without
rotation meet them. An error of a value counts by W'W, with W the output projection.

**In the prediction.** Draw a token at each position from the model's distribution there, and take the loss of these tokens. Its gradient g
at some vector of a layer has the mean 0, and to second order an error d there changes the predictions by the divergence `E (g . d)^2 / 2`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.rope import RotaryGeometry

Metric = Literal["loss", "plain"]
# Of a chunk of positions: 64 MiB in float32, 64 positions of a vocabulary of 262,144 tokens.
_LOGITS = 1 << 24
_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "proj")


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


def gradient_of_drawn(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], seeds: Sequence[int]) -> torch.Tensor:
    """Return the gradient, at a model's last hidden states, of the loss of tokens that the model itself would continue with.

    A token is drawn at each position; the loss is the sum over all. Logits exist for a few positions at a time.

    Args:
        states: (batch, tokens, hidden).
        head: From hidden states to logits, (batch, tokens, vocabulary); differentiable.
        seeds: One for each row, so that batches and processes don't matter.
    """
    batch, tokens, _ = states.shape
    draws = torch.stack([torch.rand(tokens, 1, generator=torch.Generator().manual_seed(seed)) for seed in seeds]).to(states.device)
    gradient = torch.empty_like(states)
    start, step = 0, 1
    while start < tokens:
        chunk = slice(start, start + step)
        part = states[:, chunk].detach().requires_grad_()
        logits = head(part)
        (gradient[:, chunk],) = torch.autograd.grad(logits, part, _at_logits(logits.detach(), draws[:, chunk]).to(logits.dtype))
        start, step = start + step, max(1, _LOGITS // (batch * logits.shape[-1]))
    return gradient


def _at_logits(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the loss at logits: the shares, less 1 at the drawn token, (batch, tokens, vocabulary).

    Args:
        draws: Numbers from 0 to 1, (batch, tokens, 1).
    """
    shares = logits.float().softmax(-1)
    sums = shares.cumsum(-1)
    # Rounding leaves the whole a little off 1.
    drawn = torch.searchsorted(sums, draws * sums[..., -1:]).clamp_max(logits.shape[-1] - 1)
    return shares.scatter_add_(-1, drawn, torch.full_like(draws, -1.0))
