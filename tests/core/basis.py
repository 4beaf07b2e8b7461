"""A small artifact for tests, in a module that child processes import quickly."""

from __future__ import annotations

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
