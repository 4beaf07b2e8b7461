"""Whole caches in files and messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_kvcaches import compat
from hf_kvcaches.core import files
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import LOOKS, Provenance, identity_of, require_identity
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.core.step import padding_of
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch, UnsupportedError, with_article
from hf_kvcaches.stores.files import Source, write_atomically

FILE_NAME = "kvcache.safetensors"  # in the folder that `save_pretrained` makes
_TYPE, _VERSION = "cache", 7
_FIELDS = {"class": str, "settings": dict, "layers": list, "fingerprint": dict, "codec": dict | None}


def named_codec(codec: Any, digest: str, where: str) -> Any:
    """Return the codec that a caller passed, if it is the one with the digest, which what is read names."""
    if (got := getattr(codec, "digest", codec)) != digest:
        hint = "Pass codec=KVCodec.from_pretrained(...); with other bits, codec.at(...), it is another codec."
        raise ConfigError.of("codec", f"for {where} the one of digest {digest}", got, hint)
    return codec


class SavedCache:
    """What a cache can do to leave its process, and what it says of itself for that."""

    codec_class: ClassVar[type[Any] | None] = None  # of `codec`, an `Artifact`: a cache of codes is saved with its codec

    @property
    def codec(self) -> Any:
        """The `KVCodec` whose codes the layers hold, if they hold codes."""
        return None

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, besides the model and the codec, that build this cache again; saved with it as JSON."""
        return {}

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        """An empty cache from what `settings` gave, read from JSON; of a cache that holds codes, with its `codec`."""
        return cls(model, **settings)  # type: ignore[call-arg]

    def save(self, path: str | Path, codec: Any = None, attention_mask: Tensor | None = None) -> None:
        """Write the cache to one safetensors file, with the fingerprint of the model that filled it.

        The model must still be the one that filled it, because the last tokens may be newer; else that is a `FingerprintMismatch`.

        Args:
            path: The file; replaced in one step.
            codec: The `KVCodec` that `load` is given, too: the file names it and has no copy. A cache of its codes is written as it is; one
                that keeps every token exactly is written as codes, but for the first tokens of each row, and comes back decoded.
            attention_mask: With codec, of a cache with several rows that are exact: 1 where a token is real, (batch, tokens) of the prompt
                or of all, with padding at the start of rows. Keys are coded best where positions count these, as with `generate`.
        """
        write_atomically(path, files.container(self.content(codec, attention_mask)))

    def to_bytes(self, codec: Any = None, attention_mask: Tensor | None = None) -> bytes:
        """The cache as a message, to go on in another process that has the model; the arguments are those of `save`."""
        return b"".join(files.container(self.content(codec, attention_mask)))

    @classmethod
    def load(cls, path: str | Path, model: Any, codec: Any = None) -> Self:
        """Read a cache that `save` wrote.

        Args:
            path: The file.
            model: The model to go on with; another one than the cache was filled by is a `FingerprintMismatch`.
            codec: The one that it was saved with, if it was with one.
        """
        return cls._from_content(files.read_file(path), model, codec, str(path))

    def save_pretrained(self, folder: str | Path, codec: Any = None, attention_mask: Tensor | None = None) -> None:
        """Write the cache into a folder, made if need be, as `save` does into a file. Other files in it stay."""
        self.save(files.make_folder(folder) / FILE_NAME, codec, attention_mask)

    @classmethod
    def from_pretrained(cls, folder_or_hub_id: str | Path, model: Any, codec: Any = None, **options: Any) -> Self:
        """Read a cache that `save_pretrained` wrote, from a folder, or from the Hub where there is no such folder.

        Args:
            folder_or_hub_id: A folder, or `"owner/name"`.
            model: As for `load`, and `codec`.
            **options: `revision`, `token`, `cache_dir` and `local_files_only` of a download.
        """
        return cls.load(files.local_file(folder_or_hub_id, FILE_NAME, **options), model, codec)

    @classmethod
    def from_bytes(cls, data: Source, model: Any, codec: Any = None) -> Self:
        """Read a cache that `to_bytes` wrote.

        Args:
            data: All of its bytes, whole or in pieces, or a function that returns between 1 and the given number of them, such as a
                connected socket's `recv`.
            model: As for `load`, and `codec`.
        """
        return cls._from_content(files.read_message(data), model, codec, "this message")

    def content(self: Any, codec: Any, attention_mask: Tensor | None) -> files.Content:
        """What is saved or sent; the arguments are those of `save`."""
        if self.learned_prompt:
            raise UnsupportedError("save: what a learned prompt put into the cache is in no fingerprint. Keep the cache in memory.")
        header: dict[str, Any] = {"type": _TYPE, "format_version": _VERSION, "class": type(self).__name__, "settings": self.settings()}
        header |= {"fingerprint": _fingerprint(self).to_dict(), "codec": None, "layers": []}
        tensors: dict[str, Tensor] = {}
        padding = None
        if codec is not None:
            padding = _row_padding(self, codec, attention_mask)
            header["codec"] = {"digest": codec.digest, "padding": padding}
        elif self.codec is not None:
            header["codec"] = {"metadata": self.codec.metadata()}
            tensors = {f"codec.{name}": tensor for name, tensor in self.codec.tensors().items()}
        exact: dict[int, tuple[Tensor, Tensor]] = {}
        for index, layer in enumerate(self.layers):
            state, counters = layer.export_state() if isinstance(layer, KVLayer) else _export(layer)
            if padding is not None and state and isinstance(layer, KVLayer):
                keys, values = (state.pop(name) for name in layer.exact_tensors)
                exact[index] = keys, values
            tensors |= {f"{index}.{name}": tensor for name, tensor in state.items()}
            header["layers"].append({"class": type(layer).__name__, "values": counters})
        coded = {} if padding is None else codec.encode_layers(self.config, exact, padding)
        tensors |= {f"{index}.coded.{name}": tensor for index, state in coded.items() for name, tensor in state.items()}
        return files.Content(header, tensors)

    @classmethod
    def _from_content(cls, content: files.Content, model: Any, codec: Any, where: str) -> Any:
        """Build a cache again; errors name `where` its content is from."""
        header = content.header
        files.require_header(header, _TYPE, _VERSION, _FIELDS, where)
        if (got := header["class"]) != cls.__name__:
            raise ArtifactError(f"{where} holds {with_article(got)}, not {with_article(cls.__name__)}. Load it with {got}.load.")
        what = f"The cache in {where}"
        identity = require_identity(compat.base_model(model), what)
        identity.fingerprint.require_same(ModelFingerprint.from_dict(header["fingerprint"]), what)
        if "digest" in (header["codec"] or {}):
            codec = named_codec(codec, header["codec"]["digest"], where)
        elif codec is not None:
            raise ConfigError.of("codec", f"for {where} none, since it was saved without one", codec, "Leave it out.")
        with files.artifact_errors(f"{where}: its content doesn't make a {cls.__name__}", "Save the cache again."):
            cache = _rebuilt(cls, model, content, codec)
        cache.provenance = Provenance(cache.seen, [(0, identity)])
        return cache


