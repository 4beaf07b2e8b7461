"""Which caches the evaluations of `SubspaceCache` compare, one line each, and what makes them."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import _kivi
import torch
from shared import TESTBED
from shared.cli import load
from shared.texts import codec_texts, encode
from transformers import Cache, DynamicCache, QuantizedCache

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.report import measured_bytes
from hf_kvcaches.subspace.adaptive.settings import AdaptiveSubspace
from hf_kvcaches.subspace.cache import SubspaceCache

FULL = "full cache"
SINKS = 4
RATIOS = (0.05, 0.07, 0.10, 0.125, 0.14, 0.1875, 0.25)
# Seeds of the documents that codecs are calibrated on; those with questions begin at `--seed`.
CALIBRATION_SEED = 10**6


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to keep a text.

    Args:
        kind: Which of the caches.
        options: Of `KVCodec.at` or `QuantizedCache`; the bits of "kivi". Empty where there is no codec.
        reading: Of `KVCodec.calibrate`, beside the bits.
        adaptive: How bases follow the text.
        recent: Newest tokens that stay exact, in `SubspaceCache`.
        other_texts: Whether it is measured on all texts, or on the first alone.
        quick: Whether `--quick` takes it along.
    """

    name: str
    kind: Literal["full", "codec", "kivi", "transformers", "adaptive"]
    options: Mapping[str, Any] = field(default_factory=dict)
    reading: Mapping[str, Any] = field(default_factory=dict)
    adaptive: AdaptiveSubspace | None = None
    recent: int = 0
    other_texts: bool = False
    quick: bool = False

    @property
    def exact(self) -> int:
        """First tokens of a row up to which a cache has no codes."""
        return SINKS + (self.adaptive.warmup if self.adaptive is not None and not self.options else 0)


RANK = (16, 32)  # of keys and of values
RANKS = {"rank": RANK}
PAPER = {"rotation": "post", "metric": "plain"}
FOLLOWING = AdaptiveSubspace()
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
    Variant("... plain metric", "codec", RANKS, {"metric": "plain"}),
    Variant("... after the rotation", "codec", RANKS, {"rotation": "post"}),
    Variant("... the paper's: after the rotation, plain metric, gamma", "codec", RANKS | {"gamma": "paper"}, PAPER),
    *(
        Variant(f"codec {ratio:g}, adaptive", "adaptive", {"bytes_ratio": ratio}, {}, FOLLOWING, other_texts=True, quick=ratio == 0.125)
        for ratio in (0.07, 0.10, 0.125)
    ),
    Variant("adaptive 0.25", "adaptive", adaptive=AdaptiveSubspace(bytes_ratio=0.25), other_texts=True),
    Variant("adaptive, ranks 16, 32", "adaptive", adaptive=AdaptiveSubspace(rank=RANK)),
    Variant("adaptive, ranks 16, 32, Frequent Directions", "adaptive", adaptive=AdaptiveSubspace(rank=RANK, sketch="fd")),
)


