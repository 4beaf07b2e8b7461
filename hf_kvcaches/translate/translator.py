"""`CacheTranslator`: fitted once for a producer and a consumer; it makes codes of what the one reads, for the other's cache."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from hf_kvcaches import compat
from hf_kvcaches.core.artifact import Artifact
from hf_kvcaches.core.checksum import digest_of
from hf_kvcaches.core.files import checked_layers
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import Identity, identity_of
from hf_kvcaches.core.verify import evaluating
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch, KVCacheError, UnsupportedError
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.codes import CodesWriter, Part, SemanticCodes
from hf_kvcaches.translate.head import CodesHead, PartHead, Row, check_dtype
from hf_kvcaches.translate.maps import LayerDecoder, Maps, to_tensors
from hf_kvcaches.translate.paper.routing import Route
from hf_kvcaches.translate.states import PromptTokens, State, read_states

Method = Literal["joint", "cross_layer", "paper"]
Metric = Literal["loss", "attention", "plain"]


@dataclass(frozen=True)
class TranslatorSettings:
    """How a translator was fitted; described in `CacheTranslator.fit`.

    Args:
        metric: Likewise; what was used, also where another was asked for.
        measured: Divergences on prefixes that were kept apart, by what was tried.
    """

    method: Method
    payload: float
    dtype: str
    group: int | None
    recompute_layers: int
    metric: Metric
    ridge: float | None
    layers: int
    prefixes: int = 0
    tokens: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CacheTranslator(Artifact):
    """Makes codes of what a producer reads, and a consumer's keys and values of codes. Made by `CacheTranslator.fit`.

    Args:
        maps: From states to codes to states.
        settings: How it was fitted.
        route: Which layers are patched.
        producer: The model that encodes.
        consumer: The model whose cache is filled.
    """

    artifact_type: ClassVar[str] = "cache-translator"
    format_version: ClassVar[int] = 2

    maps: Maps
    settings: TranslatorSettings
    route: Route
    producer: ModelFingerprint
    consumer: ModelFingerprint
    _on_devices: dict[Any, Decoder] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", self.consumer)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_on_devices": {}}

    @classmethod
    def fit(
        cls,
        producer: Any,
        consumer: Any,
        tokenizer: Any,
        texts: Iterable[str | Sequence[int]],
        *,
        method: Method = "joint",
        payload: float = 0.125,
        dtype: str | None = None,
        group: int | None = 256,
        patch_layers: Literal["auto"] | Sequence[int] | None = "auto",
        recompute_layers: int = 0,
        metric: Metric = "loss",
        heads: Literal["joint", "each"] = "joint",
        ranks: tuple[int, int] | None = None,
        aligner: Literal["ridge", "mlp"] = "ridge",
        score: Any = None,
        ridge: float | None = None,
        max_length: int = 1024,
        progress: bool = True,
    ) -> Self:
        """Fits a translator to what both models make of the same texts. Both are left as they were found.

        Under `accelerate` each process reads its share of the texts, and all end with the same translator.

        Args:
            producer: The model that will read prompts.
            consumer: The model that will answer. Other weights, adapters or widths, but the same tokens and as many layers.
            tokenizer: Of both models, or a pair (producer's, consumer's) that is compared; None where `texts` are token ids.
            texts: Strings or lists of token ids, like the prompts to come: all that they don't show is lost in translation.
            method: `"joint"`: one code of keys and values a layer, by reduced-rank regression, with the tokens as side information, sent
                layer by layer. `"cross_layer"`: one code for all layers, which has to wait for the whole prompt. `"paper"`: keys and
                values each for themselves, by an SVD of both models' states, with no side information.
            payload: How wide codes are, as a share of the keys and values of the layers that are sent. int4 codes are twice as wide for
                the same bytes as int8: 0.125 are 1/16 of bfloat16 keys and values in both.
            dtype: Of codes: "int4", "int8", "float16" or "float32"; None for "int4", or "float16" with `method="paper"`.
            group: How many tokens of a channel share a scale; None for all.
            patch_layers: Layers that get their attention's input and make keys and values themselves: `"auto"` tries on texts kept apart
                and takes those that help, if any; None for none.
            recompute_layers: How many of its lowest layers the consumer runs on the tokens: they and the next layer's keys and values
                are exact, and what enters that layer is side information. With 0 it is what enters layer 0, the token itself.
            metric: What errors cost: by gradients of what the model says (`"loss"`, where they can be had), by queries and output
                projections (`"attention"`), or all the same (`"plain"`, and always with `method="paper"`).
            heads: Whether `method="paper"` factorises heads jointly or each for itself.
            ranks: `method="paper"`: (of keys, of values) in each layer, in place of `payload`.
            aligner: Of patched layers: a linear map, or with a hidden layer, which is trained.
            score: In place of minus the mean KL divergence, for `patch_layers="auto"`: called with logits of the consumer alone and with a
                translated cache, (places, vocabulary) each; greater is better.
            ridge: Regularisation, as a share of the mean variance. None: as the number of tokens asks for, and with many hardly any.
            max_length: Tokens of a text that are read.
            progress: Whether to show bars.
        """
        from hf_kvcaches.translate.calibration import Wanted, fit

        wanted = Wanted(method, payload, dtype, group, patch_layers, recompute_layers, metric, heads, ranks, aligner, score, ridge)
        maps, settings, route, fingerprints = fit(producer, consumer, tokenizer, texts, wanted, max_length, progress)
        return cls(maps, settings, route, *fingerprints)

    @property
    def sent_layers(self) -> tuple[int, ...]:
        """Those whose states follow from codes."""
        return tuple(decoder.layer for decoder in self.maps.decoders)

    @property
    def patched_layers(self) -> tuple[int, ...]:
        """Those that get their attention's input."""
        return tuple(decoder.layer for decoder in self.maps.decoders if decoder.kind == "patch")

    @cached_property
    def digest(self) -> str:
        """Of all that codes depend on."""
        tensors, rest = to_tensors(self.maps.encoders, self.maps.decoders)
        return digest_of([sorted(tensors.items()), repr(rest), self.settings.dtype, self.settings.group, self.settings.recompute_layers])

    def encode(self, producer: Any, input_ids: Any, attention_mask: Any = None) -> SemanticCodes:
        """Runs a producer over prompts, and makes codes of all their tokens but the last, which the consumer runs itself.

        Args:
            producer: The model that this was fitted for.
            input_ids: (batch, tokens) or (tokens,), two tokens at least.
            attention_mask: 1 where a token is real, or None. Padding stands on the left, and is not sent.
        """
        made = _Encoding(self, producer, input_ids, attention_mask)
        parts: list[Part] = []
        made.run(parts.append)
        return SemanticCodes(made.head, parts)

    def stream(self, producer: Any, input_ids: Any, attention_mask: Any = None) -> Iterator[bytes]:
        """The bytes of `encode`, each part as soon as the producer has its layer. The producer runs in a thread of its own.

        Args:
            producer: As in `encode`.
            input_ids: Likewise.
            attention_mask: Likewise.
        """
        made = _Encoding(self, producer, input_ids, attention_mask)
        writer = CodesWriter(made.head)
        yield writer.begin()
        parts: queue.Queue[Part | BaseException | None] = queue.Queue()

        def work() -> None:
            try:
                made.run(parts.put)
                parts.put(None)
            except BaseException as error:
                parts.put(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while (part := parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield writer.add(part)
        thread.join()

    def check_producer(self, model: Any) -> Any:
        """The model without a PEFT wrapper, if this was fitted for it.

        Args:
            model: To encode with.
        """
        # It is run without dropout, whatever its mode.
        with evaluating(compat.base_model(model)):
            return _checked(model, self.producer, "producer", "consumer", self.consumer)

    def check_consumer(self, model: Any, identity: Identity | None = None) -> Any:
        """The model without a PEFT wrapper, if this was fitted for it.

        Args:
            model: To decode for.
            identity: Its own, if at hand.
        """
        return _checked(model, self.consumer, "consumer", "producer", self.producer, identity)

    def check_codes(self, head: CodesHead) -> None:
        """Refuses codes that this translator did not make.

        Args:
            head: Of the codes.
        """
        if head.translator != self.digest:
            raise FingerprintMismatch(
                f"codes: made by another translator ({head.translator[:12]} there, {self.digest[:12]} here). Load the one that made them."
            )
        expected = tuple(PartHead(each.part, each.kind, self._layers_of(each.part), each.ranks) for each in self.maps.encoders)
        models = (self.producer.digest, self.consumer.digest)
        if (head.producer, head.consumer) != models or head.parts != expected or head.dtype != self.settings.dtype:
            raise ArtifactError("codes: their head says otherwise than the translator that they name. Have them sent again.")

    def weights_on(self, decoder: LayerDecoder, device: torch.device, dtype: torch.dtype) -> Decoder:
        """A decoder's weights as a device multiplies with them, kept for the prompts to come.

        Args:
            decoder: Of this translator.
            device: Of the layer.
            dtype: Of the cache. A CPU multiplies in float32 anyway, and would convert at each call.
        """
        kind = torch.float32 if device.type == "cpu" else dtype
        key = decoder.layer, device, kind
        if key not in self._on_devices:
            self._on_devices[key] = Decoder(*(None if part is None else part.to(device, kind) for part in decoder.weights))
        return self._on_devices[key]

    def _layers_of(self, part: str) -> tuple[int, ...]:
        return tuple(decoder.layer for decoder in self.maps.decoders if decoder.part == part)

    def tensors(self) -> dict[str, torch.Tensor]:
        return to_tensors(self.maps.encoders, self.maps.decoders)[0]

    def metadata(self) -> dict[str, Any]:
        return {
            "maps": to_tensors(self.maps.encoders, self.maps.decoders)[1],
            "settings": asdict(self.settings),
            "route": self.route.to_json(),
            "producer": self.producer.to_dict(),
            "consumer": self.consumer.to_dict(),
        }

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        settings = TranslatorSettings(**metadata["settings"])
        check_dtype(settings.dtype)
        if checked_layers(settings.recompute_layers) > checked_layers(settings.layers):
            raise ArtifactError(f"recompute_layers: expected at most {settings.layers}, got {settings.recompute_layers}. Fit it anew.")
        if settings.group is not None and (type(settings.group) is not int or settings.group < 1):
            raise ArtifactError(f"group: expected a number of tokens or None, got {settings.group!r}. Fit it anew.")
        return cls(
            Maps.from_tensors(tensors, metadata["maps"]),
            settings,
            Route.from_json(metadata["route"]),
            ModelFingerprint.from_dict(metadata["producer"]),
            ModelFingerprint.from_dict(metadata["consumer"]),
        )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        folder_or_hub_id: str | os.PathLike[str],
        *,
        producer: nn.Module | None = None,
        consumer: nn.Module | None = None,
        **options: Any,
    ) -> Self:
        """Loads a translator; see `Artifact.from_pretrained` for the options.

        Args:
            folder_or_hub_id: A folder, or `"owner/name"`.
            producer: The model to encode with, to be compared with the one that it was fitted for.
            consumer: The model to decode for, likewise.
            **options: `revision`, `token`, `cache_dir`, `local_files_only`.
        """
        loaded = super().from_pretrained(folder_or_hub_id, **options)
        if producer is not None:
            loaded.check_producer(producer)
        if consumer is not None:
            loaded.check_consumer(consumer)
        return loaded

    def describe_calibration(self) -> str:
        own = self.settings
        ranks = [" + ".join(f"{name} {rank}" for name, rank in each.ranks.items()) for each in self.maps.encoders]
        rows = {
            "Producer": self.producer.describe(),
            "Consumer": self.consumer.describe(),
            "Method": f"{own.method}, metric {own.metric}",
            "Texts": f"{own.prefixes}, {own.tokens:,} tokens",
            "Codes": f"{own.dtype}; " + ", ".join(f"{each.part}: {rank}" for each, rank in zip(self.maps.encoders, ranks, strict=True)),
            "Patched layers": ", ".join(map(str, self.patched_layers)) or "none",
            "Layers that the consumer runs": str(own.recompute_layers),
            "Seconds": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in own.seconds.items()),
            **{f"KL on texts kept apart, {what}": f"{value:.3g} nats" for what, value in own.measured.items()},
        }
        return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


