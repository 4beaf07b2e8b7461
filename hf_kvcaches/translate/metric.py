"""What an error in a key or a value costs: a symmetric matrix over [keys, values] of a layer, by which regression weighs errors.

**Where attention feels it** (`attention_metric`). If a query gives its keys the weights a_i, an error d_i of a value moves the output by
a_i W d_i, with W the output projection; an error e_i of a logit by about a_i e_i W (v_i - o). The weights are common to both, so a value
counts by W'W and a key by the queries' second moment times the mean of |W (v - o)|^2, for which the values' spread stands in.

**What it costs in the end** (`LossMoments`). Draw at each place a token from what the model says, and let g be the gradient of its loss at
the cached keys and values, those of other layers held fast: what is translated is each layer for itself. To second order an error d moves
what the model says by E (g . d)^2 / 2. Places that nobody asks for in the calibration's texts would be free, so the first metric is added
with as much weight in all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_kvcaches import compat
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import UnsupportedError

_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "proj")


def output_projection(module: nn.Module, width: int) -> torch.Tensor:
    """What an attention's output projection does to its input, (width, hidden), adapters included.

    Args:
        module: The attention.
        width: Of its input.
    """
    for name in _PROJECTIONS:
        projection = getattr(module, name, None)
        if isinstance(projection, nn.Module):
            break
    else:
        raise UnsupportedError(f"metric: found no output projection in {type(module).__name__}. Use metric='plain'.")
    like: torch.Tensor = next(projection.parameters())
    if not like.is_floating_point():
        like = torch.empty(0, dtype=torch.get_default_dtype())
    device = compat.layer_device(projection)
    rows = torch.cat([torch.zeros(1, width), torch.eye(width)]).to(device, like.dtype)
    with torch.no_grad():
        done = projection(rows)
    return (done[1:] - done[:1]).double().cpu()


def attention_metric(projection: torch.Tensor, queries: torch.Tensor, spread: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """See the module.

    Args:
        projection: (heads * value_dim, hidden).
        queries: Second moments, (heads, key_dim, key_dim), the attention's scaling included.
        spread: Covariance of the values, (kv_heads * value_dim, kv_heads * value_dim).
        kv_heads: How many heads share how many.
    """
    heads, key_dim, _ = queries.shape
    value_dim, group = len(projection) // heads, heads // kv_heads
    keys, values = [], []
    for head in range(kv_heads):
        own = slice(head * value_dim, (head + 1) * value_dim)
        of_keys, of_values = torch.zeros(key_dim, key_dim, dtype=torch.float64), torch.zeros(value_dim, value_dim, dtype=torch.float64)
        for query in range(head * group, (head + 1) * group):
            part = projection[query * value_dim : (query + 1) * value_dim]
            share = part @ part.T
            of_values += share
            of_keys += float((share * spread[own, own]).sum()) * queries[query]
        keys.append(of_keys)
        values.append(of_values)
    return torch.block_diag(*keys, *values)


def blend(loss: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Both metrics with the same weight in all, in the unit of the first.

    Args:
        loss: Of gradients.
        attention: Of the layer's attention.
    """
    return loss + attention * (float(loss.trace()) / max(float(attention.trace()), 1e-300))


class LossMoments:
    """Second moments of gradients at a layer's keys and values, keys without rotation.

    Args:
        geometry: How the layer's keys are turned.
    """

    def __init__(self, geometry: RotaryGeometry) -> None:
        self.geometry = geometry
        self.sums: torch.Tensor | None = None
        self.count = 0

    def add(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Counts the gradients of a prompt in.

        Args:
            keys: At rotated keys, (1, kv_heads, tokens, key_dim).
            values: At values.
            positions: (1, tokens).
        """
        if self.geometry.kind == "rope":
            # The gradient at a key before its rotation is turned back as a key is; what scales keys scales it the other way.
            keys = self.geometry.unrotate(keys, positions) * self.geometry.attention_scaling**2
        rows = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (keys, values)], dim=1).float()
        products = (rows.T @ rows).double().cpu()
        self.sums = products if self.sums is None else self.sums + products
        self.count += len(rows)


def loss_gradients(
    model: Any, ids: torch.Tensor, leaves: list[tuple[torch.Tensor, torch.Tensor]], cache: Any, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients at all layers' keys and values of the loss of tokens that the model itself would go on with.

    Args:
        model: With a head.
        ids: (1, tokens).
        leaves: Filled by the cache with each layer's keys and values.
        cache: The cache that fills them.
        seed: Of what is drawn.
    """
    with torch.inference_mode(False), torch.enable_grad():
        logits = model(input_ids=ids.clone(), past_key_values=cache, use_cache=True).logits.float()
        log_shares = logits.log_softmax(-1)
        with torch.no_grad():
            drawn = torch.rand(ids.shape[1], 1, generator=torch.Generator().manual_seed(seed)).to(logits.device)
            sums = log_shares[0].exp().cumsum(-1)
            tokens = torch.searchsorted(sums, drawn * sums[:, -1:]).clamp_max(logits.shape[-1] - 1)
        loss = -log_shares[0].gather(-1, tokens).sum()
        flat = torch.autograd.grad(loss, [each for pair in leaves for each in pair])
    return list(zip(flat[::2], flat[1::2], strict=True))
