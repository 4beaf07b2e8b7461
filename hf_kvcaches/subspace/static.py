"""The static mode: one basis for each head, from calibration."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from hf_kvcaches.core.calls import Call
from hf_kvcaches.core.passes import Pass, Passes
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.subspace.layer import SubspaceLayer
from hf_kvcaches.subspace.maps import Grouping, LayerMaps, LayerSource
from hf_kvcaches.subspace.numbering import Arrival, Span
from hf_kvcaches.subspace.store import Settings


class StaticLayer(SubspaceLayer):
    """Projects all tokens on the bases that it was given."""

    def __init__(
        self, settings: Settings, source: LayerSource, geometry: RotaryGeometry | None, passes: Passes[Pass], config: PreTrainedConfig
    ) -> None:
        super().__init__(settings, geometry, passes, config, source.groups)
        self.source = source

    @property
    def maps(self) -> LayerMaps:
        """The bases, where and how the layer needs them."""
        return self.source.on(self.settings.bases_dtype or self.dtype, self.device, self.settings.coefficients == "int8")

    @property
    def grouping(self) -> Grouping:
        return self.maps.grouping

    def decoders(self, group: int) -> list[torch.Tensor]:
        maps = self.maps.groups[group]
        return [maps.key_decode, maps.value_decode]

    def bases_of(self, group: int, tiles: Span) -> list[torch.Tensor | None]:
        return [None, None]

    def encode(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, arrival: Arrival) -> None:
        coefficients = arrival.span("coefficients", self.count)
        if not coefficients.longest:
            return
        keys, values = self.states(keys, values, arrival.numbers, coefficients.moved(self.settings.sinks))
        maps = self.maps
        for index, (group, heads) in enumerate(zip(maps.groups, maps.grouping.heads, strict=True)):
            for side, states, encode in (("key", keys, group.key_encode), ("value", values, group.value_encode)):
                own = states if len(heads) == states.shape[1] else states[:, list(heads)]
                self.write(f"{side}_{{}}_{index}", torch.matmul(own.to(encode.dtype), encode.mT).to(self.dtype), coefficients)

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        """The declared tensors, and the bases, which all caches of a model share."""
        bases = self.maps.tensors() if self.is_initialized else {}
        return super().owned_tensors() | {f"bases.{name}": tensor for name, tensor in bases.items()}

    def _move(self, device: torch.device | str) -> None:
        # The bases stay: other caches use them.
        for name, tensor in super().owned_tensors().items():
            setattr(self, name, tensor.to(device, non_blocking=True))
