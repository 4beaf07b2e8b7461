"""A small artifact for tests, in a module that child processes import quickly."""

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import save_file

from hf_kvcaches.core.files import FILE_NAME, Artifact, read_file
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


class OtherKind(Basis):
    artifact_type: ClassVar[str] = "other-kind"


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


def rewrite(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> None:
    """Edits an artifact as another program that knows the format would: with a checksum that fits."""
    content = read_file(folder / FILE_NAME)
    forge(folder / FILE_NAME, json.dumps(content.header | changes), content.tensors if tensors is None else tensors)


def forge(path: Path, header: str, tensors: dict[str, torch.Tensor], version: str = "2") -> None:
    """Writes a container by safetensors alone, as `core/files.py` describes it.

    Args:
        header: Any text.
    """
    hasher = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        hasher.update(json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    metadata = {"hf_kvcaches": version, "header": header, "sha256": hasher.hexdigest()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, metadata)
