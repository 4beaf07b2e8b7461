"""A library as an artifact: all entries in one folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.reuse.layout import check, codec_digest
from hf_kvcaches.reuse.tokens import Ids, as_ids
from hf_kvcaches.warmstart.entries import Embedding


class PackedEntry(NamedTuple):
    """A prompt with its keys and values, in a form of `layout`."""

    ids: Ids
    text: str
    embedding: Embedding
    provenance: Mapping[str, Any]
    form: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


class PackedLibrary(Artifact):
    """A library of prompts with their keys and values, to start similar prompts from.

    Args:
        quantization: The name of how these are stored.
        encoder: The name of what made the embeddings.
    """

    artifact_type = "warm-start-library"
    format_version = 4

    def __init__(self, entries: tuple[PackedEntry, ...], quantization: str | None, encoder: str) -> None:
        self.entries, self.quantization, self.encoder = entries, quantization, encoder

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for number, entry in enumerate(self.entries):
            arrays = {"ids": torch.from_numpy(entry.ids.astype(np.int64)), "embedding": torch.from_numpy(entry.embedding.copy())}
            tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in (arrays | dict(entry.tensors)).items()}
        return tensors

    def metadata(self) -> dict[str, Any]:
        prompts = [{"text": entry.text, "provenance": dict(entry.provenance), "form": dict(entry.form)} for entry in self.entries]
        return {"quantization": self.quantization, "encoder": self.encoder, "prompts": prompts}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = tensor
        quantization = metadata["quantization"]
        if quantization not in ("int8", "int4", None) and codec_digest(str(quantization)) is None:
            raise ArtifactError(f"The stored library has the quantization {str(quantization)[:100]!r}. Make it anew.")
        entries = []
        for number, prompt in enumerate(metadata["prompts"]):
            parts, form = groups[str(number)], dict(prompt["form"])
            ids, embedding = parts.pop("ids"), parts.pop("embedding")
            if form["quantization"] != quantization or ids.ndim != 1 or len(ids) < 2 or ids.dtype != torch.int64 or int(ids.min()) < 0:
                raise ArtifactError(f"Prompt {number} does not fit the stored library. Make it anew.")
            check(parts, form, len(ids))
            vector: Embedding = embedding.float().numpy()
            entries.append(PackedEntry(as_ids(ids), str(prompt["text"]), vector, dict(prompt["provenance"]), form, parts))
        return cls(tuple(entries), quantization, str(metadata["encoder"]))

    def describe_calibration(self) -> str:
        return f"{len(self.entries)} prompts; encoder: {self.encoder}. Holds the prompts as text."
