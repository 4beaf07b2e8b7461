"""`Adapters`: maps of slots' keys and values, and `TrainedAdapters`, the artifact that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedModel

from hf_kvcaches.core.hub import Artifact, markdown_table
from hf_kvcaches.core.identity import fingerprint_of
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.warmstart.paper.slots import LayerSlots, Slots


@dataclass(frozen=True, eq=False)
class Adapters:
    """For each layer and key head a map of slots' keys and one of their values, `k @ A`.

    "CP-KVP", section 2.2. **Departs from the paper**: keys are mapped relative to the prompt's end (rotated back by its length), so that
    prompts of all lengths share a map and a shift may come before or after it. Exact tokens among the slots go through the maps, too.

    Args:
        keys: For each layer (kv_heads, head_dim, head_dim), float32.
        values: For each layer (kv_heads, value_dim, value_dim), float32.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Adapters:
        """Restore what `tensors` returned."""
        names = [[f"{side}.{layer}" for layer in range(len(tensors) // 2)] for side in ("keys", "values")]
        if tensors.keys() != {*names[0], *names[1]} or any(map.ndim != 3 or map.shape[1] != map.shape[2] for map in tensors.values()):
            raise ArtifactError(f"Stored adapters of { ({name: tuple(map.shape) for name, map in tensors.items()}) } fit no model.")
        return cls(*(tuple(map(tensors.__getitem__, side)) for side in names))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the maps by name, for storing."""
        return {f"{side}.{layer}": own for side in ("keys", "values") for layer, own in enumerate(getattr(self, side))}

    def apply(self, slots: Slots, geometries: Sequence[RotaryGeometry]) -> Slots:
        """Map the keys and values of slots."""
        layers: list[LayerSlots] = []
        for layer, geometry, key_map, value_map in zip(slots.layers, geometries, self.keys, self.values, strict=True):
            keys = geometry.shift(layer.keys[None].float(), -slots.length) @ key_map.to(layer.keys.device)
            keys = geometry.shift(keys, slots.length)[0].to(layer.keys.dtype)
            values = (layer.values.float() @ value_map.to(layer.values.device)).to(layer.values.dtype)
            layers.append(layer._replace(keys=keys, values=values))
        return Slots(layers, slots.length)


@dataclass(frozen=True, eq=False)
class TrainedAdapters(Artifact):
    """Adapters with what they were made for: a library must have the same slots, layout and tail.

    Args:
        adapters: For `SummaryLibrary(adapters=...)`.
        slots: That they map.
        layout: Of the slots.
        tail: Tokens that are recomputed behind the slots.
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
        """Return the adapters if they were made for such summaries of a model, which has no PEFT wrapper."""
        settings, expected = (self.slots, self.layout, self.tail), (slots, layout, tail)
        if settings != expected:
            raise ConfigError.of("adapters", f"those for slots, layout and tail {expected}", settings, "Train others.")
        if self.fingerprint is not None:
            self.fingerprint.require_model(fingerprint_of(model), "The adapters")
        return self.adapters
