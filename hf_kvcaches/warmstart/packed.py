"""A library as an artifact: all entries and settings in one folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.reuse.layout import check, is_coded
from hf_kvcaches.warmstart.entries import Entry

# The settings of a library, each with a check of its value.
_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "slots": lambda value: type(value) is int and value >= 0,
    "layout": lambda value: value in ("salient", "paper"),
    "tail": lambda value: type(value) is int and value >= 1,
    "full": lambda value: type(value) is bool,
    "quantization": lambda value: value in ("int8", "int4", None) or is_coded({"quantization": value}),
    "correct_positions": lambda value: type(value) is bool,
}


class PackedLibrary(Artifact):
    """A library of prompts with their states, to start similar prompts from; with the tensors of its adapters, if it has any."""

    artifact_type = "warm-start-library"
    format_version = 3

    def __init__(
        self, entries: tuple[Entry, ...], settings: dict[str, Any], encoder: str, adapters: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.entries, self.settings, self.encoder, self.adapters = entries, settings, encoder, dict(adapters or {})

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"adapters.{name}": tensor for name, tensor in self.adapters.items()}
        for number, entry in enumerate(self.entries):
            arrays = {"ids": torch.tensor(entry.ids, dtype=torch.int32), "embedding": torch.from_numpy(entry.embedding.copy())}
            tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in (arrays | dict(entry.tensors)).items()}
        return tensors

    def metadata(self) -> dict[str, Any]:
        prompts = [{"text": entry.text, "provenance": dict(entry.provenance), "stored": dict(entry.stored)} for entry in self.entries]
        return {"settings": self.settings, "encoder": self.encoder, "prompts": prompts}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = tensor
        settings = dict(metadata["settings"])
        if set(settings) != set(_SETTINGS) or not all(valid(settings[name]) for name, valid in _SETTINGS.items()):
            raise ArtifactError(f"The stored library has the settings {str(settings)[:200]}. Make it anew.")
        entries = []
        for number, prompt in enumerate(metadata["prompts"]):
            parts, stored, provenance = groups[str(number)], dict(prompt["stored"]), dict(prompt["provenance"])
            ids, embedding = parts.pop("ids").tolist(), parts.pop("embedding").numpy()
            if stored:
                if (kind := stored["quantization"]) != settings["quantization"]:
                    raise ArtifactError(f"Prompt {number} is stored as {kind}, and the library as {settings['quantization']}.")
                check({name.removeprefix("full."): tensor for name, tensor in parts.items() if name.startswith("full.")}, stored, len(ids))
            entries.append(Entry(prompt["text"], ids, embedding, parts, provenance, stored))
        return cls(tuple(entries), settings, metadata["encoder"], groups.get("adapters"))

    def describe_calibration(self) -> str:
        return f"{len(self.entries)} prompts, {self.settings['slots']} slots each; encoder: {self.encoder}. Holds the prompts as text."
