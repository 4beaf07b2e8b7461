"""Two models that read the same texts: the states of both, and what errors of the consumer's keys and values cost.

The last quarter of each text is predicted, and the gradients of the loss of tokens drawn from these predictions are taken at the keys and
values of the tokens before it. Their second moments, head by head, are the cost of errors, in one unit for all layers. Half of a token's
weight in a fit is by its gradients, which are large for facts that later tokens ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.fingerprint import tokenizer_parts
from hf_kvcaches.core.rope import Rotation
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.evaluate.texts import Tokenized, require_whole
from hf_kvcaches.translate.states import LayerState, PromptTokens, read, rotation_of_model

SHORTEST = 8
"""Tokens of a text that has a share to predict."""
# The share of a text that is predicted, and its tokens at the most.
_PREDICTED, _MOST_PREDICTED = 0.25, 256
# What gradients don't touch costs this share of the mean of its head, and of its layer: other texts ask for other facts.
_DAMPING, _LAYER_DAMPING, _TINY = 0.2, 0.1, 1e-30

States = Mapping[int, LayerState]


def cache_of(rotation: Rotation, states: States, dtype: torch.dtype) -> DynamicCache:
    """Return a cache of one prompt with these states of all layers; gradients pass."""
    cache = DynamicCache()  # without the model's config no layer drops tokens behind its window, which the attention mask has
    for layer, state in sorted(states.items()):
        keys, values = (side[None] for side in state.sides())
        geometry = rotation.layers[layer]
        if geometry.kind == "rope":
            keys = geometry.rotate(keys, torch.arange(keys.shape[2], device=keys.device))
        cache.update(keys.to(dtype), values.to(dtype), layer)
    return cache


class Pair:
    """A producer and a consumer with one tokenizer.

    Attributes:
        layers: How many the consumer has.
        sources: For each of them the producer's layer that it is translated from; the nearest in depth by default.
    """

    def __init__(self, producer: Any, consumer: Any, tokenizer: Any, layer_map: Sequence[int] | None = None) -> None:
        self.producer, self.consumer = compat.base_model(producer), compat.base_model(consumer)
        for role, model in (("producer", producer), ("consumer", consumer)):
            require_whole(model)
            if compat.has_learned_prompt(model):
                raise UnsupportedError(f"{role}: a learned prompt is in no fingerprint. Pass the model without that adapter.")
        rotation_of_model(self.producer)
        self.rotation = rotation_of_model(self.consumer)
        producer_layers, self.layers = (len(decoder_layers(model)[2]) for model in (self.producer, self.consumer))
        nearest = (round(layer * (producer_layers - 1) / max(1, self.layers - 1)) for layer in range(self.layers))
        self.sources = tuple(nearest if layer_map is None else layer_map)
        if len(self.sources) != self.layers or not all(layer < producer_layers for layer in self.sources):
            raise ConfigError.of("layer_map", f"{self.layers} layers from 0 to {producer_layers - 1}", layer_map)
        sizes = tuple(model.get_input_embeddings().weight.shape[0] for model in (self.producer, self.consumer))
        self.tokenizer = _shared_tokenizer(tokenizer, sizes)

    def states(self, ids: Tensor, inputs: Collection[int] = ()) -> tuple[States, States]:
        """Return both models' states of a text, (tokens,), with attention inputs of some of the consumer's layers and of their sources."""
        theirs, own = dict[int, LayerState](), dict[int, LayerState]()
        read(self.producer, PromptTokens.of(ids), theirs.__setitem__, hidden={self.sources[layer] for layer in inputs})
        read(self.consumer, PromptTokens.of(ids), own.__setitem__, hidden={*inputs})
        return theirs, own

    def predictions(self, ids: Tensor, states: States) -> Tensor:
        """Return the consumer's logits of a text's last tokens, (tokens, vocabulary), given the states of those before."""
        model, cache = self.consumer, cache_of(self.rotation, states, self.consumer.dtype)
        asked = ids[None, split_of(len(ids)) :].clone().to(compat.input_device(model))
        logits: Tensor = model(input_ids=asked, **compat.cache_kwargs(model, cache)).logits[0]
        return logits

    def gradients(self, ids: Tensor, states: States, seed: int) -> dict[int, Tensor]:
        """Return gradients at the unrotated keys and values of the tokens before those that are predicted, (tokens, width) by layer.

        Gradients are at one layer's keys and values with those of the others fixed, as each layer is translated by itself.
        """
        split = split_of(len(ids))
        with torch.inference_mode(False), torch.enable_grad():
            leaves = {layer: state._replace(states=state.states[:split].clone().requires_grad_()) for layer, state in states.items()}
            logits = self.predictions(ids, leaves).float()
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
            loss = functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")
            wanted = [leaf.states for leaf in leaves.values()]
            found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True) if loss.requires_grad else ()
        if not found or not all(bool(rows.isfinite().all()) for rows in found):
            name, hint = type(self.consumer).__name__, "Pass config=TranslatorConfig(metric='plain')."
            raise UnsupportedError(f"metric: 'loss' needs finite gradients at the keys and values of {name}, and there are none. {hint}")
        return dict(zip(leaves, found, strict=True))


class ErrorCosts:
    """Second moments of gradients at the keys and at the values of the consumer's layers, (heads, size, size).

    Args:
        shapes: By layer, as in `LayerState`.
    """

    def __init__(self, shapes: Mapping[int, tuple[int, int, int]]) -> None:
        # Also in a process whose texts are all too short for gradients: those of all processes are added up.
        self.sides = {
            layer: [torch.zeros(heads, dim, dim, dtype=torch.float64) for dim in dims] for layer, (heads, *dims) in shapes.items()
        }

    def add(self, pair: Pair, ids: Tensor, states: States, exact_tokens: int, seed: int) -> Tensor:
        """Add the gradients of a text, whose first tokens have no errors, and return its tokens' weights, (tokens,), 1 on average."""
        exact, weights = min(exact_tokens, split_of(len(ids)) - 1), torch.ones(len(ids))
        by_layer = pair.gradients(ids, states, seed)
        for layer, rows in by_layer.items():
            energies = rows[exact:].float().square().sum(1)
            if layer:  # the lowest one is never translated
                weights[exact : len(rows)] += 0.5 / (len(by_layer) - 1) * (energies / energies.mean().clamp_min(_TINY) - 1).cpu()
            moments = [side.mT @ side for side in states[layer]._replace(states=rows[exact:].double()).sides()]
            self.sides[layer] = [total.to(moment) + moment for total, moment in zip(self.sides[layer], moments, strict=True)]
        return weights

    def roots(self, layer: int) -> list[Tensor]:
        """Return the square roots of the costs of a layer's keys and of its values."""
        roots = []
        for total in self.sides[layer]:
            mean = total.diagonal(dim1=1, dim2=2).mean(1)
            damping = _DAMPING * mean + _LAYER_DAMPING * mean.mean()
            values, vectors = torch.linalg.eigh(total)
            spread = torch.where(damping > 0, damping, torch.ones_like(damping))[:, None] + values.clamp_min(0)
            roots.append((vectors * spread.sqrt()[:, None]) @ vectors.mT)
        return roots