class _Encoding:
    """One run of a producer."""

    def __init__(self, translator: CacheTranslator, producer: Any, input_ids: Any, attention_mask: Any) -> None:
        self.translator, self.model = translator, translator.check_producer(producer)
        try:
            tokens = PromptTokens.of(input_ids, attention_mask)
        except KVCacheError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError.of(
                "input_ids", "token ids, (batch, tokens)", type(input_ids).__name__, "Tokenize texts, and pad rows on the left."
            ) from error
        if int(tokens.real.sum(-1).min()) < 2:
            raise ConfigError.of(
                "input_ids", "at least two tokens a row", tuple(tokens.ids.shape), "The consumer runs the last one itself."
            )
        self.tokens = PromptTokens.of(tokens.ids[:, :-1], tokens.real[:, :-1]).to(compat.input_device(self.model))
        own = translator.settings
        self.head = CodesHead(
            translator=translator.digest,
            producer=translator.producer.digest,
            consumer=translator.consumer.digest,
            method=own.method,
            dtype=own.dtype,
            rows=tuple(Row.of(row) for row in self.tokens.rows()),
            parts=tuple(PartHead(each.part, each.kind, translator._layers_of(each.part), each.ranks) for each in translator.maps.encoders),
            group=own.group if own.dtype in ("int8", "int4") else None,
        )

    def run(self, on_part: Any) -> None:
        """Hands each part on, in the order of the head."""
        # What dropout leaves is no state that any map was fitted to.
        with evaluating(self.model):
            self._run(on_part)

    def _run(self, on_part: Any) -> None:
        waiting = list(self.translator.maps.encoders)
        wanted = {layer for encoder in waiting for layer in encoder.layers}
        states: dict[int, State] = {}

        def take(index: int, state: State) -> None:
            if index in wanted:
                states[index] = state
            while waiting and waiting[0].layers[-1] <= index:
                encoder = waiting.pop(0)
                on_part(encoder.part_of([states[layer] for layer in encoder.layers], self.head.dtype, self.head.group))
                for layer in encoder.layers:
                    del states[layer]

        if waiting:
            hidden = [layer for encoder in waiting if encoder.needs_hidden for layer in encoder.layers]
            read_states(self.model, self.tokens, take, hidden=hidden, upto=waiting[-1].layers[-1])


def _checked(
    model: Any, expected: ModelFingerprint, role: str, other_role: str, other: ModelFingerprint, identity: Identity | None = None
) -> Any:
    base = compat.base_model(model)
    if compat.has_learned_prompt(model):
        raise UnsupportedError(f"{role}: a learned prompt stands before every text, and is in no fingerprint.")
    identity = identity or identity_of(base)
    if identity.fingerprint is None:
        raise FingerprintMismatch(f"The translator's {role} is not what it was fitted for: {identity.reason}")
    if identity.digest != expected.digest:
        hint = f" It is the {other_role} that the translator was fitted for." if identity.digest == other.digest else ""
        try:
            expected.require_model(base, f"The translator's {role}", here=identity.fingerprint)
        except FingerprintMismatch as error:
            raise FingerprintMismatch(f"{error}{hint}") from None
    return base
