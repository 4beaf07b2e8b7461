"""Two models that read the same texts, and which layer of the one each layer of the other is made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.calibrating import Tokenized, require_whole
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import require_identity
from hf_kvcaches.core.model_parts import tokenizer_part
from hf_kvcaches.core.watching import Attended
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.translate.layer_map import best_fit, nearest_in_depth
from hf_kvcaches.translate.states import PromptTokens, State, read_states, require_plain_layers

States = dict[int, State]


class Pair:
    """A producer and a consumer with one tokenizer.

    Attributes:
        layers: How many the consumer has.
        sources: For each of them the producer's layer that it is made of.
    """

    def __init__(self, producer: Any, consumer: Any, tokenizer: Any, layer_map: Sequence[int] | None = None) -> None:
        self.producer, self.consumer = compat.base_model(producer), compat.base_model(consumer)
        for role, model in (("producer", producer), ("consumer", consumer)):
            require_whole(model)
            if compat.has_learned_prompt(model):
                raise UnsupportedError(f"{role}: a learned prompt stands before every text, and is in no fingerprint.")
        self.rotation = require_plain_layers(compat.decoder_config(self.consumer.config))
        require_plain_layers(compat.decoder_config(self.producer.config))
        others, self.layers = (len(compat.decoder_layers(model)[2]) for model in (self.producer, self.consumer))
        self.sources = tuple(nearest_in_depth(self.layers, others) if layer_map is None else layer_map)
        if len(self.sources) != self.layers or not all(layer < others for layer in self.sources):
            raise ConfigError.of("layer_map", f"{self.layers} layers from 0 to {others - 1}", layer_map)
        self.tokenizer = Tokenized(_one_tokenizer(tokenizer))
        self._require_vocabulary()

    def _require_vocabulary(self) -> None:
        sizes = [model.get_input_embeddings().weight.shape[0] for model in (self.producer, self.consumer)]
        tokenizer = self.tokenizer.tokenizer
        if sizes[0] != sizes[1] and tokenizer is None:
            expected = "the models' tokenizer, as their embeddings have different sizes"
            raise ConfigError.of("tokenizer", expected, sizes, "Other tokens can't be translated.")
        if tokenizer is not None and len(tokenizer) > min(sizes):
            raise FingerprintMismatch(
                f"tokenizer: has {len(tokenizer)} tokens, and the models' embeddings {sizes[0]} (producer) and {sizes[1]} (consumer). "
                "Models that read other tokens can't share a prompt: take a pair with one tokenizer."
            )

    def fingerprints(self) -> tuple[ModelFingerprint, ModelFingerprint]:
        """Of the producer and the consumer."""
        producer = require_identity(self.producer, "producer: the translator", any_precision=True)
        return producer, require_identity(self.consumer, "consumer: the translator", any_precision=True)

    def fit_sources(self, texts: Iterable[torch.Tensor]) -> None:
        """Takes for each layer the source that predicts it best.

        Args:
            texts: (tokens,) each; both models read them.
        """
        read = ([states[layer].pair.cpu() for layer in sorted(states)] for ids in texts for states in self.states(ids, ()))
        self.sources = tuple(best_fit(zip(read, read, strict=True)))

    def states(
        self, ids: torch.Tensor, inputs: Collection[int], queries: Callable[[Attended], None] | None = None
    ) -> tuple[States, States]:
        """What both models make of a text, by layer, the consumer's queries on the way.

        Args:
            ids: (tokens,).
            inputs: The consumer's layers whose attention's inputs are wanted, and those of the producer's layers that they are made of.
        """
        found: list[States] = []
        for model in (self.producer, self.consumer):
            own = model is self.consumer and bool(found)
            states: States = {}
            tokens = PromptTokens.of(ids).to(compat.input_device(model))
            hidden = sorted(inputs) if own else sorted({self.sources[layer] for layer in inputs})
            read_states(model, tokens, states.__setitem__, hidden=hidden, queries=queries if own else None)
            found.append(states)
        return found[0], found[1]


def _one_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of both models, where a pair agrees."""
    if not isinstance(tokenizer, tuple | list):
        return tokenizer
    if len(tokenizer) != 2:
        raise ConfigError.of("tokenizer", "one tokenizer, or the producer's and the consumer's", f"{len(tokenizer)} of them")
    first, second = (tokenizer_part(each) for each in tokenizer)
    # A template says how texts are made, not which tokens a text becomes.
    different = [name for name in {**first, **second} if name != "chat template" and first.get(name) != second.get(name)]
    if different:
        raise FingerprintMismatch(
            f"tokenizer: the producer's and the consumer's differ in {', '.join(different)}, so one text would be other tokens to each. "
            "Take a pair with one tokenizer."
        )
    return tokenizer[1]
