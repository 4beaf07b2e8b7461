"""Semantic Cache Distillation, whole: traces of both models, Reuse of most layers, Patch of a few, and a cache of the consumer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.reuse.partial import Arguments, ToldModule, name_of, twin_of
from hf_kvcaches.translate.pair import Pair, cache_of, split_of
from hf_kvcaches.translate.paper.layers import Aligner, Translator, fit_reuse, train_aligner
from hf_kvcaches.translate.states import LayerState, PromptTokens, read, rotation_of_model

# By layer: of keys and of values, or of the attention's input, (tokens, rank) each, in float16.
Codes = dict[int, tuple[Tensor, ...]]
# The score with exactly these layers patched and all others reused; greater is better.
Score = Callable[[frozenset[int]], float]


class Route(NamedTuple):
    """The patched layers, and the scores that they were chosen by."""

    patched: tuple[int, ...]
    sensitivity: Mapping[int, float] = {}  # the gain of patching each layer alone (equation 21)
    order: tuple[int, ...] = ()  # of the greedy search
    efficiencies: tuple[float, ...] = ()  # the gain of the first 1, 2, ... of these together, divided by their number


def select(score: Score, layers: Sequence[int], *, pool: int, most: int) -> Route:
    """Choose the layers to patch.

    A greedy search among the `pool` layers that gain most alone takes the one with the largest gain over those before (equation 22), up to
    `most`. As many of them are patched as give the largest gain for each layer. Of equals, the lowest layer.
    """
    score = functools.cache(score)
    nothing = score(frozenset())
    sensitivity = {layer: score(frozenset({layer})) - nothing for layer in layers}
    candidates = sorted(sorted(layers, key=lambda layer: (-sensitivity[layer], layer))[:pool])
    chosen, order, efficiencies = frozenset[int](), list[int](), list[float]()
    while candidates and len(order) < most:
        best = max(candidates, key=lambda layer: score(chosen | {layer}))
        if score(chosen | {best}) <= score(chosen):
            break
        chosen |= {best}
        candidates.remove(best)
        order.append(best)
        efficiencies.append((score(chosen) - nothing) / len(order))
    patched = order[: efficiencies.index(max(efficiencies)) + 1] if order else []
    return Route(tuple(sorted(patched)), sensitivity, tuple(order), tuple(efficiencies))


@dataclass(frozen=True, eq=False)
class SemanticCacheDistillation:
    """The paper's method for a pair of models with as many layers and heads: translators of each layer's keys and values, and patches."""

    reuse: dict[int, list[Translator]]  # of keys and of values
    patches: dict[int, tuple[Tensor, Aligner]]  # from the producer's attention input to codes, and from these to the consumer's
    route: Route
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
        fitted = texts[: len(texts) - len(held_out)]
        theirs, own = (_traces(model, fitted) for model in (producer, consumer))
        reuse, patches = {}, {}
        for layer, (one, other) in enumerate(zip(theirs, own, strict=True)):
            reuse[layer] = [fit_reuse(*side) for side in zip(_sides(one), _sides(other), ranks[:2], strict=True)]
        chosen = range(len(own)) if patched is None else patched
        for layer in chosen:
            source, target = theirs[layer].hidden.float(), own[layer].hidden.float()
            encode = fit_reuse(source, target, ranks[2]).encode
            patches[layer] = encode, train_aligner((source @ encode).half().float(), target, steps)
        shapes = [state.shape for state in own]
        if patched is not None:
            return cls(reuse, patches, Route(tuple(sorted(patched))), shapes)
        whole, pair = cls(reuse, patches, Route(()), shapes), Pair(producer, consumer, None)

        def score(layers: frozenset[int]) -> float:
            """How near the consumer's predictions of texts' ends are to those with its own cache."""
            losses = []
            for ids in (torch.tensor(list(text)) for text in held_out):
                before = ids[: split_of(len(ids))]
                found = pair.states(before)[1], whole._states(pair.consumer, whole.encode(producer, before.tolist(), layers))
                losses.append(float(divergence(*(pair.predictions(ids, states) for states in found)).mean()))
            return -fmean(losses)

        route = select(score, list(chosen), pool=pool, most=most)
        return cls(reuse, {layer: patches[layer] for layer in route.patched}, route, shapes)

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
