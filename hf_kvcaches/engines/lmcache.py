"""A serde with which LMCache stores and sends chunks as a codec's codes, and `CodecAdapter`, which brings it along.

LMCache persists the whole buffer that it was told to allocate, so all chunks have one size, `bound` times what the codec expects:

    4 bytes of magic; the CRC-32 of what follows the length; the length, 4 bytes
    the codec's digest, 16 bytes; the length of each layer's record, 4 bytes; the records
"""

from __future__ import annotations

import zlib
from typing import Any

import lmcache
import numpy as np
import torch
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.serde import AsyncSerdeProcessor, Deserializer, Serializer, register_serde_factory

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.packing import bytes_beside
from hf_kvcaches.engines.engine_codec import EngineCodec, require_version
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError, whole_number

require_version("lmcache", lmcache.__version__)

_MAGIC, _FRONT, _DIGEST = b"HKC1", 12, 16
_BOUND = 1.25
_LENGTH = 4


class CodecSerde(Serializer, Deserializer):
    """Packed codes of chunks, with keys as they are cached, because LMCache does not say at which positions they stand.

    **Refuses** chunks of another model, of some of the heads (tensor parallelism), of latents and of hybrid models. LMCache then stores
    nothing, as it does with a chunk that does not fit in its buffer, and goes on.

    Args:
        codec: One with `rotation="post"`.
        model: The model as the engine names it.
        bound: The size of a buffer as a multiple of what is expected.
    """

    def __init__(self, codec: KVCodec, model: str, bound: float = _BOUND) -> None:
        self._codec, self._digest, self._model, self._bound = codec, bytes.fromhex(codec.digest), model, bound
        sizes = {(layer.shape.heads, layer.shape.key_dim, layer.shape.value_dim) for layer in codec.in_place.layers.values()}
        if len(sizes) > 1:
            raise UnsupportedError(f"hf-kvcaches: expected layers of one size, got {sorted(sizes)}. Use another serde.")
        ((self._heads, self._key_dim, self._value_dim),) = sizes

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Bytes of the buffer of a chunk."""
        if len(layout_desc.shapes) != 1:
            raise UnsupportedError("hf-kvcaches: layers of the model keep different things. Use another serde.")
        (shape,) = layout_desc.shapes
        beside = _LENGTH + bytes_beside(shape[-2])
        return _FRONT + _DIGEST + self._codec.layer_count * beside + int(self._bound * self._codec.packed_ratio * 2 * shape.numel())

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Write the codes of a chunk into the buffer, and return its size."""
        if key.model_name != self._model:
            raise UnsupportedError(f"hf-kvcaches: expected chunks of {self._model}, got {key.model_name}. Give it a serde of its own.")
        keys, values = self._states(src.tensor)
        packed = self._codec.pack(dict(enumerate(keys.unbind())), dict(enumerate(values.unbind())))
        records = [packed[layer].cpu().numpy().tobytes() for layer in range(len(keys))]
        content = b"".join([self._digest, np.array([len(record) for record in records], "<u4").tobytes(), *records])
        buffer = dst.tensor.view(torch.uint8).flatten()
        if _FRONT + len(content) > len(buffer):
            raise ConfigError.of("bound", "buffers that codes fit in", self._bound, "Calibrate on texts like those, or raise it.")
        content = _MAGIC + np.array([zlib.crc32(content), len(content)], "<u4").tobytes() + content
        buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        buffer[len(content) :] = 0
        return len(buffer)

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Write a chunk's keys and values; anything but what `serialize` wrote is an `ArtifactError`."""
        buffer = src.tensor.view(torch.uint8).flatten().cpu()
        crc32, length = np.frombuffer(buffer[4:_FRONT].numpy().tobytes(), "<u4").tolist()
        content = buffer[_FRONT : _FRONT + length]
        if buffer[:4].numpy().tobytes() != _MAGIC or len(content) != length or zlib.crc32(content.numpy()) != crc32:
            raise ArtifactError("The codes of a chunk are damaged, or those of another serde.")
        if content[:_DIGEST].numpy().tobytes() != self._digest:
            raise ArtifactError("The codes of a chunk are those of another codec. Give each codec a place of its own.")
        start = _DIGEST + _LENGTH * self._codec.layer_count
        records = content[start:].to(dst.tensor.device).split(np.frombuffer(content[_DIGEST:start].numpy().tobytes(), "<u4").tolist())
        pairs = self._codec.unpack([(layer, record, 0, None) for layer, record in enumerate(records)])
        for side, target in enumerate(self._states(dst.tensor)):
            target.copy_(torch.stack([pair[side] for pair in pairs]))

    def _states(self, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of keys and values, (layers, heads, tokens, dim) each.

        Args:
            chunk: (2, layers, tokens, heads * dim); or, of vLLM from 0.26 on, with each head's key and value together: (layers, tokens,
                heads * 2 dim), perhaps with a 1 before it.
        """
        layers, apart = self._codec.layer_count, chunk.ndim == 4 and len(chunk) == 2 and self._key_dim == self._value_dim
        width = self._heads * (self._key_dim if apart else self._key_dim + self._value_dim)
        if chunk.shape[-1] != width or tuple(chunk.shape[:-2]) not in ([(2, layers)] if apart else [(layers,), (1, layers)]):
            raise UnsupportedError(
                f"hf-kvcaches: expected chunks of {layers} layers and {self._heads} heads, got {tuple(chunk.shape)}. Shards of heads and "
                "latents are not served: use another serde."
            )
        heads = chunk.unflatten(-1, (self._heads, -1)).transpose(-3, -2)
        if apart:
            return heads[0], heads[1]
        keys, values = (heads if chunk.ndim == 3 else heads[0]).split([self._key_dim, self._value_dim], -1)
        return keys, values


class CodecAdapter(L2AdapterInterface):
    """Any adapter of LMCache's, by the import of which the serde `hf-kvcaches` is there; `adapter_params` are that adapter's config."""

    def __new__(cls, params: dict[str, Any], **options: Any) -> Any:
        """Return that adapter."""
        return create_l2_adapter(get_l2_adapter_config_class(params["type"]).from_dict(params), options.get("l1_memory_desc"))


def create_serde(options: dict[str, Any]) -> AsyncSerdeProcessor:
    """Make the serde from what an adapter's `serde` says: `codec`, `model`, and perhaps `bound` and `max_workers`."""
    if options.keys() - {"bound", "max_workers"} != {"codec", "model"}:
        raise ConfigError.of("serde", "codec and model, and perhaps bound and max_workers", sorted(options))
    engine_codec = EngineCodec.load(options["codec"], "lmcache")
    engine_codec.require_checkpoint(options["model"])
    serde = CodecSerde(engine_codec.codec, options["model"], float(options.get("bound", _BOUND)))
    return AsyncSerdeProcessor(serde, serde, whole_number("max_workers", options.get("max_workers", 1), 1))


register_serde_factory("hf-kvcaches", create_serde)
