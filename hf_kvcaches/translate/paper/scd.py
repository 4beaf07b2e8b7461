"""Semantic Cache Distillation as the paper has it, in the plainest form.

Reuse translates the keys and values of most layers (section 4.3), Patch the input of the attention of a few (section 4.4), which a search
chooses. Stability constants are how much a layer amplifies errors of its input, and of its cached keys and values (appendix C).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.reuse.partial import Arguments, ToldModule, name_of, twin_of
from hf_kvcaches.translate.pair import Pair, cache_of, split_of
from hf_kvcaches.translate.states import LayerState, PromptTokens, read, rotation_of_model

# The share of held-out tokens, after how many steps the error on them is measured, and the tokens of a step.
_HELD_OUT, _EVALUATE_AFTER, _BATCH = 0.1, 50, 512
_STEP = 1e-3  # of finite differences, as a share of the input's size

# By layer: of keys and of values, or of the attention's input, (tokens, rank) each, in float16.
Codes = dict[int, tuple[Tensor, ...]]


class Translator(NamedTuple):
    """From the producer's keys or values in one layer to codes, (producer, rank), and to the consumer's, (rank, consumer)."""

    encode: Tensor
    decode: Tensor


def fit_reuse(producer: Tensor, consumer: Tensor, rank: int, ridge: float = 1e-6) -> Translator:
    """Factorise both models' states side by side, (tokens, width) each, by a truncated SVD, with a ridge encoder (equations 6 and 7)."""
    both = torch.cat([producer, consumer], dim=1).double()
    latents = torch.linalg.eigh(both.T @ both)[1].flip(1)[:, :rank]
    return Translator(fit_ridge(producer, both @ latents, ridge), latents[producer.shape[1] :].T.float())


