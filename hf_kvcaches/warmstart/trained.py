"""Adapters as an artifact: trained once, saved, shared and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedModel

from hf_kvcaches.core._model_card import markdown_table
from hf_kvcaches.core.artifact import Artifact
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.warmstart.adapters import Adapters


@dataclass(frozen=True, eq=False)
class TrainedAdapters(Artifact):
    """Adapters with what they were made for: a library must have the same slots, layout and tail.

    Args:
        adapters: For `WarmStartLibrary(adapters=...)`.
        slots: That they map.
        layout: Of the slots.
        tail: Tokens that are run behind the slots.
        measured: One dict of measurements for each way in which adapters were made.
    """

    artifact_type: ClassVar[str] = "slot-adapters"
    format_version: ClassVar[int] = 1

    adapters: Adapters
    slots: int
    layout: str
    tail: int
    measured: tuple[dict[str, Any], ...] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.contiguous().cpu() for name, tensor in self.adapters.tensors().items()}

    def metadata(self) -> dict[str, Any]:
        return {"slots": self.slots, "layout": self.layout, "tail": self.tail, "measured": list(self.measured)}

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> Self:
        return cls(Adapters.of(tensors), **{**metadata, "measured": tuple(metadata["measured"])})

    def describe_calibration(self) -> str:
        return f"For {self.slots} slots, layout {self.layout!r}, the last {self.tail} tokens run.\n\n{markdown_table(self.measured)}"

    def checked(self, model: PreTrainedModel, slots: int, layout: str, tail: int) -> Adapters:
        """The adapters, if they are for such summaries of a model.

        Args:
            model: Without a PEFT wrapper.
            slots: Of the summaries.
            layout: Likewise.
            tail: Likewise.
        """
        made, wanted = (self.slots, self.layout, self.tail), (slots, layout, tail)
        if made != wanted:
            raise ConfigError.of("adapters", f"those for slots, layout and tail {wanted}", made, "Train others with train_compressor.py.")
        if self.fingerprint is not None:
            self.fingerprint.require_model(model, "The adapters")
        return self.adapters
