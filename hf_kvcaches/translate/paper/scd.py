"""Semantic Cache Distillation, whole: traces of both models, Reuse of most layers, Patch of a few, and a cache of the consumer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.reuse.partial import ToldModule, name_of, twin_of
from hf_kvcaches.translate.paper.patch import Aligner, train_aligner
from hf_kvcaches.translate.paper.reuse import Translator, fit_reuse
from hf_kvcaches.translate.paper.routing import Route, select
from hf_kvcaches.translate.states import LayerState, PromptTokens, cache_of, read, rotation_of_model

# Tokens of a held-out prefix that predictions are compared on.
_PREDICTED = 32
Codes = dict[int, tuple[torch.Tensor, ...]]
"""By layer: of keys and of values, or of the attention's input, (tokens, rank) each, in float16."""
Patch = tuple[torch.Tensor, Aligner]
"""From a patched layer's attention input in the producer to codes, (hidden, rank), and from these to the consumer's."""


@dataclass(frozen=True, eq=False)
class SemanticCacheDistillation:
    """The paper's method for a pair of models with as many layers and heads: translators of each layer's keys and values, and patches."""

    reuse: dict[int, tuple[Translator, Translator]]
    patches: dict[int, Patch]
    route: Route

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
            keys, values = (fit_reuse(*side) for side in zip(_sides(one), _sides(other), ranks[:2], strict=True))
            reuse[layer] = keys, values
        chosen = range(len(own)) if patched is None else patched
        for layer in chosen:
            source, target = theirs[layer].known.float(), own[layer].known.float()
            encode = fit_reuse(source, target, ranks[2]).encode
            patches[layer] = encode, train_aligner((source @ encode).half().float(), target, steps)
        if patched is not None:
            return cls(reuse, patches, Route(tuple(sorted(patched))))
        whole = cls(reuse, patches, Route(()))

        def score(layers: frozenset[int]) -> float:
            return -sum(whole._divergence(producer, consumer, text, layers) for text in held_out) / len(held_out)

        route = select(score, list(chosen), pool=pool, most=most)
        return cls(reuse, {layer: patches[layer] for layer in route.patched}, route)

    @torch.no_grad()
    def encode(self, producer: Any, ids: Sequence[int], patched: frozenset[int] | None = None) -> Codes:
        """Run a producer over a prompt, and return the codes of each layer (equation 8)."""
        codes: Codes = {}
        for layer, state in enumerate(_traces(producer, [ids])):
            if layer in (self.patches if patched is None else patched):
                parts = [state.known.float() @ self.patches[layer][0]]
            else:
                parts = [side @ own.encode for side, own in zip(_sides(state), self.reuse[layer], strict=True)]
            codes[layer] = tuple(part.half() for part in parts)
        return codes

    @torch.no_grad()
    def decode(self, consumer: Any, codes: Codes) -> DynamicCache:
        """Rebuild the consumer's cache (equations 9 and 12): patched layers make keys and values with their own weights."""
        model, states = compat.base_model(consumer), {}
        shapes = [state.shape for state in _traces(model, [[0, 0]])]
        for layer, parts in codes.items():
            if len(parts) == 1:
                states[layer] = _state_of_input(model, layer, self.patches[layer][1](parts[0].float()))
            else:
                sides = [part.float() @ own.decode for part, own in zip(parts, self.reuse[layer], strict=True)]
                states[layer] = LayerState(torch.cat(sides, dim=1), shapes[layer])
        return cache_of(rotation_of_model(model), states, model.dtype)

    def _divergence(self, producer: Any, consumer: Any, ids: Sequence[int], patched: frozenset[int]) -> float:
        """How far the consumer's predictions of a text's end are from those with its own cache."""
        split = len(ids) - min(_PREDICTED, len(ids) // 4)
        exact = dict(enumerate(_traces(consumer, [ids[:split]])))
        model, asked = compat.base_model(consumer), torch.tensor([list(ids[split:])], device=consumer.device)
        own = cache_of(rotation_of_model(model), exact, model.dtype)
        caches = own, self.decode(model, self.encode(producer, ids[:split], patched))
        return float(divergence(*(model(input_ids=asked, **compat.cache_kwargs(model, cache)).logits[0] for cache in caches)).mean())


def _traces(model: Any, texts: Sequence[Sequence[int]]) -> list[LayerState]:
    """Read the texts, and return the states of all their tokens in each layer."""
    base, found = compat.base_model(model), list[list[LayerState]]()
    layers = range(len(decoder_layers(base)[2]))
    for ids in texts:
        states, tokens = dict[int, LayerState](), PromptTokens.of(torch.tensor([list(ids)])).to(compat.input_device(base))
        read(base, tokens, states.__setitem__, hidden=layers)
        found.append([states[layer] for layer in layers])
    return [
        LayerState(torch.cat([own.states for own in each]), each[0].shape, torch.cat([own.known for own in each]))
        for each in zip(*found, strict=True)
    ]


def _sides(state: LayerState) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, (tokens, width) each, float32."""
    heads, key_dim, value_dim = state.shape
    keys, values = state.states.float().split([heads * key_dim, heads * value_dim], dim=1)
    return keys, values


def _state_of_input(model: Any, layer: int, hidden: torch.Tensor) -> LayerState:
    """Return the keys and values that a layer computes from an input of its attention, (tokens, hidden)."""
    attention = attention_module(decoder_layers(model)[2][layer])

    def exchange(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = hidden[None].to(args[0] if args else kwargs["hidden_states"])
        return ((own, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": own})

    twin: Any = twin_of(model, {name_of(model, attention): ToldModule(attention, exchange)})
    tokens, found = PromptTokens.of(torch.zeros(1, len(hidden), dtype=torch.long)), dict[int, LayerState]()
    read(twin, tokens.to(compat.input_device(model)), found.__setitem__, last=layer)
    return found[layer]
