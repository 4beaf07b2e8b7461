"""Whole caches as safetensors files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_kvcaches import compat
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.coded_content import CodedContent
from hf_kvcaches.core.artifact import refusing_nonsense
from hf_kvcaches.core.files import read_safetensors, write_atomically, write_safetensors
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import Identity, Provenance, identity_of, require_identity
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.model_state import LOOKS
from hf_kvcaches.errors import ArtifactError, FingerprintMismatch, UnsupportedError, with_article
from hf_kvcaches.kernels.checksum import digest_of
from hf_kvcaches.stores.files import parse_json

if TYPE_CHECKING:
    from hf_kvcaches.core.cache import KVCache

    SomeCache = TypeVar("SomeCache", bound=KVCache)

# In the folder that `save_pretrained` makes.
FILE_NAME = "kvcache.safetensors"
FORMAT = "hf_kvcaches.cache"
VERSION = 4


@dataclass(frozen=True, eq=False)
class Content:
    """All of a cache, outside of its process.

    Args:
        header: Plain values, for JSON.
        tensors: By name: "shared.NAME" for those of the codec that the cache was made with, and "INDEX.NAME" for those of a layer.
    """

    header: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, cache: KVCache, codec: KVCodec | None = None, attention_mask: torch.Tensor | None = None) -> Content:
        """The content of a cache.

        Args:
            cache: A cache that was built with its model, which is still as it was when it filled the cache.
            codec: See `KVCache.save`, and `attention_mask`.
        """
        fingerprint, settings = _fingerprint(cache), cache.settings()
        coded = None if codec is None else CodedContent.of(cache, codec, attention_mask)
        tensors: dict[str, torch.Tensor] = {}
        if cache.codec is not None and coded is None:
            settings = settings | {"codec": cache.codec.metadata()}
            tensors = {f"shared.{name}": tensor for name, tensor in cache.codec.tensors().items()}
        layers = []
        for index, layer in enumerate(cache.layers):
            own, values = layer.export_state() if isinstance(layer, KVLayer) else _export(layer)
            if coded and isinstance(layer, KVLayer):
                own = coded.encode(layer, index, own, cache.config)
            tensors |= {f"{index}.{name}": tensor for name, tensor in own.items()}
            layers.append({"class": type(layer).__name__, "values": values})
        header = {"class": type(cache).__name__, "settings": settings, "layers": layers, "fingerprint": fingerprint.to_dict()}
        return cls(header | ({} if coded is None else {"codec": coded.to_dict()}), tensors)

    def cache(self, cls: type[SomeCache], model: Any, codec: KVCodec | None, where: str) -> SomeCache:
        """The cache again.

        Args:
            cls: The class that must have written it.
            model: Must be the model that filled the cache.
            codec: What it was written with.
            where: What is read, for errors.
        """
        header = self.header
        if header["class"] != cls.__name__:
            kind = header["class"]
            raise ArtifactError(f"{where} holds {with_article(kind)}, not {with_article(cls.__name__)}. Load it with {kind}.load.")
        identity = require_identity(compat.base_model(model), f"The cache in {where}")
        identity.fingerprint.require_same(ModelFingerprint.from_dict(header["fingerprint"]), f"The cache in {where}")
        coded = CodedContent.of_header(header.get("codec"), codec, where)
        with refusing_nonsense(f"{where}: its content doesn't make a {cls.__name__}", "Save the cache again."):
            cache = _rebuilt(cls, where, model, self, coded)
        cache.provenance = Provenance.of(identity, cache.seen)
        return cache


def save(content: Content, path: Path) -> None:
    """Writes a cache's content; see `KVCache.save`."""
    header = {"format": FORMAT, "version": VERSION, **content.header}
    header["checksum"] = _checksum(header, content.tensors)
    write_atomically(path, lambda temporary: write_safetensors(temporary, content.tensors, {FORMAT: json.dumps(header)}))