def _rebuilt(cls: type[Any], model: Any, content: files.Content, codec: Any) -> Any:
    header, stored = content.header, content.header["codec"] or {}
    padding, settings = stored.get("padding"), dict(header["settings"])
    if "metadata" in stored:
        settings["codec"] = cls.codec_class.restore(files.part_of(content.tensors, "codec"), stored["metadata"])
    elif codec is not None and padding is None:
        settings["codec"] = codec
    cache = cls.rebuild(model, settings)
    kinds, expected = [type(layer).__name__ for layer in cache.layers], [layer["class"] for layer in header["layers"]]
    if kinds != expected:
        raise ArtifactError(f"it has the layers {expected}, and this model's cache has {kinds}")
    states = []
    for index, module in enumerate(decoder_layers(cache.model)[2]):
        device = compat.layer_device(module)
        states.append({name: tensor.to(device) for name, tensor in files.part_of(content.tensors, str(index)).items()})
    if padding is not None:
        coded = {index: own for index, state in enumerate(states) if (own := files.part_of(state, "coded"))}
        for index, exact in codec.decode_layers(cache.config, coded, padding).items() if coded else ():
            plain = {name: tensor for name, tensor in states[index].items() if not name.startswith("coded.")}
            states[index] = plain | dict(zip(cache.layers[index].exact_tensors, exact, strict=True))
    for layer, description, state in zip(cache.layers, header["layers"], states, strict=True):
        if isinstance(layer, KVLayer):
            layer.import_state(state, description["values"])
        elif state:
            layer.lazy_initialization(state["keys"], state["values"])
            layer.keys, layer.values = state["keys"], state["values"]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = description["values"]["seen"]
    return cache


