"""A small artifact for tests, in a module that child processes import quickly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from hf_kvcaches.core.artifact import Artifact
from hf_kvcaches.core.fingerprint import ModelFingerprint


class Basis(Artifact):
    """A basis for tests | with a bar.

    Not in the card.
    """

    artifact_type: ClassVar[str] = "test-basis"
    format_version: ClassVar[int] = 3

    def __init__(self, content: dict[str, torch.Tensor], notes: dict[str, Any] | None = None, fingerprint: ModelFingerprint | None = None):
        self.content, self.notes, self.fingerprint = content, notes or {}, fingerprint

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.content

    def metadata(self) -> dict[str, Any]:
        return self.notes

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        return cls({"basis": tensors.pop("basis"), **tensors}, metadata)

    def describe_calibration(self) -> str:
        return "On 3 texts of the sea, très bien."


MANIFEST = "kvcache_artifact.json"


class OtherKind(Basis):
    artifact_type: ClassVar[str] = "other-kind"


class NextBasis(Basis):
    format_version: ClassVar[int] = 4


def basis(filled_with: float = 1.0, **notes: Any) -> Basis:
    return Basis({"basis": torch.full((3, 4), filled_with)}, notes)


def same(one: Basis, other: Basis) -> bool:
    same_names = sorted(one.content) == sorted(other.content)
    tensors = all(
        torch.equal(value, other.content[name]) and value.dtype == other.content[name].dtype for name, value in one.content.items()
    )
    return same_names and tensors and one.notes == other.notes and one.fingerprint == other.fingerprint


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def tensor_file(folder: Path) -> Path:
    return folder / json.loads((folder / MANIFEST).read_text())["tensors"]["file"]


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """Edits the manifest as another program that knows the format would: with a checksum that fits."""
    from hf_kvcaches.core.artifact import _checksum

    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.update(changes)
    manifest["checksum"] = _checksum(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
