"""`WarmStartLibrary`: stored prompts, from whose states later prompts start."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import Identity, identity_of, require_identity
from hf_kvcaches.core.parallel import require_all_heads, shard_of
from hf_kvcaches.core.rope import Rotation, rotation_of
from hf_kvcaches.core.save import named_codec
from hf_kvcaches.core.tokenizer_digest import digest_of_tokenizer
from hf_kvcaches.errors import (
    ArtifactError,
    ConfigError,
    FingerprintMismatch,
    UnsupportedError,
    require_tokenizer,
    whole_number,
)
from hf_kvcaches.kernels.checksum import digest_of
from hf_kvcaches.reuse import layout as blob_layout
from hf_kvcaches.reuse.background import Background
from hf_kvcaches.reuse.layout import Quantization
from hf_kvcaches.reuse.tokens import Ids, as_ids
from hf_kvcaches.stores.blobs import BlobStore
from hf_kvcaches.stores.location import TIMEOUT
from hf_kvcaches.warmstart.encoders import EmbeddingsEncoder, Encoder, HiddenEncoder, encoder_of
from hf_kvcaches.warmstart.entries import Entry, EntryReport, EntryStore
from hf_kvcaches.warmstart.packed import PackedLibrary
from hf_kvcaches.warmstart.reading import PromptStates, read_prompt, states_of_cache
from hf_kvcaches.warmstart.summaries.adapters import Adapters, TrainedAdapters
from hf_kvcaches.warmstart.summaries.compressor import SlotCompressor
from hf_kvcaches.warmstart.summaries.positions import PositionCorrection
from hf_kvcaches.warmstart.summaries.slots import Slots

Prompt = str | Sequence[int] | torch.Tensor

# Prefixes of the names of tensors.
_SLOTS, _FULL = "slots.", "full."


class Neighbour(NamedTuple):
    """An entry that resembles a prompt; `similarity` is a cosine, or None where it was looked up by its tokens."""

    key: str
    ids: Ids
    similarity: float | None = None


class WarmStartLibrary:
    """Prompts with the states that a model computed for them: a summary in slots, and all keys and values unless `full=False`.

    Any thread may use it, and processes may share a folder or a Redis. Whoever can write there can make a model say anything, so keep it
    as private as the weights; entries also hold their prompts as text.

    Args:
        model: A transformers model. Entries are bound to it and to the adapters that are active now.
        tokenizer: The model's.
        slots: How many slots a summary has for each layer and key head; 0 for no summaries.
        encoder: What embeds prompts: `"model"` or None (the model's input embeddings, nothing to download), `"hidden"`, the name or folder
            of a sentence-transformers model, or a function from texts to vectors.
        layout: The layout of summaries: `"salient"` or `"paper"`.
        tail: How many tokens at the end of a prompt no slot stands for; they are recomputed behind the slots.
        full: Whether all keys and values of a prompt are stored; False for slots only, without alignment.
        quantization: How keys and values are stored: None for bit-equal ones, a `KVCodec` of the model, `"int8"` or `"int4"`.
        location: `"memory"`, `"disk:FOLDER"`, `"redis://host:port/db"`, or an object of a `hf_kvcaches.stores.blobs.BlobStore` of your own.
        max_bytes: The most that all entries may take, a number or such as `"4GiB"`; above it, the least useful are evicted.
        hot_bytes: The most that the entries used last may take in this process: for these no file is read and no server is asked.
        time_to_live: Seconds after which an entry is a miss and is deleted, pinned or not; None for never.
        index: The string of `faiss.index_factory` for looking up similar prompts: `"Flat"` compares all, `"HNSW32"` fewer.
        timeout: Seconds that all look-ups of a request may wait for Redis together, and the longest that one answer may take.
        adapters: Maps for pooled slots, from `scripts/train_compressor.py`, or None.
        correct_positions: Experimental, for models with learned positions (GPT-2), whose keys can't be rotated: slots are moved by a linear
            estimate of what a position adds to a key.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        slots: int = 64,
        encoder: str | Callable[[list[str]], Any] | Encoder | None = None,
        *,
        layout: Literal["salient", "paper"] = "salient",
        tail: int = 1,
        full: bool = True,
        quantization: Quantization = None,
        location: str | BlobStore = "memory",
        max_bytes: int | str | None = None,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        index: str = "Flat",
        timeout: float = TIMEOUT,
        adapters: TrainedAdapters | Adapters | None = None,
        correct_positions: bool = False,
    ) -> None:
        require_tokenizer(tokenizer)
        if tokenizer is None or not callable(getattr(tokenizer, "decode", None)):
            raise ConfigError.of("tokenizer", "the model's tokenizer", type(tokenizer).__name__, "Prompts are compared as text, too.")
        tail = whole_number("tail", tail, 1, hint="The last token is always run.")
        slots = whole_number("slots", slots, 0, "a number of slots, 0 for none")
        if not isinstance(full, bool):
            hint = "How keys and values are stored is quantization=: None for bit-equal ones, 'int8', 'int4', or a KVCodec."
            raise ConfigError.of("full", "True or False", full, hint)
        if not slots and not full:
            raise ConfigError("slots=0 and full=False: nothing would be stored. Keep one of them.")
        self.model, self.tokenizer = compat.base_model(model), tokenizer
        decoder_layers(self.model)  # refuses models without decoder layers, before anything is stored
        self.rotation: Rotation = rotation_of(compat.decoder_config(self.model.config))
        self.correction = PositionCorrection.of_model(self.model) if correct_positions and slots else None
        if slots and self.rotation.why and self.correction is None:
            raise UnsupportedError(f"slots: {self.rotation.why}. Use slots=0, which reuses common starts of prompts.")
        self.slots, self.layout, self.tail, self.full = slots, layout, tail, full
        quantization = blob_layout.check_quantization(quantization)
        self.quantization: Quantization = quantization if full else None
        if self.codec is not None:
            self.codec.require_all_layers(self.model, "quantization")
        if isinstance(adapters, TrainedAdapters):
            adapters = adapters.checked(self.model, slots, layout, tail)
        self.shard = shard_of(self.model)
        self.compressor = SlotCompressor(slots, layout) if slots else None
        self.adapters = adapters if slots else None
        self.encoder = encoder_of(encoder, self.model)
        for needed, what, instead in (
            (slots, "A summary", "Use slots=0."),
            (self.codec is not None, "A library with the codes of a KVCodec", "Use quantization='int8'."),
            (
                isinstance(self.encoder, EmbeddingsEncoder | HiddenEncoder),
                "An encoder that runs the model",
                "Give encoder the name of a sentence-transformers model, or a function.",
            ),
        ):
            if needed:
                require_all_heads(self.model, what, instead)
        self.digest = require_identity(self.model, "The library").digest
        limits: dict[str, Any] = {"hot_bytes": hot_bytes, "time_to_live": time_to_live}
        self.entries = EntryStore(location, self._scope(), max_bytes, timeout, index=index, dim=self.encoder.dim, **limits)
        self.background = Background(partial(self.entries.catalog.warn_once, "failed job"))

    @property
    def codec(self) -> KVCodec | None:
        """The codec of keys and values, if they are codes."""
        return self.quantization if isinstance(self.quantization, KVCodec) else None

    def _scope(self) -> str:
        parts: list[Any] = ["warm start 2", self.digest, digest_of_tokenizer(self.tokenizer), self.encoder.name]
        parts += [self.slots, self.layout, self.tail, self.full, blob_layout.name_of(self.quantization), digest_of(self._adapter_tensors())]
        return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=16).hexdigest()

    def _adapter_tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.adapters is None else self.adapters.tensors()

    def add(
        self, prompts: Prompt | Sequence[Prompt], provenance: Mapping[str, Any] | None = None, *, cache: Cache | None = None
    ) -> list[str | None]:
        """Run prompts through the model and store their states, or take those of one prompt from a cache.

        Args:
            prompts: One or several: texts, tokenised with the tokenizer's special tokens, or token ids.
            provenance: Where they are from, as JSON values.
            cache: A cache of one row that begins with the tokens of the one prompt, all kept exactly; only the prompt's last token is run.
                For a cache of this package, its tokens and model are checked. A `DynamicCache` has no record of them, so only the last
                token's keys and values are compared.

        Returns:
            The ids of their entries, new or old ones; None for a prompt that was not stored because of `max_bytes` or a failed store.
        """
        self._require_same_model()
        if cache is not None and len(listed := _listed(prompts)) != 1:
            raise ConfigError.of("prompts", "one prompt, the one that cache= holds", f"{len(listed)} prompts")
        return [self._add(prompt, dict(provenance or {}), cache) for prompt in _listed(prompts)]

    def _add(self, prompt: Prompt, provenance: dict[str, Any], cache: Cache | None) -> str | None:
        ids = token_ids(prompt, self.model, self.tokenizer)
        if len(ids) <= self.tail:
            raise ConfigError.of("prompts", f"at least {self.tail + 1} tokens each", len(ids))
        key = self.entries.exact(ids)
        # Where one process of a tensor-parallel model lacks an entry, all run the prompt.
        everywhere = self.shard is None or self.shard.decisions("" if key is None else "stored") == {"stored"}
        if key is not None and everywhere:
            return key
        row = torch.tensor([ids], device=compat.input_device(self.model))
        states = read_prompt(self.model, row) if cache is None else states_of_cache(self.model, cache, row, self.digest)
        return self.keep(ids, states, prompt if isinstance(prompt, str) else None, provenance)

    def keep(
        self, ids: Sequence[int], states: PromptStates, text: str | None = None, provenance: Mapping[str, Any] | None = None
    ) -> str | None:
        """Store a prompt with the exact states that the library's model computed for it; the caller vouches for them.

        Any thread may call it. The prompt is not run; in a library without summaries, `states` needs no queries and no scaling.
        """
        tensors: dict[str, torch.Tensor] = {}
        if self.compressor is not None:
            keys, values = ([layer[:, : -self.tail] for layer in part] for part in zip(*states.layers, strict=True))
            slots = self.compressor.compress(keys, values, states.queries, len(ids), states.scaling)
            slots = slots if self.adapters is None else self.adapters.apply(slots, self.rotation.layers)
            tensors |= {_SLOTS + name: tensor for name, tensor in slots.tensors().items()}
        stored: dict[str, Any] = {}
        if self.full:
            packed, stored = blob_layout.encode(states.layers, {}, self.quantization, 0, self.rotation.layers)
            tensors |= {_FULL + name: tensor for name, tensor in packed.items()}
        text = self.text(ids) if text is None else text
        return self.entries.put(Entry(text, ids, self._encoded(text, ids), tensors, dict(provenance or {}), stored))

    def warm_up(self, prompts: Prompt | Sequence[Prompt] | None = None) -> int:
        """Read entries once, so that the next request pays no first read; return how many were read.

        Args:
            prompts: Read the nearest entries of these prompts; None for all entries.
        """
        self.refresh()
        keys = self.ids()
        if prompts is not None:
            rows = [as_ids(token_ids(prompt, self.model, self.tokenizer)) for prompt in _listed(prompts)]
            keys = list(dict.fromkeys(neighbour.key for ids in rows for neighbour in self.near(ids)))
        else:
            self.entries.near(self._encoded("any text", [0]))
        read = 0
        for key in keys:
            self.entries.catalog.blobs.begin()  # each is a request of its own
            read += self.entries.get(key) is not None
        return read

    def _encoded(self, text: str, ids: Sequence[int]) -> Any:
        return self.encoder.encode([text], [ids])[0]

    def text(self, ids: Sequence[int]) -> str:
        """Decode token ids to the text by which prompts are compared."""
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def exact(self, ids: Ids) -> Neighbour | None:
        """Return the entry with exactly these tokens."""
        key = self.entries.exact(ids.tolist())
        return None if key is None else Neighbour(key, ids)

    def beginning(self, ids: Ids) -> tuple[Neighbour | None, int]:
        """Return the entry that shares the longest prefix with a prompt, and for how many tokens."""
        key, shared = self.entries.beginning(ids)
        head = None if key is None else self.entries.head(key)
        return (None, 0) if key is None or head is None else (Neighbour(key, head.ids), shared)

    def near(self, ids: Ids, k: int = 3) -> list[Neighbour]:
        """Return the `k` most similar entries, the most similar first."""
        tokens = ids.tolist()
        nearest = self.entries.near(self._encoded(self.text(tokens) if self.encoder.reads_text else "", tokens), k)
        return [Neighbour(key, head.ids, cosine) for key, cosine in nearest if (head := self.entries.head(key)) is not None]

    def slots_of(self, key: str) -> Slots | None:
        """Return an entry's summary; None if it is missing or damaged."""
        head = self.entries.head(key) if self.slots else None
        if head is None:
            return None
        slots_in = lambda tensors: Slots.of(_named(tensors, _SLOTS), len(head.ids))  # noqa: E731
        # `Slots.of` raises an `ArtifactError` for damaged slots.
        entry = self.entries.get(key, slots_in, "slots")
        return None if entry is None else slots_in(entry.tensors)

    def full_of(self, key: str) -> tuple[Mapping[str, Any], dict[str, torch.Tensor]] | None:
        """Return an entry's keys and values in the form of `layout`; None if they are missing or damaged."""
        head = self.entries.head(key)
        if head is None or not head.stored:
            return None
        entry = self.entries.get(key, lambda tensors: blob_layout.check(_named(tensors, _FULL), head.stored, len(head.ids)), "full")
        return None if entry is None else (head.stored, _named(entry.tensors, _FULL))

    def delete(self, key: str) -> bool:
        """Delete the entry with this id, and return whether it was there."""
        return self.entries.delete(key)

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keep the entry with this id from eviction, or with `pinned=False` no longer."""
        self.entries.pin(key, pinned)

    def ids(self) -> list[str]:
        """Return the ids of all entries."""
        return self.entries.ids()

    def provenance(self, key: str) -> dict[str, Any] | None:
        """Return the provenance that an entry was added with, or None if no entry has this id."""
        head = self.entries.head(key)
        return None if head is None else dict(head.provenance)

    def prompt(self, key: str) -> str | None:
        """Return an entry's text, or None if no entry has this id."""
        head = self.entries.head(key)
        return None if head is None else head.text

    def refresh(self) -> None:
        """Store pending prompts, and apply changes of other processes."""
        self.background.flush()
        self.entries.refresh()

    def report(self) -> EntryReport:
        """Report what the library holds, and how much work it saved."""
        return self.entries.report()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write all entries and settings into a folder, as an artifact. It holds only the digest of a codec: save the codec as well."""
        self._packed().save_pretrained(folder)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload all entries, prompts as text among them, to a Hub repository; options and result are those of `Artifact.push_to_hub`."""
        return self._packed().push_to_hub(repo_id, **options)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        model: Any,
        tokenizer: Any,
        encoder: str | Callable[[list[str]], Any] | Encoder | None = None,
        *,
        location: str | BlobStore = "memory",
        max_bytes: int | str | None = None,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        index: str = "Flat",
        codec: KVCodec | None = None,
        **options: Any,
    ) -> Self:
        """Load a library that `save_pretrained` wrote.

        Args:
            folder_or_hub_id: A folder, or `"owner/name"`.
            model: The model that it was made for; another one is a `FingerprintMismatch`.
            tokenizer: The model's.
            encoder: The encoder that it was made with; None for that of the model.
            location: See the class, also for `max_bytes`, `hot_bytes`, `time_to_live` and `index`.
            codec: The `KVCodec` of keys and values, which the folder names but does not hold; None if they are not coded.
            **options: Of `Artifact.from_pretrained`: `revision`, `token`, `cache_dir`, `local_files_only`.
        """
        packed = PackedLibrary.from_pretrained(folder_or_hub_id, model=compat.base_model(model), tokenizer=tokenizer, **options)
        adapters = Adapters.of(packed.adapters) if packed.adapters else None
        settings = packed.settings | {"quantization": _quantization(packed.settings["quantization"], codec)}
        settings |= {"location": location, "max_bytes": max_bytes, "hot_bytes": hot_bytes, "time_to_live": time_to_live, "index": index}
        library = cls(model, tokenizer, encoder=encoder, adapters=adapters, **settings)
        if library.encoder.name != packed.encoder:
            raise ConfigError.of("encoder", f"the one that the library was made with, {packed.encoder!r}", library.encoder.name)
        try:
            for entry in packed.entries:
                library.entries.put(entry)
        except ConfigError as error:
            raise ArtifactError(f"{folder_or_hub_id}: it holds an invalid entry: {error}") from error
        return library

    def _packed(self) -> PackedLibrary:
        self._require_same_model()
        entries = []
        for key in self.ids():
            self.entries.catalog.blobs.begin()  # each is a request of its own
            entries.append(self.entries.get(key))
        settings: dict[str, Any] = {"slots": self.slots, "layout": self.layout, "tail": self.tail, "full": self.full}
        settings |= {"quantization": blob_layout.name_of(self.quantization), "correct_positions": self.correction is not None}
        packed = PackedLibrary(tuple(filter(None, entries)), settings, self.encoder.name, self._adapter_tensors())
        # Without samples: keys and values are of one precision.
        packed.fingerprint = replace(ModelFingerprint.of(self.model, self.tokenizer), samples=[])
        return packed

    def why_not(self, identity: Identity) -> str:
        """Say why a model can't reuse entries, adapters included; "" if it can."""
        changed = "The model has changed since the library was made, or other adapters are active."
        return identity.reason or ("" if identity.digest == self.digest else changed)

    def _require_same_model(self) -> None:
        if why_not := self.why_not(identity_of(self.model)):
            raise FingerprintMismatch(f"{why_not} Make a library for the model as it is, or bring back what it had.")

    def close(self) -> None:
        """Store pending prompts, and close files and connections."""
        self.background.flush()
        self.entries.close()

    def __len__(self) -> int:
        return len(self.entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied cache shares the library

    def __repr__(self) -> str:
        kept = blob_layout.label_of(self.quantization) if self.full else "slots only"
        return f"WarmStartLibrary({len(self)} prompts, {self.slots} slots, {kept}, {self.entries.catalog.blobs.place!r})"


def _quantization(name: str | None, codec: KVCodec | None) -> Quantization:
    """Return the quantization of a stored library. Refuse a codec other than the named one."""
    digest = blob_layout.codec_digest(name)
    if digest is not None:
        return named_codec(codec, digest, "keys and values that were stored as codes")
    if codec is not None:
        raise ConfigError.of("codec", f"None, since keys and values are stored without a codec ({name})", codec, "Leave it out.")
    return blob_layout.check_quantization(name)


def _named(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list."""
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__len__"):
        raise ConfigError.of("prompts", "texts or rows of token ids", type(prompts).__name__, "Of a tokenizer's output, add input_ids.")
    single = isinstance(prompts, str) or (isinstance(prompts, torch.Tensor) and prompts.ndim == 1)
    return [prompts] if single or (len(prompts) and isinstance(prompts[0], int)) else list(prompts)  # type: ignore[list-item,arg-type]


def token_ids(prompt: Prompt, model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Return a prompt's token ids; a text gets the tokenizer's special tokens."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    try:
        ids = [index(token) for token in (prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt)]
    except TypeError as error:
        raise ConfigError.of("prompts", "texts or rows of token ids", type(prompt).__name__) from error
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", 1 << 31)
    if not all(0 <= token < vocabulary for token in ids):
        raise ConfigError.of("prompts", f"token ids from 0 to {vocabulary - 1}", f"{min(ids)} to {max(ids)}")
    return ids
