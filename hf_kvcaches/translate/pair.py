"""Two models that read the same texts, and the producer's layer that each of the consumer's layers is translated from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.tokenizer_digest import tokenizer_parts
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.evaluate.texts import Tokenized, require_whole
from hf_kvcaches.translate.states import LayerState, PromptTokens, read, rotation_of_model

# `layer_map="fit"` compares layers on so many tokens, by the errors of so many random projections of a layer's keys and values.
_TOKENS, _PROJECTIONS, _RIDGE = 4096, 64, 1e-4

States = dict[int, LayerState]


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

    def sources_of(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Return the producer's layers that some of the consumer's are translated from, each once."""
        return tuple(dict.fromkeys(self.sources[layer] for layer in layers))

    def states(self, ids: torch.Tensor, inputs: Iterable[int] = ()) -> tuple[States, States]:
        """Return both models' states of a text, (tokens,), with attention inputs of some of the consumer's layers and of their sources."""
        layers, found = [*inputs], []
        for model, hidden in ((self.producer, {self.sources[layer] for layer in layers}), (self.consumer, {*layers})):
            states: States = {}
            read(model, PromptTokens.of(ids).to(compat.input_device(model)), states.__setitem__, hidden=hidden)
            found.append(states)
        return found[0], found[1]

    def fit_sources(self, texts: Sequence[torch.Tensor]) -> None:
        """Set `sources` to the layers that predict the consumer's best on the first texts, none below that of the layer before."""
        lengths = accumulate(map(len, texts), initial=0)
        read_texts = [self.states(ids) for ids, before in zip(texts, lengths, strict=False) if before < _TOKENS]
        producer, consumer = (
            [torch.cat([states[layer].states.cpu().double() for states in model]) for layer in model[0]]
            for model in zip(*read_texts, strict=True)
        )
        generator, targets, errors = torch.Generator().manual_seed(0), [], []
        for y in consumer:
            projection = torch.randn(y.shape[1], _PROJECTIONS, generator=generator, dtype=torch.float64)
            targets.append((y - y.mean(0)) @ projection)
        target = torch.cat(targets, dim=1)
        for x in producer:
            # Fitted on the even tokens, measured on the odd ones.
            even, odd = (x - x.mean(0))[::2], (x - x.mean(0))[1::2]
            regular = even.T @ even
            regular.diagonal().add_(_RIDGE * regular.diagonal().mean() + torch.finfo(torch.float64).tiny)
            residual = target[1::2] - odd @ torch.linalg.solve(regular, even.T @ target[::2])
            errors.append(residual.unflatten(1, (-1, _PROJECTIONS)).square().sum((0, 2)))
        self.sources = tuple(torch.stack(errors, 1).argmin(1).cummax(0).values.tolist())


def _shared_tokenizer(tokenizer: Any, sizes: tuple[int, ...]) -> Tokenized:
    """Return the tokenizer of both models, and refuse one that does not fit both models' embeddings of these sizes."""
    if isinstance(tokenizer, tuple | list):
        if len(tokenizer) != 2:
            raise ConfigError.of("tokenizer", "one tokenizer, or the producer's and the consumer's", f"{len(tokenizer)} of them")
        first, second = (tokenizer_parts(each) for each in tokenizer)
        # A template says how texts are made, not which tokens a text becomes.
        different = [name for name in {**first, **second} if name != "chat template" and first.get(name) != second.get(name)]
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