def fit_ridge(inputs: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """Return the weights of a ridge regression, (inputs, targets), float32; the ridge is a share of the mean square of the inputs."""
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


def select(score: Callable[[frozenset[int]], float], layers: Sequence[int], *, pool: int, most: int) -> tuple[int, ...]:
    """Choose the layers to patch.

    A greedy search among the `pool` layers that gain most alone (equation 21) takes the one with the largest gain over those before
    (equation 22), up to `most`. As many of them are patched as give the largest gain for each layer. Of equals, the lowest layer.

    Args:
        score: With exactly these layers patched and all others reused; greater is better.
    """
    score = functools.cache(score)
    best_alone = sorted(layers, key=lambda layer: (-score(frozenset({layer})), layer))
    candidates, chosen, order, gains = sorted(best_alone[:pool]), frozenset[int](), list[int](), list[float]()
    while candidates and len(order) < most:
        best = max(candidates, key=lambda layer: score(chosen | {layer}))
        if score(chosen | {best}) <= score(chosen):
            break
        chosen |= {best}
        candidates.remove(best)
        order.append(best)
        gains.append((score(chosen) - score(frozenset())) / len(order))
    return tuple(sorted(order[: gains.index(max(gains)) + 1])) if order else ()


@dataclass(frozen=True, eq=False)
class SemanticCacheDistillation:
    """The paper's method for a pair of models with as many layers and heads: translators of each layer's keys and values, and patches."""

    reuse: dict[int, list[Translator]]  # of keys and of values
    patches: dict[int, tuple[Tensor, Aligner]]  # from the producer's attention input to codes, and from these to the consumer's
    shapes: Sequence[tuple[int, int, int]]  # of the consumer's layers, as in `LayerState`

    @classmethod
    @torch.no_grad()
    def fit(
        cls,
        producer: Any,
        consumer: Any,
        texts: Sequence[Sequence[int]],
        ranks: tuple[int, int, int] = (16, 32, 64),
        patched: Sequence[int] | None = None,
        *,
        pool: int = 8,
        most: int = 6,
        steps: int = 400,
    ) -> Self:
        """Fit all maps to traces of both models (section 4.1), and choose the layers to patch on the last quarter of the texts.

        Args:
            ranks: Of keys, values and attention inputs.
            patched: Layers to patch; None to choose up to `most` from a `pool`.
        """
        held_out = texts[len(texts) - len(texts) // 4 :] if patched is None else []
        theirs, own = (_traces(model, texts[: len(texts) - len(held_out)]) for model in (producer, consumer))
        reuse, patches = {}, {}
        for layer, (one, other) in enumerate(zip(theirs, own, strict=True)):
            reuse[layer] = [fit_reuse(*side) for side in zip(_sides(one), _sides(other), ranks[:2], strict=True)]
        for layer in range(len(own)) if patched is None else patched:
            source, target = theirs[layer].hidden.float(), own[layer].hidden.float()
            encode = fit_reuse(source, target, ranks[2]).encode
            patches[layer] = encode, train_aligner((source @ encode).half().float(), target, steps)
        whole = cls(reuse, patches, [state.shape for state in own])
        if patched is not None:
            return whole
        pair = Pair(producer, consumer, None)

        def score(layers: frozenset[int]) -> float:
            """How near the consumer's predictions of texts' ends are to those with its own cache."""
            losses = []
            for ids in (torch.tensor(list(text)) for text in held_out):
                before = ids[: split_of(len(ids))]
                found = pair.states(before)[1], whole._states(pair.consumer, whole.encode(producer, before.tolist(), layers))
                losses.append(float(divergence(*(pair.predictions(ids, states) for states in found)).mean()))
            return -fmean(losses)

        chosen = select(score, range(len(own)), pool=pool, most=most)
        return cls(reuse, {layer: patches[layer] for layer in chosen}, whole.shapes)

    @torch.no_grad()
    def encode(self, producer: Any, ids: Sequence[int], patched: frozenset[int] | None = None) -> Codes:
        """Run a producer over a prompt, and return the codes of each layer (equation 8)."""
        codes: Codes = {}
        for layer, state in enumerate(_traces(producer, [ids])):
            if layer in (self.patches if patched is None else patched):
                parts = [state.hidden.float() @ self.patches[layer][0]]
            else:
                parts = [side @ own.encode for side, own in zip(_sides(state), self.reuse[layer], strict=True)]
            codes[layer] = tuple(part.half() for part in parts)
        return codes

    @torch.no_grad()
    def decode(self, consumer: Any, codes: Codes) -> DynamicCache:
        """Rebuild the consumer's cache (equations 9 and 12): patched layers make keys and values with their own weights."""
        model = compat.base_model(consumer)
        return cache_of(rotation_of_model(model), self._states(model, codes), model.dtype)

    def _states(self, model: Any, codes: Codes) -> dict[int, LayerState]:
        states = {}
        for layer, parts in codes.items():
            if len(parts) == 1:
                states[layer] = _state_of_input(model, layer, self.patches[layer][1](parts[0].float()))
            else:
                sides = [part.float() @ own.decode for part, own in zip(parts, self.reuse[layer], strict=True)]
                states[layer] = LayerState(torch.cat(sides, dim=1), self.shapes[layer])
        return states


def _traces(model: Any, texts: Sequence[Sequence[int]]) -> list[LayerState]:
    """Read the texts, and return the states of all their tokens in each layer."""
    base, found = compat.base_model(model), list[dict[int, LayerState]]()
    layers = range(len(decoder_layers(base)[2]))
    for ids in texts:
        found.append({})
        read(base, PromptTokens.of([list(ids)]), found[-1].__setitem__, hidden=layers)
    whole = lambda layer, part: torch.cat([getattr(states[layer], part) for states in found])  # noqa: E731
    return [LayerState(whole(layer, "states"), found[0][layer].shape, whole(layer, "hidden")) for layer in layers]


def _sides(state: LayerState) -> list[Tensor]:
    """Keys and values, (tokens, width) each, float32."""
    return [side.transpose(0, 1).flatten(1).float() for side in state.sides()]


def _state_of_input(model: Any, layer: int, hidden: Tensor) -> LayerState:
    """Return the keys and values that a layer computes from an input of its attention, (tokens, hidden)."""
    attention = attention_module(decoder_layers(model)[2][layer])

    def exchange(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        own = hidden[None].to(args[0] if args else kwargs["hidden_states"])
        return ((own, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": own})

    twin: Any = twin_of(model, {name_of(model, attention): ToldModule(attention, exchange)})
    tokens, found = PromptTokens.of(torch.zeros(1, len(hidden), dtype=torch.long)), dict[int, LayerState]()
    read(twin, tokens, found.__setitem__, last=layer)
    return found[layer]


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
