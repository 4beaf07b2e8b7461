"""The paper's layers: Reuse translates keys and values (section 4.3), Patch the input of the attention (section 4.4).

And stability constants: how much a layer amplifies errors of its input, and of its cached keys and values (appendix C).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers

# The share of held-out tokens, after how many steps the error on them is measured, and the tokens of a step.
_HELD_OUT, _EVALUATE_AFTER, _BATCH = 0.1, 50, 512
_STEP = 1e-3  # of finite differences, as a share of the input's size


class Translator(NamedTuple):
    """From the producer's keys or values in one layer to codes, (producer, rank), and to the consumer's, (rank, consumer)."""

    encode: Tensor
    decode: Tensor


def fit_reuse(producer: Tensor, consumer: Tensor, rank: int, ridge: float = 1e-6) -> Translator:
    """Factorise both models' states side by side, (tokens, width) each, by a truncated SVD, with a ridge encoder (equations 6 and 7).

    Args:
        ridge: As a share of the mean square of the producer's states.
    """
    both = torch.cat([producer, consumer], dim=1).double()
    latents = torch.linalg.eigh(both.T @ both)[1].flip(1)[:, :rank]
    return Translator(fit_ridge(producer, both @ latents, ridge), latents[producer.shape[1] :].T.float())


def fit_ridge(inputs: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """Return the weights of a ridge regression, (inputs, targets), float32."""
    inputs = inputs.double()
    squares = inputs.T @ inputs
    squares.diagonal().add_(ridge * squares.diagonal().mean() + torch.finfo(torch.float64).tiny)
    return torch.linalg.solve(squares, inputs.T @ targets.double()).float()


class Aligner(nn.Module):
    """From codes to the consumer's attention input (equation 11): a ridge solution, which the paper lacks, and an MLP."""

    linear: Tensor
    spread: Tensor

    def __init__(self, codes: Tensor, targets: Tensor, width: int) -> None:
        super().__init__()
        inputs = torch.cat([codes, codes.new_ones(len(codes), 1)], dim=1)
        self.register_buffer("linear", fit_ridge(inputs, targets, 1e-6))
        self.register_buffer("spread", codes.std(0).clamp_min(1e-6))
        self.inner, self.outer = nn.Linear(codes.shape[1], width), nn.Linear(width, targets.shape[1])
        for weights in (self.outer.weight, self.outer.bias):
            nn.init.zeros_(weights)

    def forward(self, codes: Tensor) -> Tensor:
        hidden = functional.gelu(self.inner(codes / self.spread))
        return codes @ self.linear[:-1] + self.linear[-1] + self.outer(hidden)


@torch.enable_grad()
def train_aligner(codes: Tensor, targets: Tensor, steps: int, rate: float = 1e-3) -> Aligner:
    """Train by AdamW, and keep the weights with the least error on the last tenth of the tokens: it is never worse than the ridge there."""
    torch.manual_seed(0)
    split = round((1 - _HELD_OUT) * len(codes))
    with torch.inference_mode(False):
        aligner = Aligner(codes[:split], targets[:split], 2 * targets.shape[1])
        optimizer = torch.optim.AdamW(aligner.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
        best, least = copy.deepcopy(aligner.state_dict()), float("inf")
        for step in range(steps + 1):
            if step % _EVALUATE_AFTER == 0:
                with torch.no_grad():
                    error = float(functional.mse_loss(aligner(codes[split:]), targets[split:]))
                if error < least:
                    best, least = copy.deepcopy(aligner.state_dict()), error
            rows = torch.randint(split, (min(_BATCH, split),))
            optimizer.zero_grad()
            functional.mse_loss(aligner(codes[rows]), targets[rows]).backward()
            optimizer.step()
            schedule.step()
    aligner.load_state_dict(best)
    return aligner.eval()


def stability_constants(model: Any, ids: Tensor, split: int, iterations: int = 8) -> list[tuple[float, float]]:
    """Return alpha and beta of each layer (equation 15) for the tokens of a text from `split` on, (1, tokens), behind those before.

    **Departs from the paper**, which bounds them by norms: here they are singular values of Jacobians at a text, by power iteration.
    """
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
    return [_of_layer(index, *call, torch.stack(past[index]), iterations) for index, call in enumerate(calls)]


def _of_layer(index: int, layer: Any, hidden: Tensor, kwargs: dict[str, Any], states: Tensor, iterations: int) -> tuple[float, float]:
    def run(hidden: Tensor, states: Tensor) -> Tensor:
        held = DynamicCache()
        for number in range(index + 1):
            held.update(*states, number)
        own = {name: held if isinstance(value, DynamicCache) else value for name, value in kwargs.items()}
        output = layer(hidden, **own)
        return output[0] if isinstance(output, tuple) else output

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
