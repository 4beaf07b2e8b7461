"""`CacheTranslator`: encodes a producer's keys and values, and rebuilds a consumer's from the codes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from hf_kvcaches.core.files import checked_layers
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.core.identity import Identity
from hf_kvcaches.errors import ArtifactError, FingerprintMismatch, require_instance
from hf_kvcaches.kernels.checksum import digest_of
from hf_kvcaches.translate.codes import CodesHead
from hf_kvcaches.translate.config import TranslatorConfig, TranslatorSettings
from hf_kvcaches.translate.encoder import CacheEncoder
from hf_kvcaches.translate.fit import Score, fit
from hf_kvcaches.translate.maps import Maps
from hf_kvcaches.translate.pair import Pair


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
        self.settings, self.fingerprint = settings, consumer

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
        return cls(*fit(pair, texts, config, payload, recompute_layers, score, max_length, progress))

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

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.maps.tensors()

    def metadata(self) -> dict[str, Any]:
        models = {role: model.to_dict() for role, model in self.models.items()}
        return {"maps": self.maps.metadata(), "settings": asdict(self.settings), **models}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: Mapping[str, Any]) -> Self:
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
            "Producer": self.models["producer"].describe(),
            "Consumer": self.models["consumer"].describe(),
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