def _export(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of those of transformers' own layers that have nothing but keys, values and a counter."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise UnsupportedError(f"Saving is not supported for caches with a {type(layer).__name__}. Keep the cache in memory.")
    if not layer.is_initialized:
        return {}, {"seen": 0}
    return {"keys": layer.keys, "values": layer.values}, {"seen": layer.get_seq_length()}


def _row_padding(cache: Any, codec: Any, attention_mask: Tensor | None) -> list[int] | None:
    """Return how many slots at the start of each row hold no token; None for a cache of codes, which are stored as they are."""
    if not hasattr(codec, "encode_layers"):
        raise ConfigError.of("codec", "a KVCodec", codec, "KVCodec.from_pretrained loads one, and KVCodec.calibrate makes one for a model.")
    codec.require_model(cache.model)
    if cache.codec is not None:
        if cache.codec.digest != codec.digest:
            raise ConfigError.of("codec", f"the cache's own, {cache.codec}", codec, "Leave it out to save the cache's own along.")
        return None
    require_all_heads(cache.model, "codec: to make codes of exact keys and values", "Leave codec out.")
    states = [layer.exact_states() if layer.exact_tensors else None for layer in cache.layers if isinstance(layer, KVLayer)]
    if None in states:
        raise UnsupportedError(f"save: this {type(cache).__name__} holds no exact keys and values to make codes of. Leave codec out.")
    rows = next((keys.shape[0] for keys, _ in filter(None, states) if keys is not None), 0)
    if attention_mask is None:
        if rows > 1:
            hint = "Codes are of keys before rotation, and positions count a row's real tokens."
            raise ConfigError.of("attention_mask", f"1 where a token of {rows} rows is real", None, hint)
        return [0] * rows
    later = max(0, cache.seen - attention_mask.shape[-1])
    padding = padding_of(torch.nn.functional.pad(attention_mask, (0, later), value=1), cache.seen)
    return [0] * rows if padding is None else padding.tolist()


def _fingerprint(cache: Any) -> ModelFingerprint:
    """Return that of the model that filled the cache, and is still the same."""
    here = identity_of(cache.model, LOOKS)
    filled = cache.provenance.identity if cache.seen else here
    for identity in (filled, here):
        if identity.reason:
            raise FingerprintMismatch(f"The cache can't be saved with a fingerprint. {identity.reason} Fill it anew, and save it then.")
    if not filled.matches(here):
        try:
            differences = "; ".join(here.fingerprint.differs_from(filled.fingerprint))
            differences += " (here: the model now, there: when it filled it)"
        except FingerprintMismatch:  # it was not read then
            differences = "its weights, settings or adapters are others"
        raise FingerprintMismatch(
            f"The model has changed since it filled the cache: {differences}. Bring back what it had then (adapters, weights, settings), "
            "or fill the cache anew, and save it then."
        )
    return here.fingerprint