def split_of(tokens: int) -> int:
    """Return how many tokens of a text come before those that are predicted."""
    return tokens - min(_MOST_PREDICTED, max(2, int(_PREDICTED * tokens)))


def _shared_tokenizer(tokenizer: Any, sizes: tuple[int, ...]) -> Tokenized:
    """Return the tokenizer of both models, and refuse one that does not fit both models' embeddings of these sizes."""
    if isinstance(tokenizer, tuple | list):
        if len(tokenizer) != 2:
            raise ConfigError.of("tokenizer", "one tokenizer, or the producer's and the consumer's", f"{len(tokenizer)} of them")
        first, second = map(tokenizer_parts, tokenizer)
        # A template says how texts are made, not which tokens a text becomes.
        different = [name for name in first if name != "chat template" and first[name] != second[name]]
        if different:
            raise FingerprintMismatch(
                f"tokenizer: the producer's and the consumer's differ in {', '.join(different)}, so the same text becomes different "
                "token ids. Take a pair with one tokenizer."
            )
        tokenizer = tokenizer[1]
    shared = Tokenized(tokenizer)
    if shared.tokenizer is None and len(set(sizes)) > 1:
        expected = "the models' tokenizer, as their embeddings have different sizes"
        raise ConfigError.of("tokenizer", expected, sizes, "Other tokens can't be translated.")
    if shared.tokenizer is not None and len(shared.tokenizer) > min(sizes):
        raise FingerprintMismatch(
            f"tokenizer: has {len(shared.tokenizer)} tokens, and the models' embeddings {sizes[0]} (producer) and {sizes[1]} (consumer). "
            "Models that read other tokens can't share a prompt: take a pair with one tokenizer."
        )
    return shared