def _fingerprint(cache: KVCache) -> ModelFingerprint:
    """Of the model that filled the cache, and is still the same."""
    here = identity_of(cache.model, LOOKS)
    filled = cache.provenance.identity if cache.seen else here
    for identity in (filled, here):
        if identity.reason:
            raise FingerprintMismatch(f"The cache can't be saved with a fingerprint. {identity.reason} Fill it anew, and save it then.")
    fingerprint = here.fingerprint
    if not filled.matches(here):
        raise FingerprintMismatch(
            f"The model has changed since it filled the cache: {_differences(filled, fingerprint)}. Bring back what it had then (adapters, "
            "weights, settings), or fill the cache anew, and save it then."
        )
    return fingerprint


def _differences(filled: Identity, here: ModelFingerprint) -> str:
    """In what the model differs from the one that filled the cache."""
    try:
        return f"{'; '.join(here.differs_from(filled.fingerprint))} (here: the model now, there: when it filled it)"
    except FingerprintMismatch:  # it was not read then
        return "its weights, settings or adapters are others"


def load(cls: type[SomeCache], path: Path, model: Any, codec: KVCodec | None = None) -> SomeCache:
    """Builds a cache from a file; see `KVCache.load`."""
    tensors, metadata = read_safetensors(path)
    header = _header(path, metadata)
    if header.pop("checksum") != _checksum(header, tensors):
        raise ArtifactError(f"{path} is damaged: its checksum doesn't fit its content. Copy it again, or save the cache again.")
    return Content(header, tensors).cache(cls, model, codec, str(path))


def _rebuilt(cls: type[SomeCache], where: str, model: Any, content: Content, coded: CodedContent | None) -> SomeCache:
    header, tensors = content.header, content.tensors
    settings = header["settings"]
    if coded is not None and coded.padding is None:
        settings = settings | {"codec": coded.codec}
    elif settings.get("codec") is not None:
        shared = {name.removeprefix("shared."): tensor for name, tensor in tensors.items() if name.startswith("shared.")}
        settings = settings | {"codec": KVCodec.restore(shared, settings["codec"])}
    cache = cls.rebuild(model, settings)
    _, _, decoder_layers = compat.decoder_layers(cache.model)
    kinds = [type(layer).__name__ for layer in cache.layers]
    if kinds != [layer["class"] for layer in header["layers"]]:
        raise ArtifactError(f"{where} has the layers {[layer['class'] for layer in header['layers']]}, and this model's cache has {kinds}.")
    for index, (layer, stored) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        device = compat.layer_device(decoder_layers[index])
        own = {name.split(".", 1)[1]: tensor.to(device) for name, tensor in tensors.items() if name.split(".", 1)[0] == str(index)}
        if isinstance(layer, KVLayer):
            layer.import_state(coded.decode(layer, index, own, cache.config) if coded else own, stored["values"])
        else:
            _import(layer, own, stored["values"])
    return cache


def _header(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    if FORMAT not in metadata:
        raise ArtifactError(f"{path} is a safetensors file, but not a saved cache. Write one with cache.save(path).")
    try:
        header = dict(parse_json(metadata[FORMAT]))
        version = int(header["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} has a damaged header: {error}. Save the cache again.") from error
    if version != VERSION:
        hint = "Upgrade hf-kvcaches." if version > VERSION else "Its fingerprint describes weights otherwise: save the cache anew."
        raise ArtifactError(f"{path} has format {version}; this version of hf-kvcaches reads {VERSION}. {hint}")
    missing = {"class", "settings", "layers", "fingerprint", "checksum"} - set(header)
    if missing:
        raise ArtifactError(f"{path} has a header without {sorted(missing)}. Save the cache again.")
    return header


def _checksum(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    return digest_of({"header": json.dumps(header, sort_keys=True), "tensors": tensors})


def _export(layer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state of those of transformers' own layers that have nothing but keys, values and a counter."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise UnsupportedError(f"Saving is not supported for caches with a {type(layer).__name__}. Keep the cache in memory.")
    if not layer.is_initialized:
        return {}, {"seen": 0}
    return {"keys": layer.keys, "values": layer.values}, {"seen": layer.get_seq_length()}


def _import(layer: Any, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    if tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.keys, layer.values = tensors["keys"], tensors["values"]
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = values["seen"]
