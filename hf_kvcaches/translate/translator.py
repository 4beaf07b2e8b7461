"""`CacheTranslator`: encodes a producer's keys and values, and rebuilds a consumer's from the codes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from hf_kvcaches import compat
from hf_kvcaches.core.files import checked_layers
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.core.identity import Identity, identity_of
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.errors import ArtifactError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.kernels.arguments import Decoder
from hf_kvcaches.kernels.checksum import digest_of
from hf_kvcaches.translate.calibration import fit
from hf_kvcaches.translate.codes import CodesHead, Part, PartHead, SemanticCodes, message_of
from hf_kvcaches.translate.config import FitOptions, Score, TranslatorConfig, TranslatorSettings
from hf_kvcaches.translate.encoding import Encoding
from hf_kvcaches.translate.maps import LayerDecoder, Maps
from hf_kvcaches.translate.paper.routing import Route


@dataclass(frozen=True, eq=False)
class CacheTranslator(Artifact):
    """Codes a producer's keys and values, and rebuilds a consumer's from the codes. Made by `CacheTranslator.fit`.

    Args:
        maps: From states to codes to states.
        settings: How it was fitted.
        route: Which layers are patched.
        producer: The model that encodes.
        consumer: The model whose cache is filled.
    """

    artifact_type: ClassVar[str] = "cache-translator"
    format_version: ClassVar[int] = 3

    maps: Maps
    settings: TranslatorSettings
    route: Route
    producer: ModelFingerprint
    consumer: ModelFingerprint
    _weights: dict[Any, Decoder] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", self.consumer)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_weights": {}}

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
        patch_layers: Literal["auto"] | Sequence[int] | None = None,
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
            texts: Strings or lists of token ids, like the prompts to come: directions that do not occur in them are not coded.
            payload: Bytes that are sent of a token, as a share of bfloat16 keys and values of all the consumer's layers.
            recompute_layers: How many of its lowest layers the consumer computes itself. Their keys and values and those of the next layer
                are exact, and the next layer's attention input is side information: with 0 it is the token itself. `"auto"`: chosen on
                held-out texts, up to `config.prefill_share` of the layers.
            patch_layers: Layers that get their attention's input and compute keys and values themselves, as in the paper: `"auto"`: those
                that help on held-out texts, if any; None for none.
            score: In place of minus the mean KL divergence, for choices on held-out texts: called with logits of the consumer alone and
                with a translated cache, (positions, vocabulary) each; greater is better.
            config: All other options.
            max_length: Tokens of a text that are read.
            progress: Whether to show bars.
        """
        options = FitOptions(payload, recompute_layers, patch_layers, score, config or TranslatorConfig(), max_length, progress)
        return cls(*fit(producer, consumer, tokenizer, texts, options))

    @property
    def sent_layers(self) -> tuple[int, ...]:
        """Layers that are rebuilt."""
        return tuple(decoder.layer for decoder in self.maps.decoders)

    @property
    def patched_layers(self) -> tuple[int, ...]:
        """Layers that get their attention's input."""
        return tuple(decoder.layer for decoder in self.maps.decoders if decoder.kind == "input")

    @property
    def part_heads(self) -> tuple[PartHead, ...]:
        """The parts of a message."""
        return tuple(PartHead(encoder.part, encoder.quantizer.rows) for encoder in self.maps.encoders)

    @cached_property
    def digest(self) -> str:
        """Of all that codes depend on, both models among it."""
        models = self.producer.digest, self.consumer.digest
        return digest_of([sorted(self.maps.tensors().items()), repr(self.maps.metadata()), self.settings.recompute_layers, *models])

    def encode(self, producer: Any, input_ids: Any, attention_mask: Any = None, *, first: int = 0) -> SemanticCodes:
        """Run a producer over prompts and code all their tokens but the last, which the consumer runs itself.

        Args:
            producer: The model that this was fitted for.
            input_ids: (batch, tokens) or (tokens,), two tokens at least.
            attention_mask: 1 where a token is real, or None. Padding stands on the left, and is not sent.
            first: The index of the first token with codes, where the consumer's cache has those before it: its `seen`.
        """
        encoding, parts = self._encoding(producer, input_ids, attention_mask, first), list[Part]()
        encoding.run(parts.append)
        return SemanticCodes(encoding.head, parts)

    def stream(self, producer: Any, input_ids: Any, attention_mask: Any = None, *, first: int = 0) -> Iterator[bytes]:
        """Yield the bytes of `encode`, each part as soon as the producer, in another thread, has its layers; arguments as in `encode`."""
        encoding = self._encoding(producer, input_ids, attention_mask, first)
        yield from message_of(encoding.head, encoding.run_in_thread())

    def _encoding(self, producer: Any, input_ids: Any, attention_mask: Any, first: int) -> Encoding:
        model = self.check_producer(producer)
        return Encoding(model, self.maps.encoders, self.digest, self.part_heads, input_ids, attention_mask, first)

    def check_producer(self, model: Any) -> Any:
        """Return the model without its PEFT wrapper; refuse one that this was not fitted for."""
        # It is run without dropout, whatever its mode.
        with evaluating(compat.base_model(model)):
            return self._check(model, "producer", self.producer)

    def check_consumer(self, model: Any, identity: Identity | None = None) -> Any:
        """Return the model without its PEFT wrapper; refuse another model."""
        return self._check(model, "consumer", self.consumer, identity)

    def _check(self, model: Any, role: str, expected: ModelFingerprint, identity: Identity | None = None) -> Any:
        base = compat.base_model(model)
        if compat.has_learned_prompt(model):
            raise UnsupportedError(f"{role}: a learned prompt is in no fingerprint. Pass the model without that adapter.")
        require_all_heads(base, f"The translator's {role}", "Load the model whole, or use another cache.")
        identity = identity or identity_of(base)
        if identity.reason:
            raise FingerprintMismatch(f"The translator's {role} is not what it was fitted for: {identity.reason}")
        if identity.digest != expected.digest:
            roles = {self.producer.digest: "producer", self.consumer.digest: "consumer"}
            swapped = f"It is the {roles[identity.digest]} that the translator was fitted for." if identity.digest in roles else ""
            try:
                expected.require_model(identity.fingerprint, f"The translator's {role}")
            except FingerprintMismatch as error:
                raise FingerprintMismatch(f"{error} {swapped}".rstrip()) from None
        return base

    def check_codes(self, head: CodesHead) -> None:
        """Refuse codes of another translator."""
        if head.translator != self.digest:
            raise FingerprintMismatch(
                f"codes: made by another translator ({head.translator[:12]} there, {self.digest[:12]} here). Load the one that made them."
            )
        if head.parts != self.part_heads:
            raise ArtifactError("codes: their head does not fit the translator that it names. Have them sent again.")

    def weights_on(self, decoder: LayerDecoder, device: torch.device, dtype: torch.dtype) -> Decoder:
        """Return a decoder's weights on a device; they are kept for later prompts."""
        # A CPU multiplies in float32 anyway, and would convert at each call. Half precision can't hold what small gradients weigh.
        key = decoder.layer, device, torch.float32 if device.type == "cpu" or dtype == torch.float16 else dtype
        if key not in self._weights:
            self._weights[key] = Decoder(*(None if part is None else part.to(*key[1:]) for part in decoder.weights))
        return self._weights[key]

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.maps.tensors()

    def metadata(self) -> dict[str, Any]:
        return {
            "maps": self.maps.metadata(),
            "settings": asdict(self.settings),
            "route": self.route.to_json(),
            "producer": self.producer.to_dict(),
            "consumer": self.consumer.to_dict(),
        }

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        config = TranslatorConfig(**metadata["settings"]["config"])
        settings = TranslatorSettings(**metadata["settings"] | {"config": config})
        if checked_layers(settings.recompute_layers) >= checked_layers(settings.layers):
            raise ArtifactError(f"recompute_layers: expected fewer than {settings.layers}, got {settings.recompute_layers}. Fit it anew.")
        return cls(
            Maps.restore(tensors, metadata["maps"]),
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
        settings = self.settings
        parts = [f"{each.part}: {len(each.quantizer.steps)} in {each.quantizer.rows} bytes" for each in self.maps.encoders]
        rows = {
            "Producer": self.producer.describe(),
            "Consumer": self.consumer.describe(),
            "Method": f"{settings.config.method}, metric {settings.config.metric}",
            "Texts": f"{settings.prefixes}, {settings.tokens:,} tokens",
            "Payload": f"{settings.payload:g} of bfloat16 keys and values",
            "Directions": ", ".join(parts) or "none",
            "Patched layers": ", ".join(map(str, self.patched_layers)) or "none",
            "Layers that the consumer runs": str(settings.recompute_layers),
            "Seconds": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in settings.seconds.items()),
            **{f"KL on held-out texts, {what}": f"{value:.3g} nats" for what, value in settings.measured.items()},
        }
        return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())
