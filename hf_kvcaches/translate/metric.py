"""The cost of errors of a key or a value: a symmetric matrix over a layer's [keys, values], by which regression weighs errors.

`core/metric.py` describes both kinds. Gradients are taken with the other layers' keys and values fixed, as each layer is translated alone.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.core.metric import before_rotation, loss_of_drawn
from hf_kvcaches.core.moments import second_moment
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.splicing.rotation import Rotation
from hf_kvcaches.translate.states import PromptTokens, ReadingCache

# The positions of the keys that stand for all of a text, as shares of its length. An average over all distances takes no notice of how far
# behind a key it is asked for, and loses facts that are asked for at the end of a text.
_KEY_POSITIONS = (0.0, 0.25, 0.5, 0.75)


def logit_moment(geometry: RotaryGeometry, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the cost of an error of a key without rotation, as the mean squared error of its logits, (heads, key_dim, key_dim).

    Args:
        query: A text's rotated queries, (1, heads, tokens, key_dim).
    """
    moments = []
    for share in _KEY_POSITIONS:
        position = int(share * query.shape[2])
        # A query meets a key at `position` rotated back by that position.
        rows = before_rotation(geometry, query[:, :, position:], position)[0]
        moments.append(second_moment(rows) / rows.shape[1])
    return torch.stack(moments).mean(0) * scaling**2


def attention_metric(queries: torch.Tensor, output: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Return the cost of errors in the output of attention, (width, width), on the CPU.

    An error of a value costs W'W, and one of a key the squared error of the logit times the mean of |W (v - mean)|^2. Heads count alike:
    weighing them by their attention weights loses facts that only a later question asks for.

    Args:
        queries: As from `logit_moment`, (heads, key_dim, key_dim).
        output: As from `output_metric`, (heads, value_dim, value_dim).
        covariance: Of the values, (kv_heads * value_dim, kv_heads * value_dim).
    """
    size = output.shape[-1]
    blocks = torch.stack([covariance[start : start + size, start : start + size] for start in range(0, len(covariance), size)])
    group = len(queries) // len(blocks)
    deviations = (output * blocks.to(output).repeat_interleave(group, 0)).sum((1, 2))
    keys, values = ((part.unflatten(0, (-1, group)).sum(1)) for part in (deviations[:, None, None] * queries, output))
    return torch.block_diag(*keys, *values).cpu()


def loss_gradients(model: Any, rotation: Rotation, tokens: PromptTokens, seed: int) -> list[torch.Tensor]:
    """Return the gradients of the loss of tokens drawn from the model's own predictions, at each layer's [keys without rotation, values].

    Args:
        tokens: Of one text.

    Returns:
        (tokens, width) for each layer.
    """
    cache = ReadingCache(model)
    cache.leaves = []
    with torch.inference_mode(False), torch.enable_grad():
        logits = model(input_ids=tokens.ids.clone(), past_key_values=cache, use_cache=True).logits
        gradients = torch.autograd.grad(loss_of_drawn(logits, [seed]), [part for pair in cache.leaves for part in pair])
    rows = []
    for geometry, keys, values in zip(rotation.layers, gradients[::2], gradients[1::2], strict=True):
        pair = before_rotation(geometry, keys, tokens.positions), values
        rows.append(torch.cat([part[0].transpose(0, 1).flatten(1) for part in pair], dim=1))
    return rows
