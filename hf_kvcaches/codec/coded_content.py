"""A cache's content where it leaves the process and the reader has the codec: exact keys and values as codes, and no copy of the codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedConfig

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.sides import EXACT
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.core.step import padding_of
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError, require_instance

if TYPE_CHECKING:
    from hf_kvcaches.core.cache import KVCache

_CODES, _FIRST = "codes", ("first_keys", "first_values")


def named_codec(codec: KVCodec | None, digest: str, where: str) -> KVCodec:
    """The codec that something stored names; refuses none, and another one.

    Args:
        codec: What the caller passed.
        digest: That of the named one.
        where: What is read, for the error.
    """
    if codec is not None:
        require_instance("codec", codec, KVCodec, {}, "KVCodec.from_pretrained loads one.")
    if codec is None or codec.digest != digest:
        hint = "Pass codec=KVCodec.from_pretrained(...); with other bits, codec.at(...), it is another codec."
        raise ConfigError.of("codec", f"for {where} the one of digest {digest}", codec and codec.digest, hint)
    return codec


@dataclass(frozen=True)
class CodedContent:
    """How a cache's layers are written with a codec that their reader has.

    Args:
        codec: The codec.
        padding: Where layers are exact and become codes: how many slots at the start of each row hold no token. None: they hold codes.
    """

    codec: KVCodec
    padding: tuple[int, ...] | None

    @classmethod
    def of(cls, cache: KVCache, codec: KVCodec, attention_mask: torch.Tensor | None) -> Self:
        """How a cache is written; described in `KVCache.save`."""
        require_instance("codec", codec, KVCodec, {}, "KVCodec.calibrate makes one for a model.")
        codec.require_model(cache.model)
        if cache.codec is not None:
            if cache.codec.digest != codec.digest:
                raise ConfigError.of("codec", f"the cache's own, {cache.codec}", codec, "Leave it out to save the cache's own along.")
            return cls(codec, None)
        require_all_heads(cache.model, "codec: to make codes of exact keys and values", "Leave codec out.")
        layers = [layer for layer in cache.layers if isinstance(layer, KVLayer)]
        states = [layer.exact_states() if layer.exact_tensors else None for layer in layers]
        if None in states:
            raise UnsupportedError(f"save: this {type(cache).__name__} holds no exact keys and values to make codes of. Leave codec out.")
        rows = next((keys.shape[0] for keys, _ in filter(None, states) if keys is not None), 0)
        if attention_mask is None:
            if rows > 1:
                hint = "Codes are of keys before rotation, and positions count a row's real tokens."
                raise ConfigError.of("attention_mask", f"1 where a token of {rows} rows is real", None, hint)
            return cls(codec, (0,) * rows)
        missing = max(0, cache.seen - attention_mask.shape[-1])
        padding = padding_of(torch.nn.functional.pad(attention_mask, (0, missing), value=1), cache.seen)
        return cls(codec, (0,) * rows if padding is None else tuple(padding.tolist()))

    @classmethod
    def of_header(cls, stored: dict[str, Any] | None, codec: KVCodec | None, where: str) -> Self | None:
        """How a cache was written, if it was with a codec, which has to be this one.

        Args:
            stored: From `to_dict`, or None for a cache that was written without.
            where: What is read, for errors.
        """
        if stored is not None:
            named = named_codec(codec, stored["digest"], where)
            return cls(named, None if stored["padding"] is None else tuple(stored["padding"]))
        if codec is not None:
            raise ConfigError.of("codec", f"for {where} none, since it was saved without one", codec, "Leave it out.")
        return None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"digest": self.codec.digest, "padding": self.padding}

    def encode(self, layer: KVLayer, layer_idx: int, tensors: dict[str, torch.Tensor], config: PreTrainedConfig) -> dict[str, torch.Tensor]:
        """What is written of a layer, of what it exported. The first tokens of each row stay exact.

        Args:
            config: The model's.
        """
        if self.padding is None or not tensors:
            return tensors
        keys, values = (tensors[name] for name in layer.exact_tensors)
        calibrated = self.codec.layers[layer_idx]
        shapes = [(states.shape[1], states.shape[3]) for states in (keys, values)]
        if calibrated is None or shapes != [side.shape for side in calibrated]:
            raise ConfigError.of("codec", f"one for keys and values of layer {layer_idx}, {shapes}", self.codec)
        geometry, first = self.codec.geometry(config, layer_idx), self._first(keys)
        unrotated = keys if geometry is None else geometry.unrotate(keys.float(), self._positions(keys))
        exact = [states.gather(2, first.expand(-1, states.shape[1], -1, states.shape[3])) for states in (keys, values)]
        codes = self.codec.coder(layer_idx, keys.dtype, keys.device).encode(unrotated, values)
        others = {name: tensor for name, tensor in tensors.items() if name not in layer.exact_tensors}
        return others | {_CODES: codes} | dict(zip(_FIRST, exact, strict=True))

    def decode(
        self, layer: KVLayer, layer_idx: int, tensors: Mapping[str, torch.Tensor], config: PreTrainedConfig
    ) -> dict[str, torch.Tensor]:
        """The inverse of `encode`."""
        others = dict(tensors)
        if self.padding is None or not others:
            return others
        codes, *exact = (others.pop(name) for name in (_CODES, *_FIRST))
        if codes.ndim != 3 or codes.dtype != torch.uint8 or len(codes) != len(self.padding):
            raise ArtifactError(f"layer {layer_idx} has codes of {tuple(codes.shape)}, and there are {len(self.padding)} rows")
        keys, values = self.codec.coder(layer_idx, exact[0].dtype, codes.device).decode(codes)
        geometry, first = self.codec.geometry(config, layer_idx), self._first(keys)
        if geometry is not None:
            keys = geometry.rotate(keys, self._positions(keys))
        for states, kept in zip((keys, values), exact, strict=True):
            states.scatter_(2, first.expand(-1, states.shape[1], -1, states.shape[3]), kept)
        return others | dict(zip(layer.exact_tensors, (keys, values), strict=True))

    def _positions(self, keys: torch.Tensor) -> torch.Tensor:
        """Where the model put each token, (batch, tokens)."""
        return (torch.arange(keys.shape[2], device=keys.device) - self._padding(keys)).clamp(min=0)

    def _first(self, keys: torch.Tensor) -> torch.Tensor:
        """The slots of each row's first tokens, (batch, 1, tokens, 1)."""
        tokens = keys.shape[2]
        first = self._padding(keys) + torch.arange(min(EXACT, tokens), device=keys.device)
        return first.clamp(max=tokens - 1)[:, None, :, None]

    def _padding(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.padding, dtype=torch.int64, device=keys.device)[:, None]
