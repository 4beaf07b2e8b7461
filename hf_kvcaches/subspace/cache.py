"""`SubspaceCache`: attention over codes of a few bits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, Self

import torch

from hf_kvcaches import compat
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.holder import AnsweringCache
from hf_kvcaches.core.parallel import require_all_heads, shard_of
from hf_kvcaches.core.rope import undoable_rotation
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, require_instance, whole_number
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.kernels.launch import BACKENDS
from hf_kvcaches.subspace.adaptive.layer import FollowingLayer
from hf_kvcaches.subspace.adaptive.settings import AdaptiveSubspace
from hf_kvcaches.subspace.coded import CodedLayer, CodedSettings
from hf_kvcaches.subspace.diagnostics import SubspaceDiagnostics, measure


class SubspaceCache(AnsweringCache):
    """Keeps the codes of keys and values in bases that were calibrated for each head or follow the text, and attends to these.

    Online Subspace Projection for KV Caches: Training-Free Low-Rank Attention at Inference Time. Keys are decoded and rotated in blocks
    while they are read, or the query is projected; values are summed up as codes and decoded once.

    **Departs from the paper**: see `KVCodec` for bases and bits, `AdaptiveSubspace` for bases that follow the text. The first `sinks` and
    the last `recent` tokens are exact (both may be 0). A prompt attends exactly to itself.

    **Refuses**: models that do not ask this package's attention; ready masks that differ by head; position biases; gradients through codes;
    taking back tokens that were not recorded (`activate_past_recording`) once the window has moved on; `torch.compile` (`is_compileable`
    is False).

    **Memory per token**: `codec.bytes_per_token`; a fixed number of exact tokens besides. The codec's own tensors are shared by all caches
    of a model. With `adaptive`, sketches and bases belong to a row: as much as some hundred exact tokens, more with each new basis.

    Args:
        model: A transformers model.
        codec: Made for it by `KVCodec.calibrate`, or loaded with `KVCodec.from_pretrained`.
        adaptive: Beside `codec`: lets its bases follow the text. In place of it: finds bases in the text.
        sinks: First tokens of each row that stay exact.
        recent: Newest tokens that stay exact.
        backend: Of the kernels: "auto", "torch", "triton" or "reference".
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
        backend: Literal["auto", "torch", "triton", "reference"] = "auto",
        offloading: bool = False,
    ) -> None:
        if codec is None and adaptive is None:
            hint = (
                "KVCodec.calibrate(model, tokenizer, texts) makes a codec, KVCodec.from_pretrained(folder) loads one; "
                "adaptive=AdaptiveSubspace(bytes_ratio=0.25) does without."
            )
            raise ConfigError.of("codec", "a KVCodec", None, hint)
        if codec is not None:
            hint = "KVCodec.calibrate makes one for a model."
            require_instance("codec", codec, KVCodec, {"model": model, "adaptive": adaptive}, hint)
        if adaptive is not None:
            require_instance("adaptive", adaptive, AdaptiveSubspace, {"model": model}, "Try AdaptiveSubspace(bytes_ratio=0.25).")
            _check_bits(codec, adaptive)
        sinks = whole_number("sinks", sinks, 0, "a number of tokens, 0 or more")
        recent = whole_number("recent", recent, 0, "a number of tokens, 0 or more")
        require_choice("backend", backend, BACKENDS)
        self._codec, self.adaptive, self._shard = codec, adaptive, shard_of(model)
        if self._shard is not None and adaptive is not None and adaptive.sketch_differs_by_head:
            raise UnsupportedError(
                "sketch='fd': by itself it has twice the rank of the head with most directions, and under tensor parallelism each process "
                "has only some of the heads. Give sketch_size."
            )
        self._own_codec = codec if codec is None else codec.of_heads(self._shard)
        self._settings = CodedSettings(sinks, recent, backend)
        super().__init__(model, offloading=offloading)
        if codec is not None:
            codec.require_model(model)

    @property
    def codec(self) -> KVCodec | None:
        return self._codec

    def make_layer(self, layer_idx: int) -> CodedLayer:
        codec, adaptive = self._own_codec, self.adaptive
        if codec is not None and (layer_idx >= len(codec.layers) or codec.layers[layer_idx] is None):
            if self._model is not None and self._codec is not None:
                self._codec.require_model(self.model)  # says so where it is another model's
            got = f"a codec of {len(codec.layers)} layers without it"
            raise ConfigError.of("codec", f"codes for layer {layer_idx}", got, "Calibrate with this model.")
        if codec is not None:
            geometry = codec.geometry(self.config, layer_idx)
        else:
            assert adaptive is not None
            self._check_rank(layer_idx, adaptive)
            geometry = None
            if adaptive.rotation == "aware":
                geometry = undoable_rotation(self.config, layer_idx, "adaptive", "Use rotation='post'.")
        if adaptive is None:
            return CodedLayer(codec, self._settings, layer_idx, geometry, self.passes)
        return FollowingLayer(codec, adaptive, self._settings, layer_idx, geometry, self.passes, self._shard)

    def _check_rank(self, layer_idx: int, adaptive: AdaptiveSubspace) -> None:
        """Refuses ranks above the size of a head, as far as the config tells it."""
        sizes, rank = head_sizes(self.config, layer_idx), adaptive.rank
        if isinstance(rank, tuple) and sizes is not None and (rank[0] > sizes[0] or rank[1] > sizes[1]):
            raise ConfigError.of("rank", f"1 to {sizes[0]} for keys and 1 to {sizes[1]} for values, the model's head size", rank)

    def diagnostics(self, input_ids: torch.Tensor) -> SubspaceDiagnostics:
        """What a cache with these settings loses of a text, for each layer and head; see `LayerDiagnostics`.

        The model reads the text twice, as a prompt: into an empty cache like this one, and with exact keys and values.

        Args:
            input_ids: (batch, tokens), without padding.
        """
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not input_ids.numel():
            got = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            raise ConfigError.of("input_ids", "token ids (batch, tokens)", got, "Try tokenizer(text, return_tensors='pt').input_ids.")
        own, model = self._settings, compat.base_model(self.model)
        require_all_heads(model, "diagnostics", "Ask a cache of the whole model.")
        like = type(self)(model, self.codec, adaptive=self.adaptive, sinks=own.sinks, recent=own.recent, backend=own.backend)
        with torch.no_grad(), evaluating(model):
            model(input_ids=input_ids, **compat.cache_kwargs(model, like))
            return measure(like.layers, model, input_ids)

    def settings(self) -> dict[str, Any]:
        own = self._settings
        options: dict[str, Any] = {"sinks": own.sinks, "recent": own.recent}
        if self.adaptive is not None:
            options["adaptive"] = asdict(self.adaptive)
        return options

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        # The kernels are a matter of the machine: files of earlier versions name them.
        options = {name: value for name, value in settings.items() if name != "backend"}
        if "adaptive" in options:
            options["adaptive"] = AdaptiveSubspace(**options["adaptive"])
        return cls(model, **options)


def _check_bits(codec: KVCodec | None, adaptive: AdaptiveSubspace) -> None:
    """Refuses bits that nobody gives, or two do."""
    if codec is None and not adaptive.finds_bits:
        raise ConfigError.of("bytes_ratio, rank, energy", "one of them without a codec", None, "Try AdaptiveSubspace(bytes_ratio=0.25).")
    if codec is not None and adaptive.finds_bits:
        raise ConfigError.of("bytes_ratio, rank, energy", "none beside a codec, which says so", adaptive, "Use codec.at for other bits.")
