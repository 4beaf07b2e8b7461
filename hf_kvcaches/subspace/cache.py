"""`SubspaceCache`: attention over codes of a few bits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, Self

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.holder import AnsweringCache
from hf_kvcaches.core.parallel import shard_of
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.errors import ConfigError, require_choice, require_instance, whole_number
from hf_kvcaches.kernels.launch import BACKENDS
from hf_kvcaches.subspace.layer import CodedLayer
from hf_kvcaches.subspace.paper.layer import PaperLayer
from hf_kvcaches.subspace.paper.settings import AdaptiveSubspace
from hf_kvcaches.subspace.rows import Ends


class SubspaceCache(AnsweringCache):
    """Keeps the codes of keys and values in calibrated bases, and attends to these; or in bases that follow the text.

    Online Subspace Projection for KV Caches: Training-Free Low-Rank Attention at Inference Time. The query is projected, once for 16
    tokens; values are summed up as codes and decoded once.

    **Departs from the paper**: see `KVCodec` for bases and bits; `AdaptiveSubspace` is the paper's own method. The first `sinks` and the
    last `recent` tokens are exact (both may be 0), and up to 15 more that wait for their tile of 16. A prompt attends exactly to itself.

    **Refuses**: models that do not ask this package's attention; ready masks that differ by head, or that hide more than padding where rows
    are padded; position biases; gradients through codes; taking back tokens that were not recorded (`activate_past_recording`) once the
    window has moved on; `torch.compile` (`is_compileable` is False).

    **Memory per token**: `codec.bytes_per_token`; a fixed number of exact tokens besides. The codec's own tensors are shared by all caches
    of a model.

    Args:
        model: A transformers model.
        codec: Made for it by `KVCodec.calibrate`, or loaded with `KVCodec.from_pretrained`.
        adaptive: In place of a codec: the paper's bases.
        sinks: First tokens of each row that stay exact.
        recent: Newest tokens that stay exact.
        backend: Of the kernels: "auto", "torch" or "triton".
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    needs_attention = True
    codec_class = KVCodec

    def __init__(
        self,
        model: Any,
        codec: KVCodec | None = None,
        *,
        adaptive: AdaptiveSubspace | None = None,
        sinks: int = 4,
        recent: int = 64,
        backend: Literal["auto", "torch", "triton"] = "auto",
        offloading: bool = False,
    ) -> None:
        if (codec is None) == (adaptive is None):
            hint = (
                "KVCodec.calibrate(model, tokenizer, texts) makes a codec, KVCodec.from_pretrained(folder) loads one; "
                "adaptive=AdaptiveSubspace(bytes_ratio=0.25) does without."
            )
            raise ConfigError.of("codec, adaptive", "one of them", "none" if codec is None else "both", hint)
        if codec is not None:
            require_instance(
                "codec", codec, KVCodec, {"model": model}, "KVCodec.from_pretrained(folder) loads one, KVCodec.calibrate makes one."
            )
        if adaptive is not None:
            require_instance("adaptive", adaptive, AdaptiveSubspace, {"model": model}, "Try AdaptiveSubspace(bytes_ratio=0.25).")
        sinks = whole_number("sinks", sinks, 0, "a number of tokens, 0 or more")
        recent = whole_number("recent", recent, 0, "a number of tokens, 0 or more")
        require_choice("backend", backend, BACKENDS)
        self._codec, self.adaptive, self.backend, self._shard = codec, adaptive, backend, shard_of(model)
        self._own_codec = None if codec is None else codec.of_heads(self._shard)
        self.ends = Ends(sinks, recent, 0 if adaptive is None else adaptive.warmup)
        super().__init__(model, offloading=offloading)
        if codec is not None:
            codec.require_model(model)

    @property
    def codec(self) -> KVCodec | None:
        return self._codec

    def make_layer(self, layer_idx: int) -> CodedLayer:
        codec = self._own_codec
        if codec is None:
            assert self.adaptive is not None
            return PaperLayer(self.adaptive, self.ends, layer_idx, self.config, self.passes, self._shard)
        if not codec.has_codes(layer_idx):
            if self._model is not None:
                codec.require_model(self.model)  # says so where it is another model's
            got = f"a codec of {codec.layer_count} layers without it"
            raise ConfigError.of("codec", f"codes for layer {layer_idx}", got, "Calibrate with this model.")
        geometry = codec.geometry(self.config, layer_idx)
        if geometry is not None:  # layers that rotate alike have one object, and share their tables
            geometry = rotation_of(self.config).layers[layer_idx]
        return CodedLayer(codec.in_place, self.ends, self.backend, layer_idx, geometry, self.passes)

    def settings(self) -> dict[str, Any]:
        options: dict[str, Any] = {"sinks": self.ends.sinks, "recent": self.ends.recent}
        if self.adaptive is not None:
            options["adaptive"] = asdict(self.adaptive)
        return options

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        if "adaptive" in settings:
            settings = settings | {"adaptive": AdaptiveSubspace(**settings["adaptive"])}
        return cls(model, **settings)
