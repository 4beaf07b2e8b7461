"""Prompts: as users give them, with their keys and values; stored, by their tokens and embeddings; and all of a library in one folder."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.files import Artifact, part_of
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.reuse.index import Ids, Record, array_as_text, array_of_text, as_ids, chain_of, common_prefix
from hf_kvcaches.reuse.layer import PlainCache
from hf_kvcaches.reuse.layout import LayerStates, check, check_form, codec_digest
from hf_kvcaches.reuse.partial import run_span
from hf_kvcaches.reuse.store import CatalogReport
from hf_kvcaches.stores.blobs import BlobHead
from hf_kvcaches.warmstart.encoders import Embedding

Prompt = str | Sequence[int] | torch.Tensor

_KIND = "warm-start entry, version 3"


def rows_of(prompts: Prompt | Sequence[Prompt], model: PreTrainedModel, tokenizer: Any) -> list[tuple[list[int], str | None]]:
    """Return the token ids of one or several prompts, each with its text if that was given; a text gets special tokens."""
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__len__"):
        raise ConfigError.of("prompts", "texts or rows of token ids", type(prompts).__name__, "Of a tokenizer's output, add input_ids.")
    single = isinstance(prompts, str) or (isinstance(prompts, torch.Tensor) and prompts.ndim == 1)
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", 1 << 31)
    rows = list[tuple[list[int], str | None]]()
    prompt: Any
    for prompt in [prompts] if single or (len(prompts) and isinstance(prompts[0], int)) else prompts:
        if isinstance(prompt, str):
            rows.append((list(tokenizer(prompt, verbose=False)["input_ids"]), prompt))
            continue
        try:
            ids = [index(token) for token in (prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt)]
        except TypeError as error:
            raise ConfigError.of("prompts", "texts or rows of token ids", type(prompt).__name__) from error
        if not all(0 <= token < vocabulary for token in ids):
            raise ConfigError.of("prompts", f"token ids from 0 to {vocabulary - 1}", f"{min(ids)} to {max(ids)}")
        rows.append((ids, None))
    return rows


@torch.no_grad()
def prompt_states(model: PreTrainedModel, ids: Sequence[int]) -> list[LayerStates]:
    """Run a prompt, and return its keys and values in each layer."""
    cache, tokens = PlainCache(model), torch.tensor([list(ids)], device=compat.input_device(model))
    run_span(model, cache, tokens, torch.arange(len(ids), device=tokens.device))
    return [LayerStates(layer.keys[0], layer.values[0]) for layer in cache.layers]


@dataclass(frozen=True)
class EntryReport(CatalogReport):
    """What a library holds, and what this process did with it."""

    entries: int  # of this library's scope
    foreign: int  # entries of other scopes
    hits: int  # how often an entry was reused
    saved_tokens: int  # that were not computed


@dataclass(frozen=True, eq=False)
class Entry:
    """A stored prompt without its keys and values."""

    record: Record
    text: str
    embedding: Embedding  # (dim,), of length 1
    provenance: Mapping[str, Any]  # where it is from, as JSON values

    def head(self) -> dict[str, Any]:
        """What the head of its blob has beside the record."""
        return {"kind": _KIND, "text": self.text, "embedding": array_as_text(self.embedding, "<f4"), "provenance": dict(self.provenance)}


def record_of(scope: str, ids: Ids, form: dict[str, Any] | None = None) -> Record:
    """Return the record of a whole prompt."""
    return Record(scope, ids, chain_of(ids[:0]).hexdigest(), chain_of(ids).hexdigest(), 0, ids[:0], form=form or {})


class EntryContents:
    """Entries of one scope, as the `Contents` of a catalog."""

    def __init__(self, scope: str, dim: int) -> None:
        self.scope, self._dim = scope, dim
        self.entries: dict[str, Entry] = {}
        # Tokens and id of each entry, sorted.
        self._order: list[tuple[bytes, str]] = []
        # The embeddings of all entries in their order, and room for more, so that no look-up copies them: (capacity, dim). None after a
        # removal, until the next look-up: many removals in a row copy them once.
        self._embeddings: Embedding | None = np.empty((64, dim), np.float32)

    def add(self, blobs: Sequence[BlobHead]) -> dict[str, int]:
        tokens: dict[str, int] = {}
        for key, head, _ in blobs:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError):
                record = Record.from_dict(head)
                if head["kind"] != _KIND or record.key != key:
                    continue
                if record.scope == self.scope:
                    check_form(record.form)
                    embedding = array_of_text(head["embedding"], "<f4")
                    if embedding.shape != (self._dim,) or not abs(float(np.linalg.norm(embedding)) - 1) <= 1e-3:
                        continue
                    entry, count = Entry(record, str(head["text"]), embedding, dict(head["provenance"])), len(self.entries)
                    if (rows := self._embeddings) is not None:
                        if count == len(rows):
                            self._embeddings = rows = np.concatenate((rows, np.empty_like(rows)))
                        rows[count] = embedding
                    self.entries[key] = entry
                    insort(self._order, (_sortable(record.ids), key))
                tokens[key] = len(record)
        return tokens

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key in self.entries:
                self._embeddings = None  # first, for an interrupt
                entry = self.entries.pop(key)
                del self._order[bisect_left(self._order, (_sortable(entry.record.ids), key))]

    def beginning(self, ids: Ids) -> tuple[Record | None, int]:
        """Return the record that shares the longest prefix with a prompt, and how many tokens that is."""
        place = bisect_left(self._order, (_sortable(ids), ""))
        best, longest = None, 0
        # It is one of the two neighbours in the order.
        for _, key in self._order[max(0, place - 1) : place + 1]:
            record = self.entries[key].record
            if (shared := common_prefix(record.ids, ids)) > longest:
                best, longest = record, shared
        return best, longest

    def nearest(self, embedding: Embedding, count: int) -> list[tuple[Record, float]]:
        """Return the records with the highest cosines, the highest first; among 20,000 prompts in some milliseconds."""
        if not (entries := list(self.entries.values())):
            return []
        if self._embeddings is None:
            self._embeddings = np.stack([entry.embedding for entry in entries])
        cosines, count = self._embeddings[: len(entries)] @ embedding, min(count, len(entries))
        return [(entries[best].record, float(cosines[best])) for best in np.argpartition(-cosines, range(count))[:count]]


def _sortable(ids: Ids) -> bytes:
    # With the highest byte first, bytes have the order of the numbers.
    return ids.astype(">u4").tobytes()


class PackedLibrary(Artifact):
    """A library of prompts with their keys and values, to start similar prompts from.

    Args:
        entries: Each with its tensors, in a form of `layout`.
        quantization: The name of how these are stored.
        encoder: The name of what made the embeddings.
    """

    artifact_type = "warm-start-library"
    format_version = 4

    def __init__(self, entries: Sequence[tuple[Entry, Mapping[str, torch.Tensor]]], quantization: str | None, encoder: str) -> None:
        self.entries, self.quantization, self.encoder = entries, quantization, encoder

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for number, (entry, states) in enumerate(self.entries):
            arrays = {"ids": torch.from_numpy(entry.record.ids.astype(np.int64)), "embedding": torch.from_numpy(entry.embedding.copy())}
            tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in (arrays | dict(states)).items()}
        return tensors

    def metadata(self) -> dict[str, Any]:
        prompts = [{"text": entry.text, "provenance": dict(entry.provenance), "form": dict(entry.record.form)} for entry, _ in self.entries]
        return {"quantization": self.quantization, "encoder": self.encoder, "prompts": prompts}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        quantization = metadata["quantization"]
        if quantization not in ("int8", "int4", None) and codec_digest(str(quantization)) is None:
            raise ArtifactError(f"The stored library has the quantization {str(quantization)[:100]!r}. Make it anew.")
        entries = []
        for number, prompt in enumerate(metadata["prompts"]):
            states, form = part_of(tensors, str(number)), dict(prompt["form"])
            ids, embedding = states.pop("ids"), states.pop("embedding")
            if form["quantization"] != quantization or ids.ndim != 1 or len(ids) < 2 or ids.dtype != torch.int64 or int(ids.min()) < 0:
                raise ArtifactError(f"Prompt {number} does not fit the stored library. Make it anew.")
            check_form(form)
            check(states, form, len(ids))
            entry = Entry(record_of("", as_ids(ids), form), str(prompt["text"]), embedding.float().numpy(), dict(prompt["provenance"]))
            entries.append((entry, states))
        return cls(entries, quantization, str(metadata["encoder"]))

    def describe_calibration(self) -> str:
        return f"{len(self.entries)} prompts; encoder: {self.encoder}. Holds the prompts as text."
