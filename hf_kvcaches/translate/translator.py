"""`CacheTranslator`, and the half of it that a producer's process needs: runs a model over prompts, and makes codes while it runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain
from queue import SimpleQueue
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hf_kvcaches import compat
from hf_kvcaches.codec.wire.messages import message_chunks
from hf_kvcaches.core.files import Artifact, checked_layers
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import Identity, identity_of, require_identity
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch, UnsupportedError, require_instance, whole_number
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.kernels.checksum import digest_of
from hf_kvcaches.reuse.partial import twin_of
from hf_kvcaches.translate.codes import CodesHead, Part, Prompt, SemanticCodes
from hf_kvcaches.translate.fit import Fitting, Score, TranslatorConfig, TranslatorSettings
from hf_kvcaches.translate.pair import Pair
from hf_kvcaches.translate.states import LayerState, Maps, PromptTokens, read

# Weights that are moved in and out of a model's own modules are there for one pass at a time.
_OFFLOADED = threading.Lock()


class CacheEncoder:
    """Codes what a producer computes for prompts; made by `CacheTranslator.encoder`, and holds nothing of the consumer.

    Weights stay on the producer's devices, and nothing waits for a device while the producer runs. Any number of threads may encode at a
    time, also with a model in training mode, which is read without dropout.
    """

    def __init__(self, digest: str, models: Mapping[str, ModelFingerprint], maps: Maps, exact_tokens: int) -> None:
        self.digest, self.models, self.maps, self.exact_tokens = digest, models, maps, exact_tokens

    def encode(self, producer: Any, input_ids: Any, attention_mask: Any = None, *, first: int = 0) -> SemanticCodes:
        """Run a producer over prompts and code all their tokens but the last, which the consumer runs itself.

        Args:
            producer: The model that this was fitted for.
            input_ids: (batch, tokens) or (tokens,), two tokens at least.
            attention_mask: 1 where a token is real, or None. Rows are padded on the left, and padding is not sent.
            first: The index of the first token with codes: the `seen` of the consumer's cache.
        """
        head, tokens = self._begin(input_ids, attention_mask, first)
        model, coefficients = self.check_producer(producer), dict[int, Tensor]()
        if head.names:
            self._run(model, tokens, coefficients.__setitem__)
        records = self.maps.pack(coefficients)
        return SemanticCodes(head, [Part(name, records[code].cpu()) for code, name in enumerate(head.names)])

    def stream(self, producer: Any, input_ids: Any, attention_mask: Any = None, *, first: int = 0) -> Iterator[bytes]:
        """Yield the bytes of `encode`, each part as soon as the producer, in another thread, has its layers."""
        head, tokens = self._begin(input_ids, attention_mask, first)
        model = self.check_producer(producer)
        yield from message_chunks(head, self._records_in_thread(model, tokens) if head.names else ())

    def check_producer(self, model: Any) -> Any:
        """Return the model without its PEFT wrapper; refuse one that this was not fitted for."""
        return self._require_fitted(model, "producer")

    def _require_fitted(self, model: Any, role: str, identity: Identity | None = None) -> Any:
        """Return a model without its PEFT wrapper; refuse one that this was not fitted for in that role."""
        base, what = compat.base_model(model), f"The translator's {role}"
        if compat.has_learned_prompt(model):
            raise UnsupportedError(f"{role}: a learned prompt is in no fingerprint. Pass the model without that adapter.")
        require_all_heads(base, what, "Load the model whole, or use another cache.")
        identity = identity or identity_of(base, evaluates=role == "producer")
        if identity.reason:
            raise FingerprintMismatch(f"{what} is not what it was fitted for: {identity.reason}")
        if identity.digest != self.models[role].digest:
            for other, fingerprint in self.models.items():
                if fingerprint.digest == identity.digest:
                    raise FingerprintMismatch(f"{what} is another model. It is the {other} that the translator was fitted for.")
            self.models[role].require_model(identity.fingerprint, what)
        return base

    def _begin(self, input_ids: Any, attention_mask: Any, first: int) -> tuple[CodesHead, PromptTokens]:
        """Return the head of codes, and the prompts without their last tokens, with the slots from which on they are coded."""
        tokens = PromptTokens.of(input_ids, attention_mask)
        last = tokens.ids.shape[1] - 1
        if last - max(tokens.padding) < 1:
            hint = "The consumer runs the last one itself."
            raise ConfigError.of("input_ids", "at least two tokens a row", tuple(tokens.ids.shape), hint)
        first = whole_number("first", first, 0, f"an index before the last one, {last}", "Encode the whole conversation.", most=last - 1)
        starts = tuple(first if first > before else min(before + self.exact_tokens, last) for before in tokens.padding)
        tokens = PromptTokens(tokens.ids[:, :last], tokens.padding, starts)
        rows = zip(tokens.rows(), starts, tokens.padding, strict=True)
        prompts = tuple(Prompt.of(ids, start - before) for ids, start, before in rows)
        names = self.maps.names if any(prompt.coded for prompt in prompts) else ()
        return CodesHead(self.digest, prompts, names), tokens

    def _run(self, model: Any, tokens: PromptTokens, on_code: Callable[[int, Tensor], Any]) -> None:
        """Pass on the coefficients of each code as soon as the producer has its layers."""
        maps, states, inputs = self.maps, dict[int, Tensor](), list[Tensor]()
        complete = [max(maps.side_layer, *encoder.sources) for encoder in maps.encoders]  # the layer with which a code is, ascending

        def on_state(layer: int, state: LayerState) -> None:
            states[layer] = state.states
            if layer == maps.side_layer:
                inputs.append(state.hidden)
            for code, last in enumerate(complete):
                if last == layer:
                    on_code(code, maps.coefficients(code, states, inputs[0]))
            waiting = (encoder.sources for encoder, last in zip(maps.encoders, complete, strict=True) if last > layer)
            for unused in states.keys() - {*chain.from_iterable(waiting)}:
                del states[unused]

        offloaded = any(compat.offloaded_weights(module) is not None for module in compat.modules_of(model))
        with _OFFLOADED if offloaded else nullcontext():
            read(in_evaluation(model), tokens, on_state, hidden=[maps.side_layer], last=complete[-1])

    def _records_in_thread(self, model: Any, tokens: PromptTokens) -> Iterator[Tensor]:
        """Yield each record while the producer runs in another thread; what is packed here does not keep it waiting."""
        codes: SimpleQueue[tuple[int, Tensor] | None] = SimpleQueue()
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(self._run, model, tokens, lambda *code: codes.put(code))
            running.add_done_callback(lambda _: codes.put(None))
            for code, coefficients in iter(codes.get, None):
                yield self.maps.pack({code: coefficients})[code].cpu()
            running.result()


class CacheTranslator(CacheEncoder, Artifact):
    """Codes a producer's keys and values, and rebuilds a consumer's from the codes. Made by `CacheTranslator.fit`.

    Args:
        maps: From states to codes to states.
        settings: How it was fitted.
        producer: The model that encodes.
        consumer: The model whose cache is filled.
    """

    artifact_type: ClassVar[str] = "cache-translator"
    format_version: ClassVar[int] = 5

    def __init__(self, maps: Maps, settings: TranslatorSettings, producer: ModelFingerprint, consumer: ModelFingerprint) -> None:
        # The digest is of all that codes depend on, both models among it.
        parts = sorted(maps.tensors().items()), repr(maps.metadata()), settings.recompute_layers, settings.exact_tokens
        digest = digest_of([*parts, producer.digest, consumer.digest])
        super().__init__(digest, {"producer": producer, "consumer": consumer}, maps, settings.exact_tokens)
        self.settings, self.producer, self.consumer, self.fingerprint = settings, producer, consumer, consumer

    @classmethod
    def fit(
        cls,
        producer: Any,
        consumer: Any,
        tokenizer: Any,
        texts: Iterable[str | Sequence[int]],
        *,
        payload: float = 0.025,
        recompute_layers: int | Literal["auto"] = 0,
        score: Score | None = None,
        config: TranslatorConfig | None = None,
        max_length: int = 1024,
        progress: bool = True,
    ) -> Self:
        """Fit a translator to what both models compute for the same texts; the models are left as they are.

        Under `accelerate` each process reads its share of the texts, and all end with the same translator.

        Args:
            producer: The model that will read prompts.
            consumer: The model that will answer. Other weights, adapters, widths or numbers of layers, but the same tokens.
            tokenizer: Of both models, or a pair (producer's, consumer's) that is compared; None where `texts` are token ids.
            texts: Strings or lists of token ids, like the prompts to come: what does not occur in them is not coded.
            payload: Expected bytes of a token's codes, as a share of its bfloat16 keys and values in all the consumer's layers. 2 sends
                coefficients as float32 numbers.
            recompute_layers: How many of its lowest layers the consumer runs. Their keys and values and those of the next layer are exact,
                and the next layer's attention input is side information. `"auto"`: chosen on held-out texts from 0, 1, 2, 4 and so on, up
                to `config.prefill_share` of the layers.
            score: What that choice maximises in place of minus the KL divergence: called with logits of the consumer alone and with a
                translated cache, (positions, vocabulary) each.
            config: All other options.
            max_length: Tokens of a text that are read.
            progress: Whether to show bars.
        """
        config = TranslatorConfig() if config is None else config
        require_instance("config", config, TranslatorConfig, {})
        pair = Pair(producer, consumer, tokenizer, config.layer_map)
        fitting = Fitting(pair, texts, config, payload, recompute_layers, max_length, progress)
        with torch.no_grad(), evaluating(pair.producer), evaluating(pair.consumer):
            models = (("producer", pair.producer), ("consumer", pair.consumer))
            fingerprints = [require_identity(model, f"{role}: the translator").fingerprint for role, model in models]
            fitting.read()
            best = fitting.choose(payload, score)
            return cls(fitting.maps(best, payload), fitting.settings(best, payload), *fingerprints)

    @cached_property
    def encoder(self) -> CacheEncoder:
        """The producer's half: all that a process needs that only encodes."""
        return CacheEncoder(self.digest, self.models, replace(self.maps, decoders=()), self.exact_tokens)

    def check_consumer(self, model: Any, identity: Identity | None = None) -> Any:
        """Return the model without its PEFT wrapper; refuse another model."""
        return self._require_fitted(model, "consumer", identity)

    def check_codes(self, head: CodesHead) -> None:
        """Refuse codes of another translator."""
        if head.translator != self.digest:
            digests = f"{head.translator[:12]} there, {self.digest[:12]} here"
            raise FingerprintMismatch(f"codes: made by another translator ({digests}). Load the one that made them.")
        if head.names != (self.maps.names if head.tokens else ()):
            raise ArtifactError("codes: their head does not fit the translator that it names. Have them sent again.")

    def tensors(self) -> dict[str, Tensor]:
        return self.maps.tensors()

    def metadata(self) -> dict[str, Any]:
        models = {role: model.to_dict() for role, model in self.models.items()}
        return {"maps": self.maps.metadata(), "settings": asdict(self.settings), **models}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: Mapping[str, Any]) -> Self:
        settings = TranslatorSettings(**metadata["settings"] | {"layer_map": tuple(metadata["settings"]["layer_map"])})
        if checked_layers(settings.recompute_layers) >= (layers := checked_layers(len(settings.layer_map))):
            raise ArtifactError(f"recompute_layers: expected fewer than {layers}, got {settings.recompute_layers}. Fit it anew.")
        models = (ModelFingerprint.from_dict(metadata[role]) for role in ("producer", "consumer"))
        return cls(Maps.restore(tensors, metadata["maps"]), settings, *models)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        folder_or_hub_id: str | os.PathLike[str],
        *,
        producer: nn.Module | None = None,
        consumer: nn.Module | None = None,
        **options: Any,
    ) -> Self:
        """Load a translator; see `Artifact.from_pretrained` for the options.

        Args:
            folder_or_hub_id: A folder, or `"owner/name"`.
            producer: The model to encode with, to be compared with the one that it was fitted for.
            consumer: The model to decode for, to be compared as well.
            **options: `revision`, `token`, `cache_dir`, `local_files_only`.
        """
        loaded = super().from_pretrained(folder_or_hub_id, **options)
        if producer is not None:
            loaded.check_producer(producer)
        if consumer is not None:
            loaded.check_consumer(consumer)
        return loaded

    def describe_calibration(self) -> str:
        settings, maps = self.settings, self.maps
        expected = "" if maps.bits is None else f", {maps.bits / 8:.1f} bytes of a token expected"
        rows = {
            "Producer": self.producer.describe(),
            "Consumer": self.consumer.describe(),
            "Metric": settings.metric,
            "Texts": f"{settings.texts}, {settings.tokens:,} tokens",
            "Payload": f"{settings.payload:g} of bfloat16 keys and values{expected}",
            "Directions": ", ".join(f"{encoder.name}: {len(encoder.weights.shift)}" for encoder in maps.encoders) or "none",
            "Layers that the consumer runs": str(settings.recompute_layers),
            "First tokens that the consumer runs": str(settings.exact_tokens),
            "Seconds": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in settings.seconds.items()),
            **{f"KL on held-out texts, {what}": f"{value:.3g} nats" for what, value in settings.measured.items()},
        }
        return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def in_evaluation(model: nn.Module) -> Any:
    """Return a model in evaluation mode, or else a twin that shares all weights: other threads' passes stay in training mode."""
    if not any(module.training for module in model.modules()):
        return model
    names = [name for name, module in model.named_modules(remove_duplicate=False) if name and next(module.children(), None) is None]
    return twin_of(model, {name: twin_of(model.get_submodule(name), {}) for name in names}).eval()