class Workshop:
    """Makes caches for a model, and calibrates each kind of codec once.

    Args:
        texts: What codecs are calibrated on, as token ids.
        owned_ids: The text of the caches whose bytes are counted, (tokens,).
    """

    def __init__(self, model: Any, texts: Sequence[list[int]], owned_ids: torch.Tensor) -> None:
        self.model, self.texts, self.owned_ids = model, texts, owned_ids
        self._codecs: dict[tuple[Any, ...], KVCodec] = {}
        self._half: Any = None

    def codec(self, variant: Variant) -> KVCodec:
        key = tuple(sorted(variant.reading.items()))
        if key not in self._codecs:
            self._codecs[key] = KVCodec.calibrate(self.model, None, self.texts, batch_size=4, progress=False, **variant.reading)
        return self._codecs[key].at(**variant.options)

    def _codec_of(self, variant: Variant) -> list[KVCodec]:
        """The codec, where there is one."""
        return [self.codec(variant)] if variant.options else []

    def _options(self, variant: Variant) -> dict[str, Any]:
        """Of `SubspaceCache`."""
        return {"adaptive": variant.adaptive, "sinks": SINKS, "recent": variant.recent}

    def make(self, variant: Variant) -> Cache:
        """An empty cache."""
        config = self.model.config
        if variant.kind in ("codec", "adaptive"):
            return SubspaceCache(self.model, *self._codec_of(variant), **self._options(variant))
        if variant.kind == "kivi":
            return _kivi.KiviCache(config, variant.options["bits"], SINKS)
        return DynamicCache(config=config) if variant.kind == "full" else QuantizedCache(config=config, **variant.options)

    def share(self, variant: Variant) -> float:
        """The bytes of a long text as a share of those in 16 bits; with adaptive bases those of the codes alone."""
        if variant.kind == "kivi":
            return _kivi.share(variant.options["bits"])
        if variant.kind == "transformers":
            return (variant.options["nbits"] + 0.5) / 16
        if variant.options:
            return self.codec(variant).bytes_ratio
        if variant.adaptive is None:
            return 1.0
        head = self.model.config.hidden_size // self.model.config.num_attention_heads
        dim = getattr(self.model.config, "head_dim", None) or head
        return variant.adaptive.bytes_ratio or sum(variant.adaptive.rank) / (2 * dim)

    @torch.no_grad()
    def owned(self, variant: Variant) -> float | None:
        """The bytes of all tensors of a `SubspaceCache` over those of the full cache, in half precision."""
        if variant.kind not in ("codec", "adaptive"):
            return None
        if self._half is None:
            self._half, ids = copy.deepcopy(self.model).to(torch.bfloat16), self.owned_ids[None].to(self.model.device)
            self._past = DynamicCache(config=self.model.config)
            self._half(input_ids=ids, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        codecs = [replace(codec, fingerprint=None) for codec in self._codec_of(variant)]
        cache = SubspaceCache.from_cache(self._past, self._half, *codecs, **self._options(variant))
        whole = measured_bytes(tensor for layer in self._past.layers for tensor in (layer.keys, layer.values))
        return measured_bytes(cache.owned_tensors().values()) / whole


class Setting:
    """A model, what its codecs are calibrated on, and the texts behind that.

    Args:
        args: With the options of `add_setting_options`.
        name: Of the model.

    Attributes:
        texts: By their files' names the token ids of each that no codec was calibrated on.
    """

    def __init__(self, args: argparse.Namespace, name: str, device: torch.device) -> None:
        self.model, self.tokenizer = load(name, device)
        first, *others = [torch.tensor(encode(self.tokenizer, path.read_text(encoding="utf-8"))) for path in args.texts]
        calibration, rest = first[: args.calibrate].tolist(), first[args.calibrate :]
        # Named after the file, so that no folder of this computer gets into the table.
        self.texts = dict(zip([path.name for path in args.texts], [rest, *others], strict=True))
        texts = codec_texts(self.tokenizer, calibration, args.calibration_documents, args.length, CALIBRATION_SEED)
        self.calibrated_on = f"{len(calibration)} tokens of {args.texts[0].name} and {len(texts) - 1} documents"
        self.workshop = Workshop(self.model, texts, rest.repeat(-(-args.bytes_tokens // max(1, len(rest))))[: args.bytes_tokens])


def add_setting_options(parser: argparse.ArgumentParser) -> None:
    """The options that a `Setting` reads, but for those of all scripts."""
    parser.add_argument("--model", nargs="+", default=["deep", "base"], help="folders or hub ids; default: models of this repository")
    texts = [TESTBED / "prose.txt", TESTBED / "verse.txt"]
    parser.add_argument("--texts", nargs="+", type=Path, default=texts, help="what is read; calibrated on is the first")
    parser.add_argument("--calibrate", type=int, default=16384, help="tokens of the first text to calibrate on")
    parser.add_argument("--calibration-documents", type=int, default=16, help="generated documents to calibrate on besides; 0 for none")
    parser.add_argument("--bytes-tokens", type=int, default=8192, help="of the caches whose bytes are counted")
