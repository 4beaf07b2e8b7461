"""`WarmStartLibrary`: prompts whose state later ones may start from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint, digest_of_tokenizer
from hf_kvcaches.core.identity import Identity, identity_of, require_identity
from hf_kvcaches.core.splicing import codec
from hf_kvcaches.core.splicing.codec import LayerStates, Quantization
from hf_kvcaches.core.splicing.rotation import Rotation, rotation_of
from hf_kvcaches.core.splicing.tokens import Ids, as_ids
from hf_kvcaches.errors import (
    ArtifactError,
    ConfigError,
    FingerprintMismatch,
    UnsupportedError,
    require_choice,
    require_tokenizer,
    whole_number,
)
from hf_kvcaches.stores.blobs import TIMEOUT
from hf_kvcaches.stores.blobs_format import array_as_text
from hf_kvcaches.warmstart.encoders import Encoder, encoder_of
from hf_kvcaches.warmstart.entries import EntryStore
from hf_kvcaches.warmstart.entry import Entry, EntryReport, Facts
from hf_kvcaches.warmstart.packed import PackedLibrary
from hf_kvcaches.warmstart.prompts import Prompt, listed, token_ids
from hf_kvcaches.warmstart.reading import read_prompt
from hf_kvcaches.warmstart.summaries.adapters import Adapters, TrainedAdapters
from hf_kvcaches.warmstart.summaries.compressor import SlotCompressor
from hf_kvcaches.warmstart.summaries.positions import PositionCorrection
from hf_kvcaches.warmstart.summaries.slots import Slots

Full = Literal["int8", "int4", "exact"] | None

_SLOTS, _FULL = "slots.", "full."


class Neighbour(NamedTuple):
    """An entry that resembles a prompt.

    Args:
        similarity: A cosine, or None where it was found by its tokens.
    """

    key: str
    ids: Ids
    similarity: float | None = None


class WarmStartLibrary:
    """Prompts with what a model made of them: a summary in slots, and all keys and values unless `full=None`.

    Any thread may use it, and processes may share a folder or a Redis. Whoever can write there can make a model say anything, so keep it
    as private as the weights; entries also hold their prompts as text.

    Args:
        model: A transformers model. Entries are of use to it alone, with the adapters that are active now.
        tokenizer: The model's.
        slots: For each layer and key head of a summary; 0 for none.
        encoder: What makes prompts comparable: `"model"` or None (the model's input embeddings, nothing to download), `"hidden"`, the name
            or folder of a sentence-transformers model, or a function from texts to vectors.
        layout: Of the slots: `"salient"`, or `"paper"`.
        tail: The last tokens of a prompt, which no slot stands for and which are run behind the slots.
        full: How all keys and values are stored: `"int8"`, `"int4"`, `"exact"`, or None for slots only.
        location: `"memory"`, `"disk:FOLDER"` or `"redis://host:port/db"`.
        max_bytes: The most that all entries may take, a number or such as `"4GiB"`; above it, those go first that saved least work a byte.
        timeout: Seconds that all look-ups of a request may wait for Redis together, and the longest that one answer may take.
        adapters: Maps for pooled slots, from `scripts/train_compressor.py`, or None.
        correct_positions: Experimental. For models with learned positions (GPT-2), where keys can't be turned: slots are moved by what a
            position adds to a key, as far as that is linear.
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
        full: Full = "int8",
        location: str = "memory",
        max_bytes: int | str | None = None,
        timeout: float = TIMEOUT,
        adapters: TrainedAdapters | Adapters | None = None,
        correct_positions: bool = False,
    ) -> None:
        require_tokenizer(tokenizer)
        if tokenizer is None or not callable(getattr(tokenizer, "decode", None)):
            raise ConfigError.of("tokenizer", "the model's tokenizer", type(tokenizer).__name__, "Prompts are compared as text, too.")
        tail = whole_number("tail", tail, 1, hint="The last token is always run.")
        slots = whole_number("slots", slots, 0, "a number of slots, 0 for none")
        require_choice("full", full, ("int8", "int4", "exact", None))
        if not slots and full is None:
            raise ConfigError("slots=0 and full=None: nothing would be stored. Keep one of them.")
        self.model, self.tokenizer = compat.base_model(model), tokenizer
        compat.decoder_layers(self.model)  # or a refusal, before anything is stored
        self.rotation: Rotation = rotation_of(compat.decoder_config(self.model.config))
        self.correction = PositionCorrection.of_model(self.model) if correct_positions and slots else None
        if slots and not self.rotation.turns and self.correction is None:
            raise UnsupportedError(f"slots: {self.rotation.why}. Use slots=0, which reuses common starts of prompts.")
        self.slots, self.layout, self.tail, self.full = slots, layout, tail, full
        if isinstance(adapters, TrainedAdapters):
            adapters = adapters.checked(self.model, slots, layout, tail)
        self.compressor = SlotCompressor(slots, layout, adapters, self.rotation.layers) if slots else None
        self.encoder = encoder_of(encoder, self.model, tokenizer)
        self.location = location
        self.digest = require_identity(self.model, "The library").digest
        self.entries = EntryStore(location, self._scope(), max_bytes, timeout)

    def _scope(self) -> str:
        tokenizer = digest_of_tokenizer(self.tokenizer)
        parts = ("warm start 2", self.digest, tokenizer, self.encoder.name, self.slots, self.layout, self.tail, self.full)
        adapters = "" if self.compressor is None or self.compressor.adapters is None else _digest_of(self.compressor.adapters.tensors())
        return hashlib.blake2b("|".join(map(str, (*parts, adapters))).encode(), digest_size=16).hexdigest()

    def add(self, prompts: Prompt | Sequence[Prompt], provenance: Mapping[str, Any] | None = None) -> list[str | None]:
        """Runs prompts and stores what the model made of them.

        Args:
            prompts: One or several: texts, tokenised with special tokens as the tokenizer has them, or token ids.
            provenance: Where they are from, as JSON can hold it.

        Returns:
            Their ids; None for one that did not stay because of `max_bytes` or a store that failed. One that is there already is kept.
        """
        self._require_same_model()
        return [self._add(prompt, dict(provenance or {})) for prompt in listed(prompts)]

    def _add(self, prompt: Prompt, provenance: dict[str, Any]) -> str | None:
        ids = token_ids(prompt, self.model, self.tokenizer)
        if len(ids) <= self.tail:
            raise ConfigError.of("prompts", f"at least {self.tail + 1} tokens each", len(ids))
        text = prompt if isinstance(prompt, str) else self.text(ids)
        present = self.entries.exact(ids)
        if present is not None:
            return present
        states = read_prompt(self.model, torch.tensor([ids], device=compat.input_device(self.model)))
        tensors: dict[str, torch.Tensor] = {}
        if self.compressor is not None:
            before = [LayerStates(keys[:, : -self.tail], values[:, : -self.tail]) for keys, values in states.layers]
            keys, values = zip(*before, strict=True)
            made = self.compressor.compress(keys, values, states.queries, len(ids), states.scaling).to("cpu")
            tensors |= {_SLOTS + name: tensor for name, tensor in made.tensors().items()}
        stored: dict[str, Any] | None = None
        if self.full is not None:
            quantization: Quantization = None if self.full == "exact" else self.full
            packed, stored = codec.encode(states.layers, {}, quantization)
            tensors |= {_FULL + name: tensor for name, tensor in packed.items()}
        # In the head, so that entries can be compared token by token without reading their tensors.
        facts = {"ids": array_as_text(as_ids(ids), "<u4"), "stored": stored, "user": provenance}
        return self.entries.put(Entry(text, ids, self._encoded(text, ids), tensors, facts))

    def _encoded(self, text: str, ids: Sequence[int]) -> Any:
        return self.encoder.encode([text], [ids])[0]

    def text(self, ids: Sequence[int]) -> str:
        """Tokens as they are compared.

        Args:
            ids: Tokens.
        """
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def refresh(self) -> None:
        """Learns what other processes added and deleted."""
        self.entries.refresh()

    def _facts(self, key: str | None) -> Facts | None:
        head = None if key is None else self.entries.head(key)
        return None if head is None else head.facts

    def exact(self, ids: Ids) -> Neighbour | None:
        """The entry with exactly these tokens.

        Args:
            ids: Tokens.
        """
        key = self.entries.exact(ids.tolist())
        return None if key is None or self._facts(key) is None else Neighbour(key, ids)

    def beginning(self, ids: Ids) -> tuple[Neighbour | None, int]:
        """The entry that begins like a prompt for longest, and for how many tokens.

        Args:
            ids: Tokens.
        """
        key, shared = self.entries.beginning(ids)
        facts = self._facts(key)
        return (None, 0) if key is None or facts is None else (Neighbour(key, facts.ids), shared)

    def near(self, ids: Ids, text: str | None = None, k: int = 3) -> list[Neighbour]:
        """The most similar entries, the most similar first.

        Args:
            ids: Tokens.
            text: Their text, if at hand.
            k: How many.
        """
        tokens = ids.tolist()
        if text is None:
            text = self.text(tokens) if self.encoder.reads_text else ""
        nearest = self.entries.near(self._encoded(text, tokens), k)
        return [Neighbour(key, facts.ids, cosine) for key, cosine in nearest if (facts := self._facts(key)) is not None]

    def slots_of(self, key: str) -> Slots | None:
        """An entry's summary; None where there is none (any more).

        Args:
            key: Its id.
        """
        head = self.entries.head(key) if self.slots else None
        if head is None:
            return None
        slots: list[Slots] = []
        # Damaged slots are noticed when they are put together.
        self.entries.get(key, lambda tensors: slots.append(Slots.of(_named(tensors, _SLOTS), head.length)))
        return slots[0] if slots else None

    def full_of(self, key: str) -> tuple[Mapping[str, Any], dict[str, torch.Tensor]] | None:
        """An entry's keys and values, as `codec` packs them; None where there are none (any more).

        Args:
            key: Its id.
        """
        facts = self._facts(key)
        if facts is None or facts.stored is None:
            return None
        stored, tokens = facts.stored, len(facts.ids)
        entry = self.entries.get(key, lambda tensors: codec.check(_named(tensors, _FULL), stored, tokens))
        return None if entry is None else (stored, _named(entry.tensors, _FULL))

    def moved(self, slots: Slots, length: int) -> Slots:
        """Slots at the end of another prompt.

        Args:
            slots: Of an entry.
            length: Tokens of the other prompt.
        """
        delta = length - slots.length
        return slots.shifted(delta, self.rotation.layers) if self.correction is None else self.correction.shifted(slots, delta)

    def delete(self, key: str) -> bool:
        """Deletes an entry, and returns whether it was there.

        Args:
            key: Its id.
        """
        return self.entries.delete(key)

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keeps an entry from eviction.

        Args:
            key: Its id.
            pinned: False lets it go again.
        """
        self.entries.pin(key, pinned)

    def ids(self) -> list[str]:
        """Of all entries."""
        return self.entries.ids()

    def provenance(self, key: str) -> dict[str, Any] | None:
        """What was said of an entry when it was added, or None where there is none.

        Args:
            key: Its id.
        """
        head = self.entries.head(key)
        return None if head is None else dict(head.provenance["user"])

    def prompt(self, key: str) -> str | None:
        """An entry's text, or None where there is none.

        Args:
            key: Its id.
        """
        head = self.entries.head(key)
        return None if head is None else head.text

    def report(self) -> EntryReport:
        """What the library holds, and what it was good for."""
        return self.entries.report()

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes all entries and settings into a folder, as an artifact.

        Args:
            folder: Where to.
        """
        self._packed().save_pretrained(folder)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Uploads all entries and settings to a Hub repository, and returns the commit's address. Entries hold their prompts as text.

        Args:
            repo_id: `"owner/name"`.
            **options: Of `Artifact.push_to_hub`: `private`, `token`, `commit_message`, `revision`.
        """
        return self._packed().push_to_hub(repo_id, **options)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        model: Any,
        tokenizer: Any,
        encoder: str | Callable[[list[str]], Any] | Encoder | None = None,
        *,
        location: str = "memory",
        max_bytes: int | str | None = None,
        **options: Any,
    ) -> Self:
        """Loads a library that `save_pretrained` wrote.

        Args:
            folder_or_hub_id: A folder, or `"owner/name"`.
            model: The model that it was made for; another one is a `FingerprintMismatch`.
            tokenizer: Its tokenizer.
            encoder: The one that it was made with; None for that of the model.
            location: Where the entries go.
            max_bytes: See the class.
            **options: Of `Artifact.from_pretrained`: `revision`, `token`, `cache_dir`, `local_files_only`.
        """
        packed = PackedLibrary.from_pretrained(folder_or_hub_id, model=compat.base_model(model), tokenizer=tokenizer, **options)
        adapters = Adapters.of(packed.adapters) if packed.adapters else None
        library = cls(model, tokenizer, encoder=encoder, location=location, max_bytes=max_bytes, adapters=adapters, **packed.settings)
        if library.encoder.name != packed.encoder:
            raise ConfigError.of("encoder", f"the one that the library was made with, {packed.encoder!r}", library.encoder.name)
        try:
            for entry in packed.entries:
                library.entries.put(entry)
        except ConfigError as error:
            raise ArtifactError(f"{folder_or_hub_id}: it holds what is no entry: {error}") from error
        return library

    def _packed(self) -> PackedLibrary:
        self._require_same_model()
        found = list(self.entries.all())
        adapters = {} if self.compressor is None or self.compressor.adapters is None else self.compressor.adapters.tensors()
        settings = {"slots": self.slots, "layout": self.layout, "tail": self.tail, "full": self.full}
        settings["correct_positions"] = self.correction is not None
        packed = PackedLibrary(tuple(found), settings, self.encoder.name, adapters)
        packed.fingerprint = ModelFingerprint.of(self.model, self.tokenizer)
        return packed

    def why_not(self, identity: Identity) -> str:
        """Why entries are of no use to a model; "" where they are.

        Args:
            identity: Of the model, with its adapters.
        """
        changed = "The model has changed since the library was made, or other adapters are active."
        return identity.reason or ("" if identity.digest == self.digest else changed)

    def _require_same_model(self) -> None:
        why_not = self.why_not(identity_of(self.model))
        if why_not:
            raise FingerprintMismatch(f"{why_not} Make a library for the model as it is, or bring back what it had.")

    def close(self) -> None:
        """Lets go of files and connections."""
        self.entries.close()

    def __len__(self) -> int:
        return len(self.entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copied cache goes on with the same library.
        return self

    def __repr__(self) -> str:
        return f"WarmStartLibrary({len(self)} prompts, {self.slots} slots, full={self.full!r}, {self.location!r})"


def _named(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        hasher.update(name.encode() + tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
