"""Which caches `eval_subspace.py` compares, one line each, and what it makes them from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import _kivi
import torch
from transformers import Cache, DynamicCache, QuantizedCache

from hf_kvcaches.core.codec.codec import KVCodec
from hf_kvcaches.core.report import measured_bytes
from hf_kvcaches.subspace.adaptive.settings import AdaptiveSubspace
from hf_kvcaches.subspace.cache import SubspaceCache

FULL = "full cache"
SINKS = 4
RATIOS = (0.05, 0.07, 0.10, 0.125, 0.14, 0.1875, 0.25)


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to keep a text.

    Args:
        kind: Which of the caches.
        options: Of `KVCodec.at`, `AdaptiveSubspace` or `QuantizedCache`; the bits of "kivi".
        reading: Of `KVCodec.calibrate`, beside the bits.
        recent: Newest tokens that stay exact, in `SubspaceCache`.
        other_texts: Whether it is measured on all texts, or on the first alone.
        quick: Whether `--quick` takes it along.
    """

    name: str
    kind: Literal["full", "codec", "kivi", "transformers", "adaptive"]
    options: Mapping[str, Any] = field(default_factory=dict)
    reading: Mapping[str, Any] = field(default_factory=dict)
    recent: int = 0
    other_texts: bool = False
    quick: bool = False


RANKS = {"rank": (16, 32)}
PAPER = {"rotation": "post", "metric": "plain"}
VARIANTS = (
    Variant(FULL, "full", other_texts=True, quick=True),
    *(Variant(f"codec {ratio:g}", "codec", {"bytes_ratio": ratio}, other_texts=True, quick=ratio == 0.125) for ratio in RATIOS),
    Variant("codec 0.1, 64 recent", "codec", {"bytes_ratio": 0.10}, recent=64),
    *(Variant(f"KIVI {bits} bit", "kivi", {"bits": bits}, other_texts=True, quick=bits == 2) for bits in (4, 3, 2)),
    # The axis makes groups of numbers of one token.
    *(Variant(f"quanto {bits} bit", "transformers", {"backend": "quanto", "nbits": bits, "axis_key": -1}) for bits in (4, 2)),
    *(Variant(f"HQQ {bits} bit", "transformers", {"backend": "hqq", "nbits": bits, "axis_key": 1}) for bits in (4, 2)),
    Variant("ranks 16, 32 in 16 bits", "codec", RANKS),
    Variant("ranks 16, 32 in 8 bits", "codec", RANKS | {"widths": 8}),
    Variant("... attention metric", "codec", RANKS, {"metric": "attention"}),
    Variant("... plain metric", "codec", RANKS, {"metric": "plain"}),
    Variant("... after the rotation", "codec", RANKS, {"rotation": "post"}),
    Variant("... the paper's: after the rotation, plain metric, gamma", "codec", RANKS | {"gamma": "paper"}, PAPER),
    Variant("adaptive, ranks 16, 32", "adaptive", RANKS),
    Variant("adaptive 0.34", "adaptive", {"bytes_ratio": 0.34}, quick=True),
)


class Workshop:
    """Makes caches for a model, and calibrates each kind of codec once."""

    def __init__(self, model: Any, texts: Sequence[list[int]], bytes_tokens: int) -> None:
        self.model, self.texts, self.bytes_tokens = model, texts, bytes_tokens
        self._codecs: dict[tuple[Any, ...], KVCodec] = {}
        self._half: Any = None

    def codec(self, variant: Variant) -> KVCodec:
        key = tuple(sorted(variant.reading.items()))
        if key not in self._codecs:
            self._codecs[key] = KVCodec.calibrate(self.model, None, self.texts, batch_size=4, progress=False, **variant.reading)
        return self._codecs[key].at(**variant.options)

    def make(self, variant: Variant) -> Cache:
        """An empty cache."""
        config = self.model.config
        if variant.kind == "codec":
            return SubspaceCache(self.model, self.codec(variant), sinks=SINKS, recent=variant.recent)
        if variant.kind == "adaptive":
            return SubspaceCache(self.model, adaptive=AdaptiveSubspace(**variant.options), sinks=SINKS, recent=variant.recent)
        if variant.kind == "kivi":
            return _kivi.KiviCache(config, variant.options["bits"], SINKS)
        return DynamicCache(config=config) if variant.kind == "full" else QuantizedCache(config=config, **variant.options)

    def share(self, variant: Variant) -> float:
        """The bytes of a long text as a share of those in 16 bits; of adaptive bases the coefficients alone."""
        if variant.kind == "codec":
            return self.codec(variant).bytes_ratio
        if variant.kind == "adaptive":
            head = self.model.config.hidden_size // self.model.config.num_attention_heads
            dim = getattr(self.model.config, "head_dim", None) or head
            return variant.options.get("bytes_ratio") or sum(variant.options["rank"]) / (2 * dim)
        if variant.kind == "kivi":
            return _kivi.share(variant.options["bits"])
        return 1.0 if variant.kind == "full" else (variant.options["nbits"] + 0.5) / 16

    @torch.no_grad()
    def owned(self, variant: Variant) -> float | None:
        """The bytes of all tensors of a `SubspaceCache` of `bytes_tokens` over those of the full cache, in half precision."""
        if variant.kind not in ("codec", "adaptive"):
            return None
        if self._half is None:  # bytes do not depend on the weights
            self._half = type(self.model)(self.model.config).to(self.model.device, torch.bfloat16).eval()
            text = self.texts[0] * (self.bytes_tokens // len(self.texts[0]) + 1)
            self._ids = torch.tensor([text[: self.bytes_tokens]], device=self.model.device)
            self._past = DynamicCache(config=self.model.config)
            self._half(input_ids=self._ids, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        options = {"sinks": SINKS, "recent": variant.recent}
        if variant.kind == "codec":
            cache = SubspaceCache.from_cache(self._past, self._half, replace(self.codec(variant), fingerprint=None), **options)
        else:
            cache = SubspaceCache(self._half, adaptive=AdaptiveSubspace(**variant.options), **options)
            self._half(input_ids=self._ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        whole = measured_bytes(tensor for layer in self._past.layers for tensor in (layer.keys, layer.values))
        return measured_bytes(cache.owned_tensors().values()) / whole
