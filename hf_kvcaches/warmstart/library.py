"""`WarmStartLibrary`: stored prompts, from whose keys and values later prompts start."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from hf_kvcaches import compat
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.fingerprint import ModelFingerprint, digest_of_tokenizer
from hf_kvcaches.core.identity import Identity, identity_of, require_identity
from hf_kvcaches.core.parallel import require_all_heads, shard_of
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.core.save import named_codec
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch, require_tokenizer
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.index import Ids, Record, as_ids
from hf_kvcaches.reuse.layout import LayerStates, Quantization
from hf_kvcaches.reuse.store import NewSpan, SpanStore
from hf_kvcaches.stores.blobs import BlobStore, NewBlob
from hf_kvcaches.stores.catalog import TIMEOUT
from hf_kvcaches.warmstart.encoders import Encoder
from hf_kvcaches.warmstart.entries import Entry, EntryContents, EntryReport, PackedLibrary, Prompt, prompt_states, record_of, rows_of

# How many similar prompts are compared token by token.
COMPARED = 3


class WarmStartLibrary(SpanStore):
    """Prompts with the keys and values that a model computed for them.

    Any thread may use it, and processes may share a folder or a Redis. Whoever can write there can make a model say anything, so keep it
    as private as the weights; entries also hold their prompts as text.

    Args:
        model: A transformers model. Entries are bound to it and to the adapters that are active now.
        tokenizer: The model's.
        encoder: What embeds prompts, to nominate similar ones: `"tokens"` or None (their token ids are hashed), a model of
            sentence-transformers, or a function from a list of texts to vectors, which its `name`, or else its qualified name, identifies.
        quantization: How keys and values are stored: None for bit-equal ones, a `KVCodec` of the model, `"int8"` or `"int4"`.
        location: `"memory"`, `"disk:FOLDER"`, `"redis://host:port/db"`, or an object of a `hf_kvcaches.stores.blobs.BlobStore` of your own.
        max_bytes: The most that all entries may take, a number or such as `"4GiB"`; above it, the least useful are evicted.
        hot_bytes: The most that the entries used last may take in this process: for these no file is read and no server is asked.
        time_to_live: Seconds after which an entry is a miss and is deleted, pinned or not; None for never.
        timeout: Seconds that all look-ups of a request may wait for Redis together, transfers aside, and the longest that one answer may
            take.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        encoder: str | Callable[[list[str]], Any] | None = None,
        *,
        quantization: Quantization = None,
        location: str | BlobStore = "memory",
        max_bytes: int | str | None = None,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        require_tokenizer(tokenizer)
        if tokenizer is None or not callable(getattr(tokenizer, "decode", None)):
            raise ConfigError.of("tokenizer", "the model's tokenizer", type(tokenizer).__name__, "Entries hold their prompts as text, too.")
        self.model, self.tokenizer = compat.base_model(model), tokenizer
        decoder_layers(self.model)  # refuses models without decoder layers, before anything is stored
        self.geometries = rotation_of(compat.decoder_config(self.model.config)).layers
        quantization = layout.check_quantization(quantization)
        if isinstance(quantization, KVCodec):
            quantization.require_all_layers(self.model, "quantization")
            require_all_heads(self.model, "A library with the codes of a KVCodec", "Use quantization='int8'.")
        self.shard, self.encoder = shard_of(self.model), Encoder(encoder)
        self.digest = require_identity(self.model, "The library").digest
        parts = ["warm start 3", self.digest, digest_of_tokenizer(tokenizer), self.encoder.name, str(layout.name_of(quantization))]
        self.scope = hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()
        self.contents = EntryContents(self.scope, self.encoder.dim)
        limits: dict[str, Any] = {"max_bytes": max_bytes, "hot_bytes": hot_bytes, "time_to_live": time_to_live, "timeout": timeout}
        super().__init__(self.contents, "prompt", quantization, location, **limits)
        self._hits = self._saved_tokens = 0
        self.refresh()

    def add(self, prompts: Prompt | Sequence[Prompt], provenance: Mapping[str, Any] | None = None) -> list[str | None]:
        """Run prompts through the model and store their keys and values.

        Args:
            prompts: One or several: texts, tokenised with the tokenizer's special tokens, or token ids.
            provenance: Where they are from, as JSON values.

        Returns:
            The ids of their entries, new or old ones; None for a prompt that was not stored because of `max_bytes` or a failed store.
        """
        self._require_model()
        rows = rows_of(prompts, self.model, self.tokenizer)
        if any(len(ids) < 2 for ids, _ in rows):
            raise ConfigError.of("prompts", "at least 2 tokens each", min(len(ids) for ids, _ in rows))
        return [self._add(ids, text, provenance) for ids, text in rows]

    def _add(self, ids: list[int], text: str | None, provenance: Mapping[str, Any] | None) -> str | None:
        key = self.exact(as_ids(ids))
        # Where one process of a tensor-parallel model lacks an entry, all run the prompt.
        if key is not None and (self.shard is None or self.shard.decisions("stored") == {"stored"}):
            return key
        if key is None and self.shard is not None:
            self.shard.decisions("")
        return self.keep(as_ids(ids), prompt_states(self.model, ids), text, provenance)

    def keep(
        self, ids: Ids, layers: Sequence[LayerStates], text: str | None = None, provenance: Mapping[str, Any] | None = None
    ) -> str | None:
        """Store a prompt with the exact states that the library's model computed for it, and return its id; the caller vouches for them.

        Any thread may call it.
        """
        text = self._text(ids) if text is None else text
        entry = Entry(record_of(self.scope, ids), text, self.encoder.encode(text, ids.tolist()), provenance or {})
        self.put([NewSpan(entry.record, layers, entry.head())], self.geometries)
        return self.exact(ids)

    def exact(self, ids: Ids) -> str | None:
        """Return the id of the entry with exactly these tokens, or None."""
        key = record_of(self.scope, ids).key
        return key if key in self.contents.entries else None

    def beginning(self, ids: Ids) -> tuple[Record | None, int]:
        """Return the record that shares the longest prefix with a prompt, and for how many tokens."""
        with self.catalog.lock:
            return self.contents.beginning(ids)

    def near(self, ids: Ids, least: float = -1.0) -> list[tuple[Record, float]]:
        """Return the most similar prompts with a cosine of at least `least`, the most similar first."""
        embedding = self.encoder.encode(self._text(ids) if self.encoder.reads_text else "", ids.tolist())
        with self.catalog.lock:
            return [(record, cosine) for record, cosine in self.contents.nearest(embedding, COMPARED) if cosine >= least]

    def _text(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    def used(self, key: str, tokens: int) -> None:
        """Count the tokens that an entry saved in a request."""
        self.catalog.used(key, tokens)
        with self.catalog.lock:
            self._hits += 1
            self._saved_tokens += tokens

    def ids(self) -> list[str]:
        """Return the ids of all entries."""
        with self.catalog.lock:
            return list(self.contents.entries)

    def delete(self, key: str) -> bool:
        return key in self.contents.entries and super().delete(key)

    def provenance(self, key: str) -> dict[str, Any] | None:
        """Return the provenance that an entry was added with, or None if no entry has this id."""
        entry = self.contents.entries.get(key)
        return None if entry is None else dict(entry.provenance)

    def prompt(self, key: str) -> str | None:
        """Return an entry's text, or None if no entry has this id."""
        entry = self.contents.entries.get(key)
        return None if entry is None else entry.text

    def refresh(self) -> None:
        super().refresh()
        if len(self.catalog.entries) > len(self.contents.entries):
            sentence = f"{self.catalog.blobs.place} also holds prompts of another model, tokenizer or encoder; they are of no use here."
            self.catalog.warn_once("foreign", sentence)

    def report(self) -> EntryReport:
        """Report what the library holds, and how much work it saved."""
        self.flush()
        self.refresh()
        keys = self.ids()
        counts: dict[str, Any] = {"entries": len(keys), "foreign": len(self.catalog.entries) - len(keys)}
        return EntryReport(hits=self._hits, saved_tokens=self._saved_tokens, **counts, **self.summary(keys))

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
        encoder: str | Callable[[list[str]], Any] | None = None,
        *,
        location: str | BlobStore = "memory",
        max_bytes: int | str | None = None,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        codec: KVCodec | None = None,
        **options: Any,
    ) -> Self:
        """Load a library that `save_pretrained` wrote.

        Args:
            folder_or_hub_id: A folder, or `"owner/name"`.
            model: The model that it was made for; another one is a `FingerprintMismatch`.
            tokenizer: The model's.
            encoder: The encoder that it was made with.
            location: See the class, also for `max_bytes`, `hot_bytes` and `time_to_live`.
            codec: The `KVCodec` of keys and values, which the folder names but does not hold; None if they are not coded.
            **options: Of `Artifact.from_pretrained`: `revision`, `token`, `cache_dir`, `local_files_only`.
        """
        packed = PackedLibrary.from_pretrained(folder_or_hub_id, model=compat.base_model(model), tokenizer=tokenizer, **options)
        limits: dict[str, Any] = {"max_bytes": max_bytes, "hot_bytes": hot_bytes, "time_to_live": time_to_live}
        if (digest := layout.codec_digest(packed.quantization)) is not None:
            quantization: Quantization = named_codec(codec, digest, "keys and values that were stored as codes")
        elif codec is None:
            quantization = layout.check_quantization(packed.quantization)
        else:
            stored = f"None, since keys and values are stored without a codec ({packed.quantization})"
            raise ConfigError.of("codec", stored, codec, "Leave it out.")
        library = cls(model, tokenizer, encoder, quantization=quantization, location=location, **limits)
        if library.encoder.name != packed.encoder:
            hint = "If you no longer have that encoder, make a new library: add() the prompts, which the folder has as text."
            raise ConfigError.of("encoder", f"the one that the library was made with, {packed.encoder!r}", library.encoder.name, hint)
        for entry, tensors in packed.entries:
            if entry.embedding.shape != (library.encoder.dim,):
                shape = entry.embedding.shape
                raise ArtifactError(f"{folder_or_hub_id}: it holds an embedding of the shape {shape}. Make the library anew.")
            record = replace(entry.record, scope=library.scope)
            library.catalog.put([NewBlob(record.key, {**record.to_dict(), **entry.head()}, tensors)])
        library.refresh()
        return library

    def _packed(self) -> PackedLibrary:
        self._require_model()
        self.flush()
        entries = []
        for key, entry in list(self.contents.entries.items()):
            self.catalog.blobs.begin()  # each is a request of its own
            entries += [(entry, tensors) for tensors in self.load({key: entry.record}).values()]
        packed = PackedLibrary(entries, layout.name_of(self.quantization), self.encoder.name)
        # Without samples: keys and values are of one precision.
        packed.fingerprint = replace(ModelFingerprint.of(self.model, self.tokenizer), samples=[])
        return packed

    def _require_model(self) -> None:
        if refusal := self.refusal(identity_of(self.model)):
            raise FingerprintMismatch(f"{refusal} Make a library for the model as it is, or bring back what it had.")

    def refusal(self, identity: Identity) -> str:
        """Say why a model can't reuse entries, adapters included; "" if it can."""
        changed = "The model has changed since the library was made, or other adapters are active."
        return identity.reason or ("" if identity.digest == self.digest else changed)

    def __len__(self) -> int:
        return len(self.contents.entries)

    def __repr__(self) -> str:
        return f"WarmStartLibrary({len(self)} prompts, {layout.label_of(self.quantization)}, {self.catalog.blobs.place!r})"
