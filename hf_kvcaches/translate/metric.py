"""What an error in a key or a value costs: a symmetric matrix over [keys, values] of a layer, by which regression weighs errors.

What errors cost in the output of attention, and in what the model predicts, is in `core/metric.py`. Gradients are taken at one layer's keys
and values with those of the other layers fixed, because each layer is translated for itself, and nothing is recomputed from the result.
Positions that the calibration's texts never ask for would be free, so the metric of attention is added with as much weight in all.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.core.metric import Sizes, before_rotation, loss_of_drawn
from hf_kvcaches.core.moments import second_moment
from hf_kvcaches.core.rope import RotaryGeometry

# Keys of a text from where its queries are looked at, as shares of its length.
_FROM = (0.0, 0.25, 0.5, 0.75)


class QueryMoments:
    """Sums over the queries of a layer, by which its keys without rotation count.

    A query at position i meets a key at position j rotated back by j. The keys of a text's start and its quarters stand for all: an average
    over all distances would have to treat what is asked as independent of where, and loses facts that are asked for at the end.
    """

    def __init__(self, sizes: Sizes, geometry: RotaryGeometry, device: torch.device | str) -> None:
        self.sizes, self.geometry = sizes, geometry
        self.total = torch.zeros(sizes.heads, sizes.key_dim, sizes.key_dim, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, query: torch.Tensor) -> None:
        """Adds a text's rotated queries, (1, heads, tokens, key_dim)."""
        for share in _FROM:
            position = int(share * query.shape[2])
            met = before_rotation(self.geometry, query[:, :, position:], position)[0]
            self.total += second_moment(met) / met.shape[1]
            self.count += 1

    def logit_moment(self) -> torch.Tensor:
        """By which keys count for the squared error of a logit, (heads, key_dim, key_dim)."""
        return self.total / self.count * self.sizes.scaling**2


def attention_metric(queries: torch.Tensor, output: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """What errors cost in the output of attention, (width, width), on the CPU.

    The weights of attention are taken as equal in all heads: which head looks where depends on the text, and facts that only a later
    question asks for are lost where heads that had little to do count less. So a value costs W'W, and a key the logit's square times the
    mean of |W (v - mean)|^2.

    Args:
        queries: As from `QueryMoments.logit_moment`, (heads, key_dim, key_dim).
        output: As from `output_metric`, (heads, value_dim, value_dim).
        spread: Covariance of the values, (kv_heads * value_dim, kv_heads * value_dim).
    """
    size = output.shape[-1]
    covariances = torch.stack([spread[start : start + size, start : start + size] for start in range(0, len(spread), size)])
    group = len(queries) // len(covariances)
    reach = (output * covariances.to(output).repeat_interleave(group, 0)).sum((1, 2))
    keys, values = ((part.unflatten(0, (-1, group)).sum(1)) for part in (reach[:, None, None] * queries, output))
    return torch.block_diag(*keys, *values).cpu()


def blend(loss: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Both metrics with the same weight in all, in the unit of the first."""
    return loss + attention * (float(loss.trace()) / max(float(attention.trace()), 1e-300))


def gradient_rows(geometry: RotaryGeometry, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Gradients at a layer's keys without rotation and values, side by side as in a `State`, (tokens, width).

    Args:
        keys: At rotated keys, (1, kv_heads, tokens, key_dim).
        positions: (1, tokens).
    """
    return torch.cat([part[0].transpose(0, 1).flatten(1) for part in (before_rotation(geometry, keys, positions), values)], dim=1)


def loss_gradients(
    model: Any, ids: torch.Tensor, leaves: list[tuple[torch.Tensor, torch.Tensor]], cache: Any, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients at all layers' keys and values of the loss of tokens that the model itself would continue with.

    Args:
        ids: (1, tokens).
        leaves: Filled by the cache with each layer's keys and values.
    """
    with torch.inference_mode(False), torch.enable_grad():
        logits = model(input_ids=ids.clone(), past_key_values=cache, use_cache=True).logits
        flat = torch.autograd.grad(loss_of_drawn(logits, [seed]), [part for pair in leaves for part in pair])
    return list(zip(flat[::2], flat[1::2], strict=True))
