"""The paper's stability constants: how much a layer amplifies errors of its input, and of its cached keys and values (appendix C).

**Departs from the paper**, which bounds them by norms: here they are singular values of Jacobians at a text, by power iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers

_STEP = 1e-3  # of finite differences, as a share of the input's size


def stability_constants(model: Any, ids: Tensor, split: int, iterations: int = 8) -> list[tuple[float, float]]:
    """Return alpha and beta of each layer (equation 15) for the tokens of a text from `split` on, (1, tokens), behind those before."""
    base = compat.base_model(model)
    cache, calls, hooks = DynamicCache(), list[tuple[Any, Tensor, dict[str, Any]]](), []
    with torch.no_grad():
        base(input_ids=ids[:, :split], **compat.cache_kwargs(base, cache))
        past = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        for layer in decoder_layers(base)[2]:
            keep = lambda module, args, kwargs: calls.append((module, args[0] if args else kwargs.pop("hidden_states"), dict(kwargs)))  # noqa: E731
            hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
        try:
            base(input_ids=ids[:, split:], **compat.cache_kwargs(base, cache))
        finally:
            for hook in hooks:
                hook.remove()
    return [_of_layer(index, *call, *past[index], iterations) for index, call in enumerate(calls)]


def _of_layer(
    index: int, layer: Any, hidden: Tensor, kwargs: dict[str, Any], keys: Tensor, values: Tensor, iterations: int
) -> tuple[float, float]:
    def run(hidden: Tensor, states: Tensor) -> Tensor:
        held = DynamicCache()
        for number in range(index + 1):
            held.update(*states.view(2, *keys.shape), number)
        own = {name: held if isinstance(value, DynamicCache) else value for name, value in kwargs.items()}
        output = layer(hidden, **own)
        return output[0] if isinstance(output, tuple) else output

    states = torch.stack([keys, values]).flatten()
    return _norm(lambda x: run(x, states), hidden, iterations), _norm(lambda x: run(hidden, x), states, iterations)


@torch.enable_grad()
def _norm(function: Callable[[Tensor], Tensor], x: Tensor, iterations: int) -> float:
    x = x.detach().clone().requires_grad_()
    output, step = function(x), _STEP * float(x.detach().norm())
    direction, size = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x), 0.0
    for _ in range(iterations):
        direction = direction / direction.norm()
        with torch.no_grad():
            change = (function(x + step * direction) - output) / step
        size = float(change.norm())
        (direction,) = torch.autograd.grad(output, x, change, retain_graph=True)
        if not bool(direction.any()):
            break
    return size
